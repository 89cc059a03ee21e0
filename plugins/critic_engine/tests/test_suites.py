"""The suites of rlcore on the critic engine, its worker and its pool."""

from pathlib import Path

import pytest
from rlcore_critic_engine import build, rlcore_resource_pools
from rlcore_critic_engine.critic import CRITIC
from rlcore_critic_engine.worker import HfCritic

from rlcore.contracts.requests import WorkerRequest
from rlcore.engines.hf.worker import HfActor
from rlcore.testing.null_critic import NullCritic
from rlcore.testing.suites.critic import CriticEngineSuite, CriticWorkerSuite
from rlcore.testing.suites.pool import ResourcePoolSuite
from rlcore.testing.tiny import write_tiny_model

FUNCTIONS = {"policy_loss": "rlcore.algo.loss:clip", "value_loss": "rlcore_critic_engine.loss:ValueLoss"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class OnTiny:
    plugins = ("critic_engine",)
    references = FUNCTIONS

    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path) -> None:
        arguments = {"algo.preset": "ppo", "plugins.critic_engine.lr": 0.01}
        self.settings = {**arguments, **getattr(type(self), "settings", {}), "model.path": str(tiny)}


class TestWorker(OnTiny, CriticWorkerSuite):
    target = HfCritic


class TestWorkerInTheActor(OnTiny, CriticWorkerSuite):
    target = HfCritic
    host = HfActor
    settings = {"plugins.critic_engine.trunk": "actor"}


class TestEngine(OnTiny, CriticEngineSuite):
    target = build
    workers = {"critic": HfCritic}
    estimates = True


class TestEngineOnTheNullWorker(CriticEngineSuite):
    target = build
    plugins = ("critic_engine", "null")
    settings = {"algo.preset": "ppo", "critic.engine": "critic_engine"}
    workers = {"critic": NullCritic}
    estimates = True


class TestPool(ResourcePoolSuite):
    target = rlcore_resource_pools
    requests = (WorkerRequest(CRITIC, "hf", "critic", gpus=1.0),)
