"""How the controller's cost grows: 1000 rollout replicas and 16 384 samples a step, with workers that do nothing.

    .venv/bin/python benchmarks/scale.py [--smoke] [--steps N] [--seconds S]

A whole production run: plan, launch, streaming, rewards on the loop, batch, update, metrics, trajectories on disk. Its
workers answer at once, so the process's CPU time is the controller's, that of 1000 threads included. Prints one JSON
line: seconds of wall and CPU time a step, their share of a step of 60 s, and resident memory after the first steps and
after the last.
"""

import argparse
import asyncio
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from live import live
from measure import emit, say, summary

from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

GROUP = 8
NEW_TOKENS = 16
STEP_S = 60.0
"""The step whose tenth the controller may take."""
WARM_STEPS = 10
PLUGIN = '''
"""Rollout replicas that answer at once with the same tokens."""
RLCORE_API = "1"

import numpy as np

from rlcore.hookspecs import hookimpl
from rlcore.plan import WorkerClass
from rlcore.rollout import RolloutWorker
from rlcore.types import Completion, Finish


class Instant(RolloutWorker):
    def setup(self):
        self.ids_T = np.arange(65, 65 + {new_tokens}, dtype=np.int32)
        self.logprobs_T = np.full({new_tokens}, -5.0, np.float32)

        self.version = 0

    async def load_weights(self, handle):
        self.version = handle.version
        return handle.version

    async def generate(self, requests):
        for request in requests:
            for sample in range(request.n):
                yield Completion(request.id, sample, self.ids_T, self.logprobs_T, Finish.LENGTH, self.version)


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "instant", Instant)]
'''
REWARD = """
async def on_the_loop(trajectory):
    return float(hash(trajectory.id.prompt) % 7 + trajectory.id.sample % 2)
"""


def settings(directory: Path, replicas: int, samples: int) -> list[str]:
    """Overrides of a run with that many replicas and samples a step."""
    return [
        *(each for each in SETTINGS if not each.startswith(("data.", "reward.", "rollout."))),
        f"data.sources.all.path={directory / 'prompts.jsonl'}",
        f"reward.functions.score.fn={directory / 'rewards.py'}:on_the_loop",
        "rollout.backend=instant",
        f"rollout.replicas={replicas}",
        f"rollout.samples_per_prompt={GROUP}",
        f"rollout.max_tokens={NEW_TOKENS}",
        f"train.prompts_per_step={samples // GROUP}",
        "train.max_steps=1000000",
        "train.log_completions_every=0",
    ]


async def steps_of(directory: Path, replicas: int, samples: int, steps: int, seconds: float) -> dict[str, Any]:
    """Wall and CPU seconds of each step after the first ones, and resident bytes; no step begins after `seconds`."""
    ends_at = time.perf_counter() + seconds
    wall, cpu, resident = [], [], []
    plugins = ["null", str(directory / "instant.py")]
    async with live({}, settings(directory, replicas, samples), plugins, directory / "run") as trainer:
        for step in range(steps):
            began, used = time.perf_counter(), time.process_time()
            if began > ends_at:
                break
            await trainer.step()
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
            resident.append(resident_bytes())
            say(f"step {step + 1} of {steps}: {wall[-1]:.1f} s, {resident[-1] / 2**20:.0f} MiB")
    steps = len(wall)
    warm = min(WARM_STEPS, steps - 1)
    return {
        "steps": steps,
        "wall_s": summary(wall[warm:]),
        "cpu_s": summary(cpu[warm:]),
        "share_of_60_s": summary(cpu[warm:])["median"] / STEP_S,
        "resident_warm_bytes": resident[warm],
        "resident_end_bytes": resident[-1],
        "growth_bytes_a_step": (resident[-1] - resident[warm]) / max(1, steps - 1 - warm),
    }


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps, replicas and samples: does it still run?")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=460.0, help="begin no step after so long")
    chosen = parser.parse_args(arguments)
    replicas, samples, steps = (8, 64, 3) if chosen.smoke else (1000, 16384, chosen.steps)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))  # a loop each, three descriptors
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl", 2 * samples // GROUP)
        (directory / "rewards.py").write_text(REWARD)
        (directory / "instant.py").write_text(PLUGIN.replace("{new_tokens}", str(NEW_TOKENS)))
        result = asyncio.run(steps_of(directory, replicas, samples, steps, chosen.seconds))
    emit("scale", {"replicas": replicas, "samples": samples, **result})


if __name__ == "__main__":
    main()
