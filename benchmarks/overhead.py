"""Measures a step without the model: a whole production step with the null model, which computes next to nothing.

    .venv/bin/python benchmarks/overhead.py [--smoke]

Prints one JSON line: the controller's seconds for a step of 64 samples and per sample from 64 to 16 384, and the
seconds to import rlcore and to make a plan in a fresh interpreter. The null models of policy and critic work in threads
of this process. They report the CPU time of their sampling and their updates; the rest counts as the controller's. The
reward is an async function on the controller's loop. With a sync one, each call goes to a child process and back;
`children` has the additional time. `all_plugins_step_s` is for 64 samples with reward loop, agent loop and critic
engine. A sample has one turn, or two with a call between them. The agent is on the controller's loop or in two workers.
Rewards may also come from a service in another process.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from all_plugins import PLUGINS, TURN_TOKENS, all_plugins
from live import live
from measure import collector_off, emit, gemm_peak_gflops, machine, summary
from reward_service import serving

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
from rlcore.plugins.planning import plan_run
began = time.perf_counter()
plan_run([], sys.argv[1:], ["null"])
print(time.perf_counter() - began)
"""


def settings(directory: Path, samples: int, reward: str) -> list[str]:
    """Overrides of a run with `samples` samples per step."""
    return [
        *(setting for setting in SETTINGS if not setting.startswith(("data.", "reward."))),
        f"data.sources.all.path={directory / 'prompts.jsonl'}",
        f"reward.functions.score.fn={directory / 'rewards.py'}:{reward}",
        f"rollout.samples_per_prompt={GROUP}",
        f"rollout.max_tokens={NEW_TOKENS}",
        f"train.prompts_per_step={samples // GROUP}",
        "train.max_steps=1000000",
        "train.log_completions_every=0",
    ]


async def step_seconds(
    overrides: Sequence[str],
    directory: Path,
    steps: int,
    config: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = ("null",),
) -> dict[str, dict[str, float]]:
    """The seconds of a step.

    `wall`: wall-clock time. `model`: CPU of the null models. `controller`: wall less model; both hold the interpreter,
    so they take turns. `controller_cpu`: CPU of all threads of the process less model, including those that write the
    previous step. `main_cpu`: the share of the event loop's thread in it.
    """
    with tempfile.TemporaryDirectory(dir=directory) as run_dir:
        async with live(config or {}, overrides, plugins, Path(run_dir)) as trainer:
            for _ in range(2):
                await trainer.step()
            with collector_off():
                steps_taken = [await _timed_step(trainer) for _ in range(steps)]
    return {name: summary([step[name] for step in steps_taken]) for name in steps_taken[0]}


async def _timed_step(trainer: Any) -> dict[str, float]:
    began = _clocks(trainer)
    await trainer.step()
    took = {name: value - began[name] for name, value in _clocks(trainer).items()}
    return {
        "wall": took["wall"],
        "model": took["model"],
        "controller": took["wall"] - took["model"],
        "controller_cpu": took["process_cpu"] - took["model"],
        "main_cpu": took["main_cpu"],
    }


def _clocks(trainer: Any) -> dict[str, float]:
    critic = getattr(trainer.run.critic, "_worker", None)
    # the replicas are wrapped in those that meter the busy time of a role
    models = [getattr(owner, "replica", owner).worker for owner in (trainer.actor, critic) if owner is not None]
    return {
        "wall": time.perf_counter(),
        "process_cpu": time.process_time(),
        "main_cpu": time.thread_time(),
        "model": sum(model.busy_s for model in models),
    }


def with_all_plugins(directory: Path, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """`step_seconds` of 64 samples, by number of turns, place of the agent, and source of rewards."""
    found = {}
    for name, turns, workers, served in (
        ("one_turn", 1, 0, False),
        ("two_turns", 2, 0, False),
        ("two_turns_in_workers", 2, 2, False),
        ("one_turn_and_service", 1, 0, True),
    ):
        overrides = [*settings(directory, SAMPLES[0], "on_the_loop"), f"rollout.max_tokens={4 * TURN_TOKENS}"]
        if served:
            overrides = [override for override in overrides if not override.startswith("reward.")]
        with serving(0.0, 0.0) if served else nullcontext("") as url:
            config = all_plugins(directory, turns, workers, url)
            found[name] = asyncio.run(step_seconds(overrides, directory, steps, config, PLUGINS))
    return found


def fresh_seconds(program: str, arguments: Sequence[str], times: int) -> dict[str, float]:
    """Summary of the numbers that a program prints, each time in a fresh interpreter."""
    call = [sys.executable, "-c", program, *arguments]
    printed = [subprocess.run(call, capture_output=True, text=True, check=True, timeout=120) for _ in range(times)]
    return summary([float(line.stdout) for line in printed])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps of few samples: does it still run?")
    smoke = parser.parse_args(arguments).smoke
    counts, threads = SAMPLES[:2] if smoke else SAMPLES, min(2, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="overhead-") as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl", 16 * GROUP if smoke else 4096)
        (directory / "rewards.py").write_text(REWARD)
        by_samples = {}
        for samples in counts:
            steps = 2 if smoke else max(3, 2048 // samples)
            by_samples[samples] = asyncio.run(
                step_seconds(settings(directory, samples, "on_the_loop"), directory, steps)
            )
        few = 2 if smoke else 20
        children = asyncio.run(step_seconds(settings(directory, counts[0], "in_a_child"), directory, few))
        together = with_all_plugins(directory, few)
        times = 1 if smoke else 5
        imported = fresh_seconds(IMPORT, [], times)
        planned = fresh_seconds(PLAN, settings(directory, 64, "on_the_loop"), times)
    per_sample = {
        kind: {samples: found[kind]["median"] / samples for samples, found in by_samples.items()}
        for kind in ("controller", "controller_cpu")
    }
    emit(
        "overhead",
        {
            "new_tokens": NEW_TOKENS,
            "group": GROUP,
            "step_s": by_samples,
            "s_per_sample": per_sample,
            "s_per_sample_growth": {
                kind: figures[counts[-1]] / figures[counts[0]] for kind, figures in per_sample.items()
            },
            "step_with_children_s": children,
            "all_plugins_step_s": together,
            "import_s": imported,
            "plan_s": planned,
            "gemm_peak_gflops": gemm_peak_gflops(threads, seconds=0.1 if smoke else 2.0),  # last: it loads torch
        },
        machine(threads),
    )


if __name__ == "__main__":
    main()
