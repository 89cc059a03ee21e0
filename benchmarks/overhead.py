"""What a step costs beside the model: a whole production step with the null model, which computes next to nothing.

    .venv/bin/python benchmarks/overhead.py [--smoke]

Prints one JSON line: seconds of a step of 64 samples, seconds a sample from 64 to 16 384 samples, seconds to import
rlcore and to make a plan in a fresh interpreter. The reward is an async function on the controller's own loop; with a
sync one, each call goes to a child process and back, and `children` says what that adds.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from live import live
from measure import collector_off, emit, summary

from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

SAMPLES = (64, 256, 1024, 4096, 16384)
GROUP = 8
NEW_TOKENS = 16
REWARD = """
async def on_the_loop(trajectory):
    return float(len(trajectory.text()) % 7)

def in_a_child(trajectory):
    return float(len(trajectory.text()) % 7)
"""
IMPORT = "import time; began = time.perf_counter(); import rlcore.cli; print(time.perf_counter() - began)"
PLAN = """
import sys, time
from rlcore.launch import plan_run
began = time.perf_counter()
plan_run([], sys.argv[1:], ["null"])
print(time.perf_counter() - began)
"""


def settings(directory: Path, samples: int, reward: str) -> list[str]:
    """Overrides of a run whose steps have that many samples."""
    return [
        *(each for each in SETTINGS if not each.startswith(("data.", "reward."))),
        f"data.sources.all.path={directory / 'prompts.jsonl'}",
        f"reward.functions.score.fn={directory / 'rewards.py'}:{reward}",
        f"rollout.samples_per_prompt={GROUP}",
        f"rollout.max_tokens={NEW_TOKENS}",
        f"train.prompts_per_step={samples // GROUP}",
        "train.max_steps=1000000",
        "train.log_completions_every=0",
    ]


async def step_seconds(directory: Path, samples: int, reward: str, steps: int) -> dict[str, Any]:
    """Seconds of each step, those of the null model's own work, and what is left to the controller."""
    with tempfile.TemporaryDirectory(dir=directory) as run_dir:
        async with live({}, settings(directory, samples, reward), ["null"], Path(run_dir)) as trainer:
            for _ in range(2):
                await trainer.step()
            with collector_off():
                seconds = [await _timed_step(trainer) for _ in range(steps)]
    return summary(seconds)


async def _timed_step(trainer: Any) -> float:
    began = time.perf_counter()
    await trainer.step()
    return time.perf_counter() - began


def fresh_seconds(program: str, arguments: Sequence[str], times: int) -> dict[str, float]:
    """What a program prints, in a fresh interpreter each time."""
    call = [sys.executable, "-c", program, *arguments]
    printed = [subprocess.run(call, capture_output=True, text=True, check=True, timeout=120) for _ in range(times)]
    return summary([float(each.stdout) for each in printed])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps of few samples: does it still run?")
    smoke = parser.parse_args(arguments).smoke
    counts = SAMPLES[:2] if smoke else SAMPLES
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl", 16 * GROUP if smoke else 4096)
        (directory / "rewards.py").write_text(REWARD)
        by_samples = {}
        for samples in counts:
            steps = 2 if smoke else max(3, 2048 // samples)
            by_samples[samples] = asyncio.run(step_seconds(directory, samples, "on_the_loop", steps))
        children = asyncio.run(step_seconds(directory, counts[0], "in_a_child", 2 if smoke else 20))
        times = 1 if smoke else 5
        imported = fresh_seconds(IMPORT, [], times)
        planned = fresh_seconds(PLAN, settings(directory, 64, "on_the_loop"), times)
    per_sample = {samples: found["median"] / samples for samples, found in by_samples.items()}
    emit(
        "overhead",
        {
            "new_tokens": NEW_TOKENS,
            "group": GROUP,
            "step_s": by_samples,
            "s_per_sample": per_sample,
            "s_per_sample_growth": per_sample[counts[-1]] / per_sample[counts[0]],
            "step_with_children_s": children,
            "import_s": imported,
            "plan_s": planned,
        },
    )


if __name__ == "__main__":
    main()
