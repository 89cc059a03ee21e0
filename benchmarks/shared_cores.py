"""Measures the loss where processes that compute at the same time on a CPU have a thread per core each.

    .venv/bin/python benchmarks/shared_cores.py [--cases ranks samplers] [--rounds N] [--steps N] [--smoke] [--out OUT]

Runs of SmolLM2-135M in turn: with `cluster.threads` as many as cores, and with 0, where the plan shares the cores out.
`ranks`: two data-parallel ranks. `samplers`: vLLM in a separate process, one-step off-policy, so it samples while the
actor trains (`make setup-vllm` first). 8 prompts per step, 8 samples of up to 64 tokens. The first step of a run is
left out, and the last one, which has no sampling next to it. Prints one JSON line with seconds per step for each case.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import MODEL, ROOT, conclude, machine, made_by, say, summary

from rlcore.report import metrics

VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
DEADLINE_S = 3600.0
"""Timeout of one run."""
FULL = {"train.prompts_per_step": 8, "rollout.max_tokens": 64}
SMALL = {"train.prompts_per_step": 2, "rollout.max_tokens": 4}
CASES: Mapping[str, Mapping[str, str]] = {
    "ranks": {"actor.data_parallel": "2"},
    "samplers": {
        "rollout.backend": "vllm",
        "schedule.max_staleness": "1",
        "plugins.vllm.max_model_len": "256",
        "plugins.vllm.kv_cache_gib": "0.25",
        "plugins.vllm.enforce_eager": "true",
    },
}
REWARD = """
def spread(prompts, completions, **columns):
    return [float(sum(map(ord, str(text))) % 7) for text in completions]
"""
"""A reward that differs between samples, so that all rows are trained on."""


def seconds(directory: Path, case: str, threads: int, size: Mapping[str, int], steps: int) -> list[float]:
    """Seconds of the measured steps of one run."""
    name = f"{case}-{threads}-{len(list(directory.iterdir()))}"
    settings = {
        "model.path": MODEL,
        "data.sources.train.path": ROOT / "examples" / "tool_agent" / "sums.jsonl",
        "data.max_prompt_tokens": 128,
        "reward.functions.spread.fn": f"{directory / 'reward.py'}:spread",
        "rollout.samples_per_prompt": 8,
        "train.max_steps": steps + 2,
        "train.dir": directory,
        "train.name": name,
        "checkpoint.at_end": "false",
        "cluster.device": "cpu",
        "cluster.threads": threads,
        **size,
        **CASES[case],
    }
    python = VLLM_PYTHON if case == "samplers" else sys.executable
    command = [str(python), "-m", "rlcore", "train", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"shared_cores: {name}: rlcore train ended with {done.returncode}")
    found = [row["time/step_s"] for row in metrics.read(directory / name) if "time/step_s" in row][1:-1]
    say(f"{name}: {', '.join(f'{value:.1f}' for value in found)} s")
    return found


def compared(
    directory: Path, case: str, threads: int, rounds: int, size: Mapping[str, int], steps: int
) -> dict[str, Any]:
    """Both numbers of threads in turn."""
    for needed in (MODEL, *([VLLM_PYTHON] if case == "samplers" else [])):
        if not needed.exists():
            raise SystemExit(f"shared_cores: {needed.relative_to(ROOT)} is missing; make setup-vllm model")
    values: dict[str, list[float]] = {"per_core": [], "shared": []}
    for _ in range(rounds):
        values["per_core"] += seconds(directory, case, threads, size, steps)
        values["shared"] += seconds(directory, case, 0, size, steps)
    found = {way: summary(of_way) for way, of_way in values.items()}
    return {**found, "gain": found["per_core"]["median"] / found["shared"]["median"]}


def report(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "# Shared cores",
        "",
        made_by("benchmarks/shared_cores.py", facts),
        "",
        "| case | as many threads as cores in each process, s/step | cores shared out, s/step | gain |",
        "|---|---|---|---|",
    ]
    for case, both in result.items():
        cells = [
            f"{both[way]['median']:.1f} ({both[way]['min']:.1f} to {both[way]['max']:.1f})"
            for way in ("per_core", "shared")
        ]
        lines.append(f"| {case} | {' | '.join(cells)} | {both['gain']:.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["ranks"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="two prompts, four tokens, one step: does it still run?")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    rounds, size, steps = (1, SMALL, 1) if chosen.smoke else (chosen.rounds, FULL, chosen.steps)
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="shared-cores-") as scratch:
        (Path(scratch) / "reward.py").write_text(REWARD)
        threads = 1 if chosen.smoke else facts["cores"]  # more threads than cores would take minutes
        found = {case: compared(Path(scratch), case, threads, rounds, size, steps) for case in chosen.cases}
    conclude("shared_cores", found, facts, chosen.out, report(found, facts))


if __name__ == "__main__":
    main()
