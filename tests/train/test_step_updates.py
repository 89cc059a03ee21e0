"""Actor and critic are notified when the updates of a step begin and end, once each, however the step ends."""

import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.testing import write_prompts
from rlcore.train import run_training
from rlcore.train.signals import Stopped

pytestmark = pytest.mark.usefixtures("rewards_in_process")

PLUGIN = '''
"""An actor and a critic that record their notifications in order."""
import os
import signal

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.critic import CriticEngine, CriticWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.components import Component
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullActor, NullRollout
from rlcore.testing.null_critic import NullCritic

RLCORE_API = "1"
EVENTS, FAULTS = [], set()
CRITIC = Role("critic", CriticWorker)


def say(what):
    EVENTS.append(what)
    if what in FAULTS:
        raise RuntimeError(f"{what} fails")
    if f"signal at {what}" in FAULTS:
        os.kill(os.getpid(), signal.SIGINT)


class Actor(NullActor):
    def begin_updates(self):
        say("actor begins")

    def end_updates(self):
        say("actor ends")

    def update(self, minibatch):
        say("actor updates")
        return super().update(minibatch)

    def publish(self, version):
        say("publish")
        super().publish(version)


class Critic(NullCritic):
    def begin_updates(self):
        say("critic begins")

    def end_updates(self):
        say("critic ends")

    def update(self, minibatch):
        say("critic updates")
        return super().update(minibatch)


class Engine(CriticEngine):
    """The actor waits for as many of the critic's updates as the seed says."""

    def __init__(self, context):
        self.worker, self.waits, self.updates = context.workers(CRITIC).replicas[0], context.seed, 0

    async def values(self, batch):
        return await self.worker.call(CriticWorker.values, batch)

    async def begin_updates(self):
        await self.worker.call(CriticWorker.begin_updates)

    async def end_updates(self):
        await self.worker.call(CriticWorker.end_updates)

    async def update(self, minibatch):
        self.updates += 1
        return await self.worker.call(CriticWorker.update, minibatch)

    def actor_may_update(self):
        return self.updates > self.waits


def letters(completions, **columns):
    return [float(len(completion)) for completion in completions]


@hookimpl
def rlcore_critic_engines():
    return [Component("told", Engine, lambda config, section: [WorkerRequest(CRITIC, "told")])]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "told", Actor),
        WorkerClass(RolloutWorker, "told", NullRollout, embedded_in=ACTOR),
        WorkerClass(CriticWorker, "told", Critic),
    ]
'''
UPDATE = ["critic updates", "actor updates"]
ENDS = ["critic ends", "actor ends", "publish"]
WHOLE = ["critic begins", "critic updates", "actor begins", "actor updates", *UPDATE, *ENDS]
"""A step of two mini-batches."""


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    (tmp_path / "told.py").write_text(PLUGIN)
    return [
        "model.path=none",
        "model.tokenizer=bytes",
        f"data.sources.all.path={write_prompts(tmp_path / 'prompts.jsonl', 8)}",
        "actor.backend=told",
        "actor.minibatch_prompts=2",
        "rollout.backend=told",
        "rollout.samples_per_prompt=2",
        "rollout.max_tokens=4",
        f"reward.functions.letters.fn={tmp_path / 'told.py'}:letters",
        "reward.functions.letters.children=1",
        "algo.advantage=gae",
        "critic.engine=told",
        "cluster.in_process=true",
        "train.prompts_per_step=4",
        "train.max_steps=2",
        "train.seed=0",
        "train.name=run",
        "checkpoint.at_end=false",
        f"train.dir={tmp_path / 'runs'}",
    ]


def happened(overrides: list[str], *faults: str, error: type[BaseException] | None = None) -> tuple[list[str], str]:
    """The calls to actor and critic in a run with these faults, and the error that ended it."""
    directory = Path(overrides[-1].partition("=")[2]).parent
    plugins = [str(directory / "told.py")]
    plan = plan_run([], overrides, plugins)
    module: Any = sys.modules["rlcore_file_told"]
    module.FAULTS.update(faults)
    if error is None:
        run_training(plan)
        return module.EVENTS, ""
    with pytest.raises(error) as caught:
        run_training(plan)
    return module.EVENTS, str(caught.value)


@pytest.mark.parametrize("schedule", [(), ("schedule.stream_minibatches=true", "algo.whiten_advantages=false")])
def test_each_is_notified_once_around_all_updates_of_a_step(overrides: list[str], schedule: tuple[str, ...]) -> None:
    events, _ = happened([*schedule, *overrides])
    assert events == WHOLE * 2


def test_every_epoch_is_inside(overrides: list[str]) -> None:
    events, _ = happened(["actor.epochs=2", *overrides])
    assert [event for event in events if "begins" in event or "ends" in event] == [
        *("critic begins", "actor begins", "critic ends", "actor ends"),
    ] * 2
    assert events.count("actor updates") == 2 * 4


def test_an_actor_that_waits_for_its_critic_is_not_notified_before_it_updates(overrides: list[str]) -> None:
    events, _ = happened([override if override != "train.seed=0" else "train.seed=3" for override in overrides])
    warming = ["critic begins", "critic updates", "critic updates", "critic ends", "publish"]
    half = ["critic begins", "critic updates", "critic updates", "actor begins", "actor updates", *ENDS]
    assert events == warming + half


@pytest.mark.parametrize(("waits", "says"), [(3, False), (4, True)])
def test_a_run_whose_critic_never_let_the_actor_update_says_so_at_the_end(
    overrides: list[str], capsys: pytest.CaptureFixture[str], waits: int, says: bool
) -> None:
    happened([override if override != "train.seed=0" else f"train.seed={waits}" for override in overrides])
    line = (
        "warning: the policy has not changed: critic.engine=told kept the actor from all 4 updates, because its actor_"
    )
    assert (line in capsys.readouterr().out) == says


@pytest.mark.parametrize("fault", ["critic updates", "actor updates", "actor begins"])
def test_what_has_begun_ends_after_an_error_too(overrides: list[str], fault: str) -> None:
    events, message = happened(overrides, fault, error=WorkerError)
    assert f"{fault} fails" in message
    begun = [event.split()[0] for event in events if event.endswith("begins")]
    assert events[-len(begun) :] == [f"{who} ends" for who in begun]
    assert "publish" not in events


def test_an_end_that_fails_ends_the_run_and_hides_no_earlier_error(overrides: list[str]) -> None:
    events, message = happened(overrides, "critic ends", error=WorkerError)
    assert "critic ends fails" in message
    assert events[-2:] == ["critic ends", "actor ends"], "the other one is still called"


def test_the_error_of_an_update_stands_before_that_of_its_end(overrides: list[str]) -> None:
    _, message = happened(overrides, "actor updates", "actor ends", error=WorkerError)
    assert "actor updates fails" in message


def test_a_signal_waits_for_no_end(overrides: list[str]) -> None:
    events, _ = happened(overrides, "signal at critic updates", error=Stopped)
    assert not [event for event, _ in groupby(events) if event.endswith("ends")]
