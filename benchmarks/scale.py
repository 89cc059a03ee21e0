"""Measures the controller's cost with 1000 rollout replicas, 16 384 samples per step and workers that do nothing.

    .venv/bin/python benchmarks/scale.py [--smoke] [--steps N] [--seconds S] [--out docs/results/scale]

It is a whole production run: plan, launch, streaming, rewards on the loop, batch, update, metrics, trajectories on
disk. Its workers answer at once, so the process's CPU time is the controller's, including that of 1000 threads. Prints
one JSON line: wall and CPU seconds per step, their share of a step of 60 s, and the growth of resident memory. Memory
is read after every step. The growth per step has a 95 % interval, over all steps after the first ten and over the
second half of them. Memory is flat in two cases. In the first, the upper end of that half's interval, times 100 steps,
is less than a hundredth of the memory. In the second, its growth is not significantly above 0, and memory has risen by
less than a twentieth.

In one command: `make results-scale`, which takes as long as 100 steps: six to ten minutes.
"""

import argparse
import asyncio
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from live import live
from measure import conclude, machine, made_by, resident_bytes, say
from trend import FLAT_FRAC, FLAT_STEPS, MOST_FRAC, RISE_FRAC, STEP_S, judged

from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS

GROUP = 8
NEW_TOKENS = 16
PLUGIN = '''
"""Rollout replicas that answer at once with the same tokens."""
RLCORE_API = "1"

import numpy as np

from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.rollout import RolloutWorker
from rlcore.types import Completion, FinishReason


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
                yield Completion(request.id, sample, self.ids_T, self.logprobs_T, FinishReason.LENGTH, self.version)


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "instant", Instant)]
'''
REWARD = """
async def on_the_loop(trajectory):
    return float(hash(trajectory.id.prompt) % 7 + trajectory.id.sample % 2)
"""


def settings(directory: Path, replicas: int, samples: int) -> list[str]:
    """Overrides of a run with this number of replicas and samples per step."""
    return [
        *(setting for setting in SETTINGS if not setting.startswith(("data.", "reward.", "rollout."))),
        f"data.sources.all.path={directory / 'prompts.jsonl'}",
        f"reward.functions.score.fn={directory / 'rewards.py'}:on_the_loop",
        "rollout.backend=instant",
        "rollout.check_weights_every=0",  # the backend invents its log-probs
        f"rollout.replicas={replicas}",
        f"rollout.samples_per_prompt={GROUP}",
        f"rollout.max_tokens={NEW_TOKENS}",
        f"train.prompts_per_step={samples // GROUP}",
        "train.max_steps=1000000",
        "train.log_completions_every=0",
    ]


async def steps_of(directory: Path, replicas: int, samples: int, steps: int, seconds: float) -> dict[str, Any]:
    """Wall and CPU seconds of each step, and resident bytes after it. No step begins after `seconds`."""
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
    return {"wall_s": wall, "cpu_s": cpu, "resident_bytes": resident}


def report(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    growth, late = result["growth_bytes_a_step"], result["growth_of_second_half"]
    lines = [
        "# The controller at scale",
        "",
        made_by("benchmarks/scale.py", facts),
        "",
        f"{result['replicas']} rollout replicas and {result['samples']} samples per step, with workers that answer at",
        f"once: {result['steps']} steps of a production run, the first {result['warm_steps']} not counted.",
        "",
        "| | median | min | max |",
        "|---|---|---|---|",
    ]
    for name, title in (("wall_s", "seconds per step"), ("cpu_s", "CPU seconds per step, all threads")):
        lines.append(
            f"| {title} | " + " | ".join(f"{result[name][text]:.2f}" for text in ("median", "min", "max")) + " |"
        )
    warm, end = result["resident_warm_bytes"] / 2**20, result["resident_end_bytes"] / 2**20
    kib = [
        f"{bytes_grown / 2**10:+.1f}"
        for part in (growth, late)
        for bytes_grown in (part["slope"], part["low"], part["high"])
    ]
    lines += [
        "",
        f"The larger of both is {result['share_of_60_s']:.1%} of a step of {STEP_S:.0f} s. Less than "
        f"{MOST_FRAC:.0%}: {'yes' if result['cheap'] else 'NO'}.",
        "",
        f"Resident memory: {warm:.0f} MiB after {result['warm_steps']} steps, {end:.0f} MiB after the last. It grows "
        f"by {kib[0]} KiB a step, 95 % [{kib[1]}, {kib[2]}]; over the second half by {kib[3]} KiB, "
        f"95 % [{kib[4]}, {kib[5]}]. "
        f"Flat (less than {FLAT_FRAC:.0%} over {FLAT_STEPS} steps by the upper end of the latter, or a growth that is "
        f"not significant and a rise of less than {RISE_FRAC:.0%}): {'yes' if result['flat'] else 'NO'}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps, replicas and samples: does it still run?")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1200.0, help="begin no step after so long")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    replicas, samples, steps = (8, 64, 6) if chosen.smoke else (1000, 16384, chosen.steps)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))  # 3 for each loop
    with tempfile.TemporaryDirectory(prefix="scale-") as scratch:
        directory = Path(scratch)
        write_prompts(directory / "prompts.jsonl", 2 * samples // GROUP)
        (directory / "rewards.py").write_text(REWARD)
        (directory / "instant.py").write_text(PLUGIN.replace("{new_tokens}", str(NEW_TOKENS)))
        found = asyncio.run(steps_of(directory, replicas, samples, steps, chosen.seconds))
    result = {"replicas": replicas, "samples": samples, **judged(**found), "by_step": found}
    facts = machine()
    conclude("scale", result, facts, chosen.out, report(result, facts))


if __name__ == "__main__":
    main()
