"""Constructors start nothing: trainer, step, trackers and the threads of workers."""

import asyncio
import gc
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlcore.algo.kl import FixedKl
from rlcore.cluster.thread import WorkerThread
from rlcore.config import RunConfig
from rlcore.contracts.offers import Scope
from rlcore.contracts.tracking import Setting, TrackContext, Tracker, TrackerOffer
from rlcore.errors import ConfigError
from rlcore.plan import TrackerPlan
from rlcore.report.trackers import Trackers
from rlcore.testing.prompts import seeded_prompts
from rlcore.testing.rewards import make_prompt
from rlcore.train.step_batcher import StepBatcher
from rlcore.train.trainer import QUIET_THRESHOLDS, Progress, Trainer


class Untouched:
    """Fails whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def runtime() -> Any:
    schedule = SimpleNamespace(old_logprobs=None, max_staleness=0, drop=False, sample_before_update=True)
    plan = SimpleNamespace(config=RunConfig(), schedule=schedule, loaded=SimpleNamespace(saved={}))
    reward = SimpleNamespace(scope=Scope.SAMPLE)
    actor = SimpleNamespace(replicas=[Untouched()])
    return SimpleNamespace(plan=plan, actor=actor, agent=Untouched(), reward=reward, critic=Untouched())


def test_the_batcher_of_a_step_issues_no_prompt_and_calls_no_worker_while_it_is_made() -> None:
    async def construct() -> set[str]:
        StepBatcher(runtime(), cast(Any, Untouched()), FixedKl(0.0), 1, 1)
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert asyncio.run(construct()) == set()


def test_a_trainer_leaves_the_garbage_collector_alone_until_its_start_and_after_its_close() -> None:
    async def use() -> None:
        thresholds, run = gc.get_threshold(), runtime()
        progress = Progress(0, seeded_prompts({"all": [make_prompt(0)]}, {}, 0, False), FixedKl(0.0))
        sinks = SimpleNamespace(trace=SimpleNamespace(write=lambda step, events: None))
        trainer = Trainer(run, progress, 1, {}, cast(Any, sinks))
        assert gc.get_threshold() == thresholds != QUIET_THRESHOLDS
        await trainer.close()
        assert gc.get_threshold() == thresholds
        run.agent = run.critic = SimpleNamespace(state=dict)
        run.reward.state = dict
        trainer.start()
        assert gc.get_threshold() == QUIET_THRESHOLDS
        await trainer.close()
        assert gc.get_threshold() == thresholds

    asyncio.run(use())


def test_trackers_start_no_thread_and_no_tracker_until_their_start(tmp_path: Path) -> None:
    class Eager(Tracker):
        def __init__(self, context: TrackContext) -> None:
            raise RuntimeError("a tracker was made")

        def start(self, configuration: Mapping[str, Setting]) -> None: ...

        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    before = threading.enumerate()
    trackers = Trackers([TrackerPlan(TrackerOffer("eager", Eager), "x")], "project", tmp_path, "")
    assert threading.enumerate() == before
    with pytest.raises(ConfigError, match="tracker eager of x did not start: RuntimeError: a tracker was made"):
        asyncio.run(trackers.start())
    assert "trackers" not in [thread.name for thread in threading.enumerate()]


def test_the_thread_of_a_worker_runs_from_its_start() -> None:
    async def use() -> None:
        thread = WorkerThread("worker[0]")
        assert "worker[0]" not in [thread.name for thread in threading.enumerate()]
        thread.start()
        assert await thread.run(lambda: threading.current_thread().name, "naming it", 10.0) == "worker[0]"
        await thread.stop(10.0)

    asyncio.run(use())
