"""Compares training steps of ours and of TRL's GRPOTrainer, side by side: `make bench`, or

    .venv/bin/python benchmarks/vs_trl.py [--scenario E1] [--rounds 3] [--skip-sweep --micro-batch 16]

First a gate: both sides must compute the same loss, gradient and log-probs on one fixed batch. Then it finds TRL's
fastest micro-batch, then steps of both sides alternate. Prints one JSON line per scenario on stdout. See
docs/performance.md.
"""

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from channel import Side
from measure import (
    ROOT,
    TRL_PYTHON,
    emit,
    gemm_peak_gflops,
    machine,
    peak_rss_of_tree,
    say,
    summary,
    versions_in,
)
from scenarios import (
    SCENARIOS,
    Scenario,
    Sizes,
    conversations,
    generation_flops,
    parser_of,
    prompt_ids,
    sized,
    update_flops,
    write_endless_model,
)
from tiny_task import write_tiny_task

HERE = Path(__file__).resolve().parent
SWEEP = (8, 16, 32, 64)
START_S, STEP_S = 180.0, 1200.0
MEMORY_FRAC = 0.8
"""The largest share of the free memory that a micro-batch may need; others are skipped."""
GATE_LIMIT = 1e-4
CLIP_BOUNDS = (0.8, 1.28)
"""Clipping bounds of the ratio: our defaults, which `trl_side.py` also sets for TRL."""
BOUND_MARGIN = 1e-3
"""The least distance of a ratio from a bound; log-probs of the two sides differ by about 3e-5."""


