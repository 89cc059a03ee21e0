"""Calls of rlcore's functions that a sample costs the controller: counted, for a clock differs by the hour."""

import asyncio
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rlcore
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.train.callbacks import Callbacks
from rlcore.train.run_prompts import load_data
from rlcore.train.session import Session
from rlcore.train.signals import StopRequest
from rlcore.train.trainer import Trainer

REWARD = """
async def on_the_loop(trajectory):
    return 1.0
"""
GROUP = 8
OURS = str(Path(rlcore.__file__).parent)
MOST_CALLS = 125
"""Per sample. 124.5 to 124.7 are counted; the rest is which answers arrive in one turn of the loop."""


class Calls:
    """Counts the calls of rlcore's functions in this thread, and how often a generator or coroutine resumes.

    Those of asyncio and of other libraries are left out: on a busy machine more timers are due at a time.
    """

    num = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        self.num += event == "call" and frame.f_code.co_filename.startswith(OURS)


def calls_of_a_step(samples: int, directory: Path) -> int:
    """On the controller's thread, from the issue of prompts to the published weights; the least of three steps."""
    write_prompts(directory / "prompts.jsonl", 64)
    (directory / "rewards.py").write_text(REWARD)
    overrides = [
        *(setting for setting in SETTINGS if not setting.startswith(("data.", "reward."))),
        f"data.sources.all.path={directory / 'prompts.jsonl'}",
        f"reward.functions.score.fn={directory / 'rewards.py'}:on_the_loop",
        f"rollout.samples_per_prompt={GROUP}",
        "rollout.max_tokens=16",
        f"train.prompts_per_step={samples // GROUP}",
        "train.max_steps=1000",
        "train.log_completions_every=0",
    ]

    async def count() -> int:
        plan = plan_run([{}], overrides, ("null",))
        prompts = load_data(plan.config)
        run_dir = Path(tempfile.mkdtemp(dir=directory))
        async with launch(plan, run_dir) as run:
            trainer = Session(plan, run_dir, run, prompts, StopRequest(finish_step=False), Callbacks())._trainer
            try:
                trainer.start()
                await trainer.step()
                return min([await _counted(trainer) for _ in range(5)])
            finally:
                await trainer.close()

    return asyncio.run(count())


async def _counted(trainer: Trainer) -> int:
    with Calls() as calls:
        await trainer.step()
    return calls.num


@pytest.mark.slow
def test_a_sample_costs_the_controller_few_calls(tmp_path: Path) -> None:
    """The calls of a step that do not depend on the number of samples cancel out."""
    few, many = calls_of_a_step(64, tmp_path), calls_of_a_step(256, tmp_path)
    assert (many - few) / (256 - 64) <= MOST_CALLS
