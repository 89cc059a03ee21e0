"""Measures the schedule's loss per step: production runs whose compute and rewards sleep, compared with an oracle.

    .venv/bin/python benchmarks/overlap.py small|system_d [--slots N ...] [--modes M ...] [--steps N] [--smoke]

Prints one JSON line for each number of reward slots (0: any number) and each mode. `small` is 1/100 of a step of 256
samples whose rewards take 1 to 40 s. `system_d` is 1/50 of a published run of 1024 prompts x 5 samples on 8 GPUs; the
output has the figures of that run (seconds, divided by 50). Times are from the beginning of the first step to the end
of the last.

* `oracle_step_s`: the replay of the same draws by a scheduler that loses no time (`rlcore.train.oracle`).
* `ratio`: the measured seconds over those of the oracle.
* `service_busy`: the used share of the slots' time between the ends of the second and the second-last step.
* `drawn_step_s`: the drawn rewards of a step over the slots, the lower bound of every schedule.
* `late_step_s`: seconds per step for which the slots were held longer than drawn. The run's loop also serves the
  rewards here, and may be busy when one ends.
* `between_steps_s`: seconds per step between the ends of the second and the second-last step. It leaves out the first
  generation and the last updates, which no schedule can hide.
* `misplaced`: rewards that a wrong sample got.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from live import live
from measure import emit
from sleeping import Sleeping, SleepingRewards, finishing_order, reward_s, score

from rlcore.report.metrics import read_trajectories
from rlcore.testing import write_prompts
from rlcore.train.oracle import Draws, replay

PLUGIN = Path(__file__).resolve().parent / "sleeping.py"


@dataclass(frozen=True)
class Workload:
    """The scaled durations of a step."""

    prompts: int
    samples: int
    minibatches: int
    times: Sleeping
    published_step_s: dict[str, float]
    """Published seconds per step by mode, scaled like the rest."""


WORKLOADS = {
    "small": Workload(32, 8, 4, Sleeping(0.4, 0.08, 0.4 / 4, 0.01, 0.4), {}),
    "system_d": Workload(
        1024,
        5,
        4,
        Sleeping(40 / 50, (45 + 36) / 50, 117 / 4 / 50, 1 / 50, 40 / 50),
        {
            "synchronous": 585.7 / 50,
            "pipeline": 509.5 / 50,
            "one_step_off": 424.6 / 50,
            "one_step_off_pipeline": 424.7 / 50,
        },
    ),
}
MODES = {
    "synchronous": (0, False),
    "pipeline": (0, True),
    "one_step_off": (1, False),
    "one_step_off_pipeline": (1, True),
}


def settings(directory: Path, load: Workload, times: Sleeping, mode: str, steps: int) -> dict[str, Any]:
    """The configuration of the run."""
    max_staleness, stream = MODES[mode]
    section = {name: getattr(times, name) for name in Sleeping.__dataclass_fields__}
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(directory / "prompts.jsonl")}}},
        "rollout": {"backend": "sleeping", "samples_per_prompt": load.samples, "max_tokens": 8},
        "algo": {"kl": {"placement": "loss"}},
        "actor": {"backend": "sleeping", "minibatch_prompts": load.prompts // load.minibatches},
        "reference": {"backend": "sleeping"},
        "schedule": {"max_staleness": max_staleness, "stream_minibatches": stream},
        "train": {"prompts_per_step": load.prompts, "max_steps": steps, "log_completions_every": 0},
        "plugins": {"sleeping": {"path": str(PLUGIN), **section}},
    }


async def measure(directory: Path, load: Workload, times: Sleeping, mode: str, steps: int) -> dict[str, Any]:
    """Run and compare."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        run_dir = Path(scratch)
        async with live(settings(directory, load, times, mode, steps), [], [], run_dir) as trainer:
            began, ended = time.monotonic(), list[float]()
            while len(ended) < steps:
                await trainer.step()
                ended.append(time.monotonic())
            history, rewards = trainer.history, cast(SleepingRewards, trainer.run.reward)
        rows = [read_trajectories(run_dir, step + 1) for step in range(steps)]
    max_staleness, stream = MODES[mode]
    oracle = replay(
        [draws(row, load, times) for row in rows],
        max_staleness=max_staleness,
        stream=stream,
        slots=times.slots or None,
    )
    total_s = ended[-1] - began
    result = {
        "mode": mode,
        "slots": times.slots,
        "steps": steps,
        "samples_per_step": load.prompts * load.samples,
        "step_s": total_s / steps,
        "oracle_step_s": oracle.published_s[-1] / steps,
        "ratio": total_s / oracle.published_s[-1],
        "logged_overhead": mean([record["time/overhead"] for record in history]),
        "hidden_frac": mean([record["time/reward_hidden_frac"] for record in history]),
        "misplaced": sum(row["score"] != score(*name(row)) for step in rows for row in step),
    }
    if times.slots and steps >= 4:
        result["service_busy"] = busy_frac(rewards.served, ended[1], ended[-2], times.slots)
        drawn_s = sum(reward_s(times, *name(row)) for step in rows for row in step)
        result["drawn_step_s"] = drawn_s / times.slots / steps
        result["late_step_s"] = rewards.late_s / len(rewards.served) * load.prompts * load.samples / times.slots
        result["between_steps_s"] = (ended[-2] - ended[1]) / (steps - 3)
    if mode in load.published_step_s:
        published = load.published_step_s
        result["published_step_s"] = published[mode]
        result["speedup_over_published_baseline"] = published["synchronous"] / result["step_s"]
        result["speedup_over_published_best"] = min(published.values()) / result["step_s"]
    return result


def draws(rows: Sequence[dict[str, Any]], load: Workload, times: Sleeping) -> Draws:
    """The random durations of a step, derived from the names of its samples."""
    names = finishing_order([name(row) for row in rows])
    groups = {key: index for index, key in enumerate(sorted({(prompt, epoch) for prompt, epoch, _ in names}))}
    return Draws(
        finished_s=[times.generate_s * (index + 1) / len(names) for index in range(len(names))],
        reward_s=[reward_s(times, *pair) for pair in names],
        group=[groups[prompt, epoch] for prompt, epoch, _ in names],
        prepare_s=times.pass_s,
        update_s=[times.update_s] * load.minibatches,
        minibatch_groups=load.prompts // load.minibatches,
    )


def name(row: dict[str, Any]) -> tuple[str, int, int]:
    """Prompt, epoch and sample of a trajectory on disk."""
    return row["id"]["prompt"], row["id"]["epoch"], row["id"]["sample"]


def busy_frac(served: Sequence[tuple[float, float]], begin: float, end: float, slots: int) -> float:
    """The share of the slots' time between `begin` and `end` in which they served."""
    used = sum(max(0.0, min(end, until) - max(begin, since)) for since, until in served)
    return used / (slots * (end - begin))


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return sum(values) / len(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line for each combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--slots", type=int, nargs="+", default=None)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="two short steps of each: does it still run?")
    chosen = parser.parse_args(arguments)
    load = WORKLOADS[chosen.workload]
    steps = chosen.steps
    if chosen.smoke:
        load, steps = replace(load, prompts=8, samples=2), 2
    slots = chosen.slots or ([8, 32, 0] if chosen.workload == "small" else [256, 0])
    with tempfile.TemporaryDirectory(prefix="overlap-") as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl", load.prompts * 4)
        for slot in slots:
            for mode in chosen.modes:
                found = asyncio.run(measure(directory, load, replace(load.times, slots=slot), mode, steps))
                emit("overlap", {"workload": chosen.workload, **found})


if __name__ == "__main__":
    main()
