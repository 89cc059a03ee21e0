"""The suites of workers: on those of the null plugin and of the transformers backend, and red on broken ones."""

import tempfile
from functools import cache
from pathlib import Path

from rlcore.backends.hf import HfActor, HfReference, HfRollout
from rlcore.testing.null import NullActor, NullReference, NullReplica, NullRollout
from rlcore.testing.null_critic import NullCritic
from rlcore.testing.suites.actor import ActorWorkerSuite
from rlcore.testing.suites.critic import CriticWorkerSuite
from rlcore.testing.suites.reference import ReferenceWorkerSuite
from rlcore.testing.suites.rollout import RolloutWorkerSuite
from rlcore.testing.tiny import write_tiny_model

class TestNullActor(ActorWorkerSuite):
    target = NullActor
    hands_out_weights = True


class TestNullReference(ReferenceWorkerSuite):
    target = NullReference


class TestNullRollout(RolloutWorkerSuite):
    target = NullRollout
    host = NullActor


class TestNullReplica(RolloutWorkerSuite):
    target = NullReplica
    actor = NullActor
    sleeps = True


class TestNullCritic(CriticWorkerSuite):
    target = NullCritic


@cache
def tiny() -> str:
    return str(write_tiny_model(Path(tempfile.mkdtemp()) / "tiny"))


class TestHfActor(ActorWorkerSuite):
    target = HfActor
    hands_out_weights = True

    @property
    def settings(self):
        return {"model.path": tiny()}

class TestHfReference(ReferenceWorkerSuite):
    target = HfReference

    @property
    def settings(self):
        return {"model.path": tiny()}

class TestHfReferenceInside(ReferenceWorkerSuite):
    target = HfReference
    host = HfActor

    @property
    def settings(self):
        return {"model.path": tiny(), "actor.lora.enabled": True}

class TestHfRollout(RolloutWorkerSuite):
    target = HfRollout
    host = HfActor

    @property
    def settings(self):
        return {"model.path": tiny()}
