"""The suites of rlcore on the manager, its parts of the reward, the replica and the pools."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop import build, rlcore_resource_pools
from rlcore_reward_loop.manager import RewardLoop
from rlcore_reward_loop.models.worker import HfReplica
from rlcore_reward_loop.rewards import RemoteReward

from rlcore import BuildContext
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_models import RewardModel
from rlcore.contracts.reward_replica import RewardReplica
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import ServiceAnswer, ServiceCall, chat_answer, serving
from rlcore.testing.suites.pool import ResourcePoolSuite
from rlcore.testing.suites.reward_manager import RewardManagerSuite
from rlcore.testing.suites.reward_replica import RewardReplicaSuite
from rlcore.testing.suites.scorer import ScorerSuite
from rlcore.testing.tiny import write_tiny_classifier
from rlcore.types import FrozenDict, Trajectory

REWARD = "plugins.reward_loop.rewards.helpful"
MODEL = "plugins.reward_loop.models.reward"


def script(call: ServiceCall) -> ServiceAnswer:
    """A judge or a scoring service: the length of what it is asked, and no answer to 'unreadable'."""
    if b"unreadable" in call.body:
        return ServiceAnswer(status=400)
    question = call.json()
    if "messages" in question and "completion" not in question:
        text = question["messages"][-1]["content"]
        return chat_answer(f'{{"score": {float("is 7" in text)}}}')
    return ServiceAnswer({"score": len(question["completion"])})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(script) as service:
        yield service.url


class OnService:
    plugins = ("reward_loop",)

    @pytest.fixture(autouse=True)
    def _service(self, url: str) -> None:
        self.settings = {
            **getattr(type(self), "settings", {}),
            f"{REWARD}.served_by": "scorer",
            "plugins.reward_loop.services.scorer.urls": [url],
        }


class TestManager(OnService, RewardManagerSuite):
    target = build
    settings = {"reward.functions.letters.weight": 0.0}
    failing = (make_trajectory(9, text="unreadable"),)

    @staticmethod
    def expected(trajectory: Trajectory) -> float:
        return float(len(trajectory.text()))

    def test_its_weights_are_those_of_functions_and_rewards(self) -> None:
        async def main(manager: RewardLoop) -> None:
            assert manager.weights == {"letters": 0.0, "helpful": 1.0}

        self.use(main)


class TestManagerWithRunningStatistics(OnService, RewardManagerSuite):
    target = build
    settings = {f"{REWARD}.normalise": True}


async def parts(context: BuildContext) -> AsyncIterator[RemoteReward]:
    manager = RewardLoop(context)
    await manager.start()
    try:
        [reward] = manager._rewards
        yield reward
    finally:
        await manager.close()


class TestServedReward(OnService, ScorerSuite):
    target = parts
    known_good = ("a long response",)
    known_bad = ("short",)
    failing = ("unreadable",)


class TestJudge(OnService, ScorerSuite):
    target = parts
    settings = {f"{REWARD}.kind": "judge"}
    known_good = ("it is 7",)
    known_bad = ("it is 8",)
    failing = ("unreadable",)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_classifier(tmp_path_factory.mktemp("model") / "tiny")


class TestReplica(RewardReplicaSuite):
    target = HfReplica
    plugins = ("reward_loop",)
    unreadable = (FrozenDict({"role": "user", "content": "x" * 1000}),)
    sleeps = True

    @pytest.fixture(autouse=True)
    def _model(self, tiny: Path) -> None:
        arguments: dict[str, Any] = {"path": str(tiny), "tokenizer": "bytes", "max_tokens": 200}
        self.specs = {"reward": RewardModel(**arguments)}
        self.settings = {f"{REWARD}.kind": "model", f"{REWARD}.served_by": "reward"} | {
            f"{MODEL}.{name}": value for name, value in arguments.items()
        }


class TestPool(ResourcePoolSuite):
    target = rlcore_resource_pools
    requests = (WorkerRequest(Role("judge", RewardReplica), "hf", "reward", replicas=2, gpus=1.0),)
