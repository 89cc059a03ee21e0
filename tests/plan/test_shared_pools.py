"""A pool that is a union of others: its servers sleep while the actor trains, in whatever way a step ends."""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.replica import ReplicaGroup
from rlcore.errors import PlanError, WorkerError
from rlcore.plan import Facts, make_plan
from rlcore.plan.memory import CONTEXT_BYTES
from rlcore.plugins import configure
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.runtime.utilization import BusyMeter
from rlcore.testing import write_prompts
from rlcore.train import run_training
from rlcore.train.signals import Stopped

FLOAT32 = ("cluster.device=cuda", "actor.dtype=float32")
PLUGIN = '''
"""An actor, rollout replicas and judges that say what they do, in order."""
import os
import signal

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.components import Component
from rlcore.contracts.offers import PoolSpec, WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_replica import RawScore, RewardReplica
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullActor, NullReplica
from rlcore.types import Reward, ScoredTrajectory

RLCORE_API = "1"
EVENTS, FAULTS = [], set()
JUDGE = Role("judge", RewardReplica)


def say(what):
    EVENTS.append(what)
    if what in FAULTS:
        raise RuntimeError(f"{what} fails")
    if f"signal at {what}" in FAULTS:
        os.kill(os.getpid(), signal.SIGINT)


class Actor(NullActor):
    def update(self, minibatch):
        say("update")
        return super().update(minibatch)

    def publish(self, version):
        say("publish")
        super().publish(version)


class Rollout(NullReplica):
    async def generate(self, requests):
        async for completion in super().generate(requests):
            say("sample")
            yield completion

    async def load_weights(self, handle):
        say("weights")
        return await super().load_weights(handle)

    async def sleep(self):
        say("rollout sleeps")
        await super().sleep()

    async def wake(self):
        say("rollout wakes")
        await super().wake()


class Judge(RewardReplica):
    def setup(self):
        pass

    async def score(self, requests):
        say("score")
        return [RawScore(request.id, float(len(request.id) % 3)) for request in requests]

    async def health(self):
        return "well"

    async def sleep(self):
        say("judge sleeps")

    async def wake(self):
        say("judge wakes")


class Sleepless(Judge):
    sleep = RewardReplica.sleep


class Judged(RewardManager):
    def __init__(self, context):
        self.group = context.workers(JUDGE)

    async def score(self, stream, lane):
        from rlcore.contracts.reward_replica import ScoreRequest

        async for row in stream:
            [raw] = await self.group.replicas[0].call(RewardReplica.score, [ScoreRequest(str(row.id), ())])
            yield ScoredTrajectory(row, Reward(raw.score + row.id.sample))


@hookimpl
def rlcore_reward_managers():
    def asks(config, section):
        gpus = 1.0 if config.cluster.device == "cuda" else 0.0
        backend = "sleepless" if config.train.seed == 9 else "judged"
        return [WorkerRequest(JUDGE, backend, pool="reward", isolated=True, gpus=gpus, device_frac=0.9 * gpus)]

    return [Component("judged", Judged, asks, uses_reward_functions=True)]


@hookimpl
def rlcore_resource_pools(requests):
    return [PoolSpec("reward"), PoolSpec("train", colocates=("rollout", "reward"))]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "turns", Actor),
        WorkerClass(RolloutWorker, "turns", Rollout, isolated=True),
        WorkerClass(RewardReplica, "judged", Judge, isolated=True),
        WorkerClass(RewardReplica, "sleepless", Sleepless, isolated=True),
    ]
'''
SLEEP, WAKE = {"rollout sleeps", "judge sleeps"}, {"rollout wakes", "judge wakes"}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    (tmp_path / "turns.py").write_text(PLUGIN)
    return [
        "model.path=none",
        "model.tokenizer=bytes",
        f"data.sources.all.path={write_prompts(tmp_path / 'prompts.jsonl', 8)}",
        "actor.backend=turns",
        "rollout.backend=turns",
        "rollout.pool=rollout",
        "rollout.samples_per_prompt=2",
        "rollout.max_tokens=4",
        "reward.manager=judged",
        "cluster.train_pool=train",
        "cluster.in_process=true",
        "train.prompts_per_step=2",
        "train.max_steps=2",
        "train.name=run",
        "checkpoint.at_end=false",
        f"train.dir={tmp_path / 'runs'}",
    ]


