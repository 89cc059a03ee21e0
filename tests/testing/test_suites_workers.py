"""The suites of workers: green on those of the null plugin and of the transformers backend."""

from pathlib import Path

import pytest

from rlcore.engines.hf.worker import HfActor, HfReference, HfRollout
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class OnTiny:
    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path) -> None:
        self.settings = {**getattr(type(self), "settings", {}), "model.path": str(tiny)}


class TestHfActor(OnTiny, ActorWorkerSuite):
    target = HfActor
    hands_out_weights = True


class TestHfActorWithAnAdapter(OnTiny, ActorWorkerSuite):
    target = HfActor
    settings = {"actor.lora.enabled": True, "actor.lr": 0.01}
    model_directory = "adapter"
    hands_out_weights = True


class TestHfReference(OnTiny, ReferenceWorkerSuite):
    target = HfReference


class TestHfReferenceInTheActor(OnTiny, ReferenceWorkerSuite):
    target = HfReference
    host = HfActor
    settings = {"actor.lora.enabled": True}


class TestHfRollout(OnTiny, RolloutWorkerSuite):
    target = HfRollout
    host = HfActor
