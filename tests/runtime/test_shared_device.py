"""One device with a limit, shared by actor, reference, judge and rollout: a run's order of calls never exceeds it.

The roles are fakes that hold, cache and release what real ones do (`tests/engines/test_yielded_devices.py`,
`plugins/vllm/tests/test_vllm_sleep.py`). Each release can be switched off, and then the device overflows.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import RlcoreError, WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.testing import write_prompts
from rlcore.train import Start, run_training

PLUGIN = '''
"""Roles on one device, which has room for LIMIT."""
import os

from rlcore.contracts.components import Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.offers import PoolSpec, WorkerClass
from rlcore.contracts.reference import ReferenceWorker
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullActor, NullReference, NullReplica
from rlcore.types import Reward, ScoredTrajectory

RLCORE_API = "1"
LIMIT = 11
HELD, EVENTS, OFF, FAULTS = {}, [], set(), set()
JUDGE = Role("judge", RewardReplica)


def put(name, size):
    HELD[name] = size
    if sum(HELD.values()) > LIMIT:
        raise RuntimeError(f"no room at {name}: {dict(HELD)}")


def free(name, release):
    if release not in OFF:
        HELD.pop(name, None)


def say(what):
    EVENTS.append(what)
    if what in FAULTS:
        raise RuntimeError(f"{what} fails")


class Actor(NullActor):
    def setup(self):
        super().setup()
        put("actor's cache", 6)
        put("actor's weights", 1)
        free("actor's cache", "actor start")

    def logprobs(self, batch):
        put("actor's cache", 4)
        return super().logprobs(batch)

    def begin_updates(self):
        put("actor's optimizer", 3)

    def update(self, minibatch):
        put("actor's cache", 6)
        say("update")
        return super().update(minibatch)

    def end_updates(self):
        free("actor's optimizer", "actor offload")
        free("actor's cache", "actor end_updates")

    def publish(self, version):
        super().publish(version)
        say("publish")

    def weights(self, version, directory):
        put("actor's whole weights", 5)
        try:
            say("gather")
        finally:
            free("actor's whole weights", "actor weights")
        return super().weights(version, directory)

    def restore(self, directory):
        put("actor's cache", 5)
        super().restore(directory)
        free("actor's cache", "actor restore")


class Reference(NullReference):
    def setup(self):
        super().setup()
        put("reference's weights", 1)

    def logprobs(self, batch):
        put("reference's cache", 2)
        found = super().logprobs(batch)
        free("reference's cache", "reference pass")
        return found


class Rollout(NullReplica):
    def setup(self):
        super().setup()
        put("rollout's weights", 2)
        put("rollout's cache", 6)

    async def sleep(self):
        say("rollout sleeps")
        await super().sleep()
        for name in ("rollout's weights", "rollout's cache"):
            free(name, "rollout sleep")

    async def load_weights(self, handle):
        put("rollout's weights", 2)
        say("load")
        return await super().load_weights(handle)

    async def wake(self):
        say("rollout wakes")
        put("rollout's weights", 2)
        put("rollout's cache", 6)
        await super().wake()


class Judge(RewardReplica):
    def setup(self):
        put("judge's weights", 1)

    async def score(self, requests):
        return [RawScore(request.id, float(len(request.id) % 3)) for request in requests]

    async def health(self):
        return "well"

    async def sleep(self):
        free("judge's weights", "judge sleep")

    async def wake(self):
        put("judge's weights", 1)


class Judged(RewardManager):
    def __init__(self, context):
        self.group = context.workers(JUDGE)

    async def score(self, stream, lane):
        async for row in stream:
            [raw] = await self.group.replicas[0].call(RewardReplica.score, [ScoreRequest(str(row.id), ())])
            yield ScoredTrajectory(row, Reward(raw.score + row.id.sample))


@hookimpl
def rlcore_reward_managers():
    requests = [WorkerRequest(JUDGE, "shared", pool="reward", isolated=True)]
    return [Component("judged", Judged, lambda config, section: requests, uses_reward_functions=True)]


@hookimpl
def rlcore_resource_pools(requests):
    return [PoolSpec("reward"), PoolSpec("train", colocates=("rollout", "reward"))]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "shared", Actor),
        WorkerClass(ReferenceWorker, "shared", Reference),
        WorkerClass(RolloutWorker, "shared", Rollout, isolated=True),
        WorkerClass(RewardReplica, "shared", Judge, isolated=True),
    ]
'''


class SharedDevice:
    """Runs of two steps on the device."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "shared.py").write_text(PLUGIN)
        self._settings = [
            "model.path=none",
            "model.tokenizer=bytes",
            f"data.sources.all.path={write_prompts(directory / 'prompts.jsonl', 8)}",
            "actor.backend=shared",
            "reference.backend=shared",
            "rollout.backend=shared",
            "rollout.pool=rollout",
            "rollout.samples_per_prompt=2",
            "rollout.max_tokens=4",
            "reward.manager=judged",
            "algo.kl.placement=loss",
            "cluster.train_pool=train",
            "cluster.in_process=true",
            "cluster.max_restarts=0",
            "train.prompts_per_step=2",
            "train.name=run",
            f"train.dir={directory / 'runs'}",
        ]
        self.module: Any = None

    def run(self, off: Sequence[str] = (), faults: Sequence[str] = (), steps: int = 2, resume: bool = False) -> None:
        """Train; `off` are releases that are not made, `faults` calls that fail."""
        plan = plan_run([], [*self._settings, f"train.max_steps={steps}"], [str(self._directory / "shared.py")])
        self.module = sys.modules["rlcore_file_shared"]
        self.module.HELD.clear()
        self.module.EVENTS.clear()
        self.module.OFF.clear()
        self.module.OFF.update(off)
        self.module.FAULTS.clear()
        self.module.FAULTS.update(faults)
        run_training(plan, Start(resume=resume))

    @property
    def log(self) -> str:
        """The run's log."""
        return (self._directory / "runs" / "run" / "log.txt").read_text()