def happened(overrides: list[str], error: type[BaseException] | None = None, *faults: str) -> list[str]:
    """The events of a run with these faults, which ends with `error`; repeated events count once."""
    plugins = [str(Path(overrides[-1].partition("=")[2]).parent / "turns.py")]
    plan = plan_run([], overrides, plugins)
    module: Any = sys.modules["rlcore_file_turns"]
    module.FAULTS.update(faults)
    if error is None:
        run_training(plan)
    else:
        with pytest.raises(error):
            run_training(plan)
    return [event for event, _ in groupby(module.EVENTS)]


def test_servers_sleep_while_the_actor_trains_and_get_its_weights_before_they_wake(overrides: list[str]) -> None:
    events = happened(overrides)
    steps = [list(words) for is_end, words in groupby(events, lambda word: word in WAKE) if not is_end]
    assert steps.pop() == ["sample"], "a replica's, with the last version, which nothing trains on"
    assert len(steps) == 2
    assert [set(words) for is_end, words in groupby(events, lambda word: word in WAKE) if is_end] == [WAKE, WAKE]
    for words in steps:
        assert set(words[:-5]) == {"sample", "score"}
        assert set(words[-5:-3]) == SLEEP
        assert words[-3:] == ["update", "publish", "weights"]
    directory = Path(overrides[-1].partition("=")[2]) / "run"
    for row in metrics.read(directory):
        assert {"time/drain_s", "time/admit_s"} <= row.keys(), "on a CPU nothing but admission ends"
        for pool in ("rollout", "reward"):
            assert 0.0 < row[f"time/pool/{pool}/busy_frac"] <= 1.0
        assert "time/pool/train/busy_frac" not in row, "a union has no separate devices"


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (WorkerError, "update"),
        (WorkerError, "judge sleeps"),
        (Stopped, "signal at update"),
        (Stopped, "signal at judge sleeps"),
    ],
)
def test_servers_wake_however_a_step_ends(overrides: list[str], error: type[BaseException], fault: str) -> None:
    events = happened(overrides, error, fault)
    asleep = [text for text in ("rollout", "judge") if f"{text} sleeps" in events]
    assert "judge" in asleep
    for role in asleep:
        assert f"{role} wakes" in events[events.index(f"{role} sleeps") :], "a sleeping server is woken"
    if fault == "judge sleeps":
        assert "update" not in events, "the actor trains on free devices only"


def test_what_cannot_take_turns_is_refused(overrides: list[str]) -> None:
    plugins = [str(Path(overrides[-1].partition("=")[2]).parent / "turns.py")]

    def refused(*more: str, facts: Facts | None = None) -> str:
        hooks, loaded = configure([], [*overrides, *more], plugins)
        with pytest.raises(PlanError) as caught:
            make_plan(loaded, hooks, facts or Facts(cpus=2))
        return str(caught.value)

    line = refused("schedule.max_staleness=1")
    assert "union with rollout, reward: while the actor trains judge, rollout sleep" in line
    assert "schedule.max_staleness=0" in line
    assert "Sleepless of plugin 'turns' (" in (line := refused("train.seed=9"))
    assert "has no sleep()" in line
    small = Facts(cpus=2, gpus=2, gpu_memory_bytes=2**30, parameters=20_000_000)
    assert "while serving" in refused("cluster.device=cuda", "actor.data_parallel=2", facts=small)


