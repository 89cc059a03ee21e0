"""Replicas of a reward model that answer something other than one score for the one request of a call."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.settings import ModelSettings

from rlcore.aio import Stopwatch
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
from rlcore.types import FrozenDict, Lane

WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned NoneType for one request; needs [RawScore]"),
    "none": ([], "returned [] for one request; needs [RawScore]"),
    "two": ([RawScore("1", 1.0)] * 2, "returned [RawScore, RawScore] for one request; needs [RawScore]"),
    "a number": ([1.0], "returned [float] for one request; needs [RawScore]"),
    "another's": ([RawScore("7", 1.0)], "answered request '7'; needs '1', the request's id"),
}


@dataclass
class Handle:
    """A replica whose first answers, over all replicas, are wrong."""

    name: str
    wrong: Any
    left: list[None]
    """One entry per wrong answer that is still to come."""
    calls: list[str]
    alive: bool = True

    async def call(self, method: Any, *args: Any) -> Any:
        if method is RewardReplica.health:
            return "fine"
        self.calls.append(self.name)
        if self.left:
            self.left.pop()
            return self.wrong
        return [RawScore("1", 3.0)]


def ask(wrong: Any, num_wrong: int, directory: Path) -> tuple[list[str], RawScore | str]:
    """The replicas that were called, and the answer or the reason why there is none."""
    left, calls = [None] * num_wrong, list[str]()
    group: Any = SimpleNamespace(replicas=[Handle(f"reward[{index}]", wrong, left, calls) for index in range(3)])
    log = CallLog(directory, "all", 1000)
    replicas = Replicas("reward", ModelSettings(path="p"), group, log, Stopwatch())
    request = ScoreRequest("1", (FrozenDict({"role": "user", "content": "?"}),))

    async def run() -> RawScore | str:
        try:
            return await replicas.ask("liked", request, Lane.TRAIN)
        except NoAnswer as error:
            return str(error)
        finally:
            await replicas.close()

    answer = asyncio.run(run())
    log.close()
    return calls, answer


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_names_its_replica_and_the_request_goes_to_another(wrong: str, tmp_path: Path) -> None:
    answer, problem = WRONG[wrong]
    (first, second), found = ask(answer, 1, tmp_path)
    assert first != second
    assert found == RawScore("1", 3.0)
    (first, second), found = ask(answer, 2, tmp_path)
    assert found == f"model 'reward': {second}.score() {problem}; the try before that: {first}.score() {problem}"