@pytest.fixture
def device(tmp_path: Path) -> SharedDevice:
    return SharedDevice(tmp_path)


@pytest.mark.slow
def test_two_steps_and_a_resumed_one_never_exceed_the_device(device: SharedDevice) -> None:
    device.run()
    assert (
        device.module.EVENTS
        == [
            "rollout sleeps",
            "update",
            "publish",
            "gather",
            "load",
            "rollout wakes",
        ]
        * 2
    ), "what the actor gathers is gone when the rollout gets memory for weights, and those before its cache"
    device.run(steps=3, resume=True)
    assert device.module.EVENTS[:4] == ["rollout sleeps", "publish", "gather", "load"], "a restore has the device, too"
    assert device.module.EVENTS.count("rollout wakes") == 2


@pytest.mark.parametrize(
    ("release", "where"),
    [
        ("actor start", "at rollout's cache"),
        ("actor offload", "'actor's optimizer'"),
        ("actor end_updates", "at actor's whole weights"),
        ("actor weights", "'actor's whole weights'"),
        ("reference pass", "at actor's cache"),
        ("rollout sleep", "at reference's cache"),
        ("judge sleep", "at actor's cache"),
    ],
)
def test_the_device_overflows_when_a_release_is_not_made(device: SharedDevice, release: str, where: str) -> None:
    with pytest.raises(RlcoreError, match="no room at") as caught:
        device.run(off=[release])
    assert where in str(caught.value).replace('"', "'"), "servers wake in any order"


@pytest.mark.slow
def test_the_device_overflows_when_a_restore_keeps_what_it_needed(device: SharedDevice) -> None:
    device.run(steps=1)
    with pytest.raises(RlcoreError, match="no room at actor's whole weights"):
        device.run(off=["actor restore"], steps=2, resume=True)


@pytest.mark.parametrize("fault", ["rollout sleeps", "update", "publish", "gather", "load", "rollout wakes"])
def test_a_step_that_fails_anywhere_ends_the_run_with_one_line_and_nothing_asleep(
    device: SharedDevice, fault: str
) -> None:
    with pytest.raises(WorkerError) as caught:
        device.run(faults=[fault])
    assert f"{fault} fails" in str(caught.value)
    assert "\n" not in str(caught.value)
    held = device.module.HELD
    if fault == "rollout wakes":
        assert device.module.EVENTS.count("rollout wakes") == 1, "it is not asked a second time"
    else:
        assert {"rollout's cache", "judge's weights"} <= held.keys(), "servers are awake when the run ends"


def test_an_error_is_not_hidden_by_a_server_that_cannot_wake_after_it(device: SharedDevice) -> None:
    with pytest.raises(WorkerError, match="update fails"):
        device.run(faults=["update", "rollout wakes"])
    assert "rollout wakes fails" in device.log
