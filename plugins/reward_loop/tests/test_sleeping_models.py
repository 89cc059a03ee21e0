"""A reward model whose device is needed elsewhere computes nothing until it is woken."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop.models.worker import HfReplica
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings

from rlcore.contracts.reward_replica import RawScore, ScoreRequest
from rlcore.contracts.workers import WorkerContext
from rlcore.types import FrozenDict

REQUEST = ScoreRequest("p/0/0", (FrozenDict[str, Any]({"role": "user", "content": "?"}),))


class Classifier:
    """Counts rows, and fails for those that come while its weights are off the device."""

    conversations = SimpleNamespace(read=lambda messages: [1, 2, 3], pad_id=0)

    def __init__(self) -> None:
        self.is_loaded, self.num_rows = True, 0

    def scores(self, rows: list[Any]) -> list[float]:
        if not self.is_loaded:
            raise RuntimeError("the weights are not on the device")
        self.num_rows += len(rows)
        return [1.0] * len(rows)

    def offload(self) -> None:
        self.is_loaded = False

    def reload(self) -> None:
        self.is_loaded = True


class Replica(HfReplica):
    """A replica of that classifier."""

    def _section(self) -> RewardLoopSettings:
        return RewardLoopSettings(models={"reward": ModelSettings(path="x", batch_wait_s=0.0)})

    def _load(self) -> Any:
        return Classifier()


@pytest.mark.parametrize("first", ["score", "sleep", "sleep, wake, sleep"])
def test_a_model_that_is_asked_and_put_to_sleep_at_once_computes_before_or_after_but_not_meanwhile(first: str) -> None:
    async def story() -> tuple[int, list[RawScore]]:
        replica = Replica(WorkerContext("reward", 0, 0, 1, None, None, {}, Path(), 0, 1, "cpu"))
        replica.setup()
        if first == "sleep, wake, sleep":  # the call is woken, and finds it asleep again
            await replica.sleep()
            asking = asyncio.create_task(replica.score([REQUEST]))
            await asyncio.sleep(0)
            await replica.wake()
            await replica.sleep()
        else:
            calls = {"score": lambda: replica.score([REQUEST]), "sleep": replica.sleep}
            tasks = {name: asyncio.create_task(calls[name]()) for name in sorted(calls, key=lambda name: name != first)}
            asking = tasks["score"]
            await tasks["sleep"]
        await asyncio.sleep(0.02)
        before = replica._classifier.num_rows
        await replica.wake()
        found = await asking
        replica.close()
        return before, found

    num_before, found = asyncio.run(story())
    assert num_before == (1 if first == "score" else 0)
    assert [(answer.score, answer.error) for answer in found] == [(1.0, "")]