def test_memory_is_estimated_for_each_device_and_phase(overrides: list[str]) -> None:
    plugins = [str(Path(overrides[-1].partition("=")[2]).parent / "turns.py")]
    hooks, loaded = configure([], [*overrides, *FLOAT32, "actor.data_parallel=2"], plugins)
    facts = Facts(cpus=2, gpus=2, gpu_memory_bytes=100 * 2**30, parameters=100_000_000)
    plan = make_plan(loaded, hooks, facts)
    weights = 16 * facts.parameters  # and gradients and Adam's moments
    assert plan.colocated_roles == ("judge", "rollout")
    assert {pool.name: pool.gpus for pool in plan.pools} == {"reward": (0,), "rollout": (1,), "train": (1, 0)}
    contexts = 2 * CONTEXT_BYTES  # of the actor's process and of the server's, also while that sleeps
    reserved = int(0.9 * 100 * 2**30)
    rests = 12 * facts.parameters  # without gradients
    assert plan.device_bytes["reward"] == {"serving": reserved + rests + contexts, "training": weights + contexts}
    assert plan.device_bytes["rollout"] == {"serving": rests + contexts, "training": weights + contexts}


def test_an_offloaded_actor_holds_nothing_while_servers_serve_and_everything_while_it_trains(
    overrides: list[str],
) -> None:
    plugins = [str(Path(overrides[-1].partition("=")[2]).parent / "turns.py")]
    facts = Facts(cpus=2, gpus=2, gpu_memory_bytes=100 * 2**30, parameters=100_000_000)

    def on_devices(*more: str) -> dict[str, dict[str, int]]:
        settings = [*overrides, *FLOAT32, "actor.data_parallel=2", *more]
        hooks, loaded = configure([], settings, plugins)
        return {name: dict(amount) for name, amount in make_plan(loaded, hooks, facts).device_bytes.items()}

    contexts = 2 * CONTEXT_BYTES
    training = 16 * facts.parameters + contexts
    assert on_devices("actor.offload=true")["rollout"] == {"serving": contexts, "training": training}
    rests = training - 4 * facts.parameters
    assert on_devices()["rollout"] == {"serving": rests, "training": training}


def test_a_run_that_is_too_large_to_train_is_not_advised_to_offload(overrides: list[str]) -> None:
    plugins = [str(Path(overrides[-1].partition("=")[2]).parent / "turns.py")]

    def refused(*more: str) -> str:
        hooks, loaded = configure([], [*overrides, *FLOAT32, "algo.kl.placement=loss", *more], plugins)
        facts = Facts(cpus=2, gpus=2, gpu_memory_bytes=10 * 2**30, parameters=600_000_000)
        with pytest.raises(PlanError) as caught:  # 9.6 GB of the actor alone and 2.4 GB of the reference
            make_plan(loaded, hooks, facts)
        return str(caught.value)

    assert "while serving" in (line := refused())
    assert line.endswith("give the roles separate pools, or set actor.offload=true")
    assert "while training" in (line := refused("actor.offload=true"))
    assert line.endswith("give the roles separate pools")


def test_a_pool_is_as_busy_as_the_busiest_of_its_roles() -> None:
    now = [0.0]
    meter = BusyMeter({"left": ("actor", "server"), "right": ("actor",)}, lambda: now[0])
    actor, server = meter.metered("actor", ReplicaGroup([None])), meter.metered("server", ReplicaGroup([None] * 4))
    meter.change("server", 1)  # a quarter for 4 s, half for 2 s
    now[0] = 4.0
    meter.change("server", 1)
    now[0] = 6.0
    meter.change("actor", 1)  # all of it, whatever else
    now[0] = 8.0
    meter.change("actor", -1)
    meter.change("server", -2)
    now[0] = 10.0
    assert meter.take() == {"time/pool/left/busy_frac": 0.4, "time/pool/right/busy_frac": 0.2}
    assert meter.take()["time/pool/left/busy_frac"] == 0.0
    assert (len(actor.replicas), len(server.replicas)) == (1, 4)