class Comparison:
    """The inputs of both sides for one scenario."""

    start_s = START_S
    """Seconds until a side is ready."""

    def __init__(self, scenario: Scenario, model: Path, options: argparse.Namespace, directory: Path) -> None:
        from transformers import AutoTokenizer

        self.scenario, self.model, self.threads = scenario, model, options.threads
        self._options, self._directory = options, directory
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.prompts = conversations(tokenizer, scenario.prompts, scenario.prompt_tokens)
        self.prompt_ids = [prompt_ids(tokenizer, prompt) for prompt in self.prompts]
        self._endless = directory / "endless"
        if not self._endless.exists():
            write_endless_model(model, self._endless)
        self._vocabulary = len(tokenizer)

    def ours(self) -> Side:
        """Our side."""
        return Side("ours", Path(sys.executable), HERE / "rlcore_side.py", self.our_spec(HERE), self.threads)

    def our_spec(self, programs: Path) -> dict[str, Any]:
        """The specification for our side; `programs` is its directory of benchmarks."""
        directory = Path(tempfile.mkdtemp(prefix="ours-", dir=self._directory))
        lines = [json_line({"prompt": prompt, "answer": ""}) for prompt in self.prompts]
        (directory / "prompts.jsonl").write_text("".join(lines))
        scenario = self.scenario
        config: dict[str, Any] = {
            "model": {"path": str(self._endless)},
            "data": {
                "sources": {"all": {"path": str(directory / "prompts.jsonl")}},
                "shuffle": False,
                "max_prompt_tokens": scenario.prompt_tokens,
            },
            "rollout": {"samples_per_prompt": scenario.samples, "max_tokens": scenario.new_tokens},
            "reward": {"functions": {"letters": {"fn": f"{programs / 'reward.py'}:letter_share"}}},
            "actor": {"lr": 1e-6, "dtype": self._options.dtype, "micro_batch_tokens": scenario.group_tokens},
            "cluster": {"threads": self.threads, "device": self._options.device},
            "train": {"prompts_per_step": scenario.prompts, "max_steps": 1000},
        }
        plugins = []
        if scenario.varying:
            plugins = [str(programs / "fixed_lengths.py")]
            config["plugins"] = {"fixed_lengths": {"lengths": scenario.lengths()}}
        return {
            "config": config,
            "overrides": self._options.ours,
            "plugins": plugins,
            "run_dir": str(directory / "run"),
        }

    def trl(self, micro_batch: int) -> Side:
        """TRL's side."""
        return Side("TRL", TRL_PYTHON, HERE / "trl_side.py", self.peer_spec(micro_batch), self.threads)

    def peer_spec(self, micro_batch: int) -> dict[str, Any]:
        """The specification for the other side."""
        scenario = self.scenario
        return {
            "model": str(self.model),
            "dtype": "float32" if self._options.trl_bf16 else self._options.dtype,
            "bf16": self._options.trl_bf16,
            "device": self._options.device,
            "prompts": self.prompts,
            "prompts_per_step": scenario.prompts,
            "samples": scenario.samples,
            "new_tokens": scenario.new_tokens,
            "lengths": scenario.lengths(),
            "micro_batch": micro_batch,
            "lr": 1e-6,
            "threads": self.threads,
            "seed": 0,
            "reward": "letter_share",
            "work_dir": tempfile.mkdtemp(prefix="trl-", dir=self._directory),
        }

    def gemm_peak(self) -> float:
        """The rate of a matrix product on the device of both sides."""
        device, dtype = self._options.device, self._options.dtype
        if self._options.smoke:  # on a CPU without bfloat16 instructions, a large product takes half a minute
            return gemm_peak_gflops(self.threads, seconds=0.1, size=128, dtype=dtype, device=device)
        return gemm_peak_gflops(self.threads, size=2048 if device == "cpu" else 8192, dtype=dtype, device=device)

    def ready(self, side: Side) -> dict[str, Any]:
        """A side's report once it is ready; its prompts must be the requested ones."""
        facts = side.answer(self.start_s)
        if facts["prompt_ids"] != self.prompt_ids:
            raise SystemExit(f"vs_trl: {side.name} encodes the prompts to other token ids; nothing can be compared")
        return facts

    def fixed_rows(self, rows: int, varying: bool) -> dict[str, Any]:
        """Rows for the gate and for warming up: prompts, truncated if lengths vary, and random completions."""
        rng = random.Random(3)
        scenario = self.scenario
        lengths = [rng.randint(1, scenario.new_tokens) if varying else scenario.new_tokens for _ in range(rows)]
        prompts = [ids[index:] if varying else ids for index, ids in enumerate(self.prompt_ids)]
        return {
            "distinct_prompt_ids": self.prompt_ids,
            "prompt_ids": [prompts[row // 2 % scenario.prompts] for row in range(rows)],
            "completion_ids": [[rng.randrange(3, self._vocabulary) for _ in range(length)] for length in lengths],
            "advantages": [rng.gauss(0, 1) for _ in range(rows)],
        }

    def step(self, side: Side) -> dict[str, Any]:
        """Take one step; its rows must have the scenario's lengths."""
        answer = side.ask({"do": "step"}, STEP_S)
        wanted = sum(self.scenario.lengths())
        if answer["new_tokens"] != wanted:
            raise SystemExit(f"vs_trl: {side.name} sampled {answer['new_tokens']} tokens, {wanted} were agreed on")
        parts = f"generation {answer['generate_s']:.2f} s, update {answer['update_s']:.2f} s"
        say(f"{self.scenario.name} {side.name}: step {answer['step_s']:.2f} s ({parts})")
        return answer


def gate(comparison: Comparison, limit: float) -> dict[str, float]:
    """The largest relative difference of loss and gradient norm, and the absolute one of log-probs, on one batch.

    The old log-probs are the current ones plus noise, so ratio and clipping count. The gradient jumps at a clipping
    bound; all ratios keep a distance from the bounds, so that rounding does not decide. SystemExit beyond `limit`.
    """
    rows = min(8, comparison.scenario.rows)
    question = comparison.fixed_rows(rows, varying=True)
    with ExitStack() as stack:
        ours, trl = stack.enter_context(comparison.ours()), stack.enter_context(comparison.trl(rows))
        comparison.ready(ours), comparison.ready(trl)
        logprobs = ours.ask({**question, "do": "logprobs"}, STEP_S)["logprobs"]
        rng = random.Random(4)
        question["old_logprobs"] = [[value + noise(rng) for value in row] for row in logprobs]
        our_answer = ours.ask({**question, "do": "gate"}, STEP_S)
        trl_answer = trl.ask({**question, "do": "gate"}, STEP_S)
    pairs = [pair for rows in zip(logprobs, trl_answer["logprobs"], strict=True) for pair in zip(*rows, strict=True)]
    found = {
        "loss": relative(our_answer["loss"], trl_answer["loss"]),
        "grad_norm": relative(our_answer["grad_norm"], trl_answer["grad_norm"]),
        "logprob_abs_max": max(abs(left - right) for left, right in pairs),
        "loss_value": our_answer["loss"],
        "grad_norm_value": our_answer["grad_norm"],
    }
    say(f"gate: {found}")
    if not (found["loss"] <= limit and found["grad_norm"] <= limit):
        raise SystemExit(f"vs_trl: loss or gradient differ by more than {limit:g} on one fixed batch: {found}")
    return found


def noise(rng: random.Random) -> float:
    """Noise of an old log-prob, such that the ratio is clearly within a clipping bound or clearly beyond it."""
    while True:
        drawn = rng.uniform(-0.4, 0.4)
        if all(abs(math.exp(-drawn) - bound) > BOUND_MARGIN for bound in CLIP_BOUNDS):
            return drawn


def sweep(comparison: Comparison) -> dict[int, Any]:
    """TRL's seconds per step and peak memory by micro-batch, one step each after warming up; else the reason for a
    skip."""
    results: dict[int, Any] = {}
    for micro_batch in candidates(comparison.scenario):
        needed = predicted_peak(results, micro_batch)
        free = free_memory()
        if needed > MEMORY_FRAC * free:
            results[micro_batch] = {"left_out": f"it would need about {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB"}
            continue
        with comparison.trl(micro_batch) as trl:
            comparison.ready(trl)
            warm(comparison, trl, micro_batch)
            answer = comparison.step(trl)
            results[micro_batch] = {"step_s": answer["step_s"], "peak_rss_bytes": peak_rss_of_tree(trl.pid)}
        say(f"TRL with micro-batches of {micro_batch}: {results[micro_batch]}")
    return results


def candidates(scenario: Scenario) -> list[int]:
    """Micro-batches that divide a step."""
    return [size for size in SWEEP if scenario.rows % size == 0] or [scenario.rows]


def predicted_peak(results: dict[int, Any], micro_batch: int) -> float:
    """The peak at this micro-batch, on the line through the last two peaks; 0 while fewer are known."""
    known = [(size, result["peak_rss_bytes"]) for size, result in results.items() if "peak_rss_bytes" in result][-2:]
    if len(known) < 2:
        return 0.0
    (small, low), (large, high) = known
    return high + (high - low) / (large - small) * (micro_batch - large)


def fastest(results: dict[int, Any]) -> int:
    """The micro-batch with the shortest step."""
    timed = {size: result["step_s"] for size, result in results.items() if "step_s" in result}
    return min(timed, key=lambda size: timed[size])


def warm(comparison: Comparison, side: Side, rows: int) -> None:
    """Run once untimed, so that allocation and compilation do not count."""
    side.ask({**comparison.fixed_rows(min(rows, comparison.scenario.rows), varying=False), "do": "warm"}, STEP_S)


def compare(comparison: Comparison, micro_batch: int, rounds: int) -> dict[str, Any]:
    """Take steps of both sides in turns; returns times, rates, memory and the ratios of medians."""
    scenario = comparison.scenario
    times: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    peaks: list[float] = []
    with ExitStack() as stack:
        sides = {"ours": stack.enter_context(comparison.ours())}
        facts = comparison.ready(sides["ours"])
        warm(comparison, sides["ours"], 8)
        sides["trl"] = stack.enter_context(comparison.trl(micro_batch))
        comparison.ready(sides["trl"])
        warm(comparison, sides["trl"], micro_batch)
        for _ in range(rounds):
            peaks.append(comparison.gemm_peak())
            for name, side in sides.items():
                times[name].append(comparison.step(side))
        memory = {name: peak_rss_of_tree(side.pid) for name, side in sides.items()}
    sizes = Sizes.of(comparison.model, facts["facts"]["num_parameters"])
    return {
        "scenario": scenario.facts(),
        "trl_micro_batch": micro_batch,
        **{name: described(rows, scenario, sizes) for name, rows in times.items()},
        "ratio": ratios(times),
        "peak_rss_bytes": {**memory, "ratio": memory["ours"] / memory["trl"]},
        "planned_bytes": facts["memory_bytes"],
        "gemm_peak_gflops": summary(peaks),
        "update_of_peak": achieved(times["ours"], scenario, sizes) / max(peaks),
    }


def described(rows: Sequence[dict[str, Any]], scenario: Scenario, sizes: Sizes) -> dict[str, Any]:
    """Medians of one side."""
    names = ("step_s", "generate_s", "update_s")
    medians = {name: summary([row[name] for row in rows]) for name in names}
    total = sum(scenario.lengths())
    return {
        **medians,
        "generated_tokens_per_s": total / medians["generate_s"]["median"],
        "step_tokens_per_s": total / medians["step_s"]["median"],
        "update_gflops": achieved(rows, scenario, sizes),
        "generation_gflops": generation_flops(scenario, sizes) / medians["generate_s"]["median"] / 1e9,
    }


def achieved(rows: Sequence[dict[str, Any]], scenario: Scenario, sizes: Sizes) -> float:
    """GFLOP/s of the median update. It counts the FLOPs of the shared computation, also for a side that does more."""
    return update_flops(scenario, sizes) / summary([row["update_s"] for row in rows])["median"] / 1e9


def ratios(times: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """TRL's median over ours: above 1 if ours is faster."""
    return {
        name.removesuffix("_s"): summary([row[name] for row in times["trl"]])["median"]
        / summary([row[name] for row in times["ours"]])["median"]
        for name in ("step_s", "generate_s", "update_s")
    }


def relative(one: float, other: float) -> float:
    """|one - other| over the larger of the two."""
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def free_memory() -> int:
    """Bytes that a new process could take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def json_line(value: Any) -> str:
    """One line of a .jsonl file."""
    import json

    return json.dumps(value) + "\n"


def trl_micro_batch(comparison: Comparison, chosen: int) -> int:
    """The micro-batch of a scenario. Long prompts get the same tokens per batch, but at least an eighth of a group."""
    scenario = comparison.scenario
    tokens = chosen * (SCENARIOS["E1"].prompt_tokens + SCENARIOS["E1"].new_tokens)
    fitting = [size for size in (1, 2, 4, *SWEEP) if scenario.rows % size == 0 and size <= chosen]
    within = [size for size in fitting if size * (scenario.prompt_tokens + scenario.new_tokens) <= max(tokens, 4800)]
    return max(within or fitting[:1])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--skip-sweep", action="store_true", help="take --micro-batch for TRL without looking")
    parser.add_argument("--micro-batch", type=int, default=0, help="TRL's per_device_train_batch_size")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the gate, the sweep and every chosen scenario."""
    options = parse(arguments)
    if not TRL_PYTHON.exists():
        raise SystemExit(f"vs_trl: TRL's environment is missing: {TRL_PYTHON.relative_to(ROOT)}; make bench makes it")
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as scratch:
        directory = Path(scratch)
        model = write_tiny_task(directory / "tiny") if options.smoke else options.model
        if not (model / "config.json").exists():
            raise SystemExit(f"vs_trl: there is no model in '{model}'; make model makes it")
        names = options.scenario or list(SCENARIOS)
        exact = argparse.Namespace(**{**vars(options), "dtype": "float32", "trl_bf16": False})
        first = Comparison(sized(SCENARIOS[names[0]], options), model, exact, directory)
        checked = gate(first, GATE_LIMIT)
        swept: dict[int, Any] = {}
        if not options.skip_sweep:
            swept = sweep(Comparison(sized(SCENARIOS["E1"], options), model, options, directory))
        chosen = options.micro_batch or (fastest(swept) if swept else 16)
        peer = versions_in(TRL_PYTHON)
        for name in names:
            comparison = Comparison(sized(SCENARIOS[name], options), model, options, directory)
            size = trl_micro_batch(comparison, chosen)
            result = compare(comparison, size, options.rounds or comparison.scenario.rounds)
            facts = machine(options.threads) | {"trl_versions": peer}
            emit(
                "vs_trl",
                {**result, "gate": checked, "sweep": swept, "dtype": options.dtype, "trl_bf16": options.trl_bf16},
                facts,
            )


if __name__ == "__main__":
    main()
