"""Replicas of reward models without an engine: options of a judge, whole answers, errors of one request, and sleep."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_vllm.judge import check_options, is_whole
from rlcore_vllm.replica import VllmReplica

from rlcore.contracts.reward_models import GUIDES, Unreadable
from rlcore.contracts.reward_replica import RawScore, ScoreRequest
from rlcore.contracts.workers import WorkerContext
from rlcore.errors import WorkerError
from rlcore.types import FrozenDict


def request(*messages: dict[str, Any]) -> ScoreRequest:
    return ScoreRequest("p/0/0", tuple(FrozenDict[str, Any](message) for message in messages))


def replica(reader: Any, engine: Any, device: str = "cpu") -> VllmReplica:
    config = SimpleNamespace(cluster=SimpleNamespace(in_process=True))
    found = VllmReplica(WorkerContext("reward", 0, 0, 1, config, None, {}, Path(), 0, 1, device))
    found.open_with(reader, engine)
    return found


def test_an_option_that_is_not_known_is_named_and_every_guide_is_known() -> None:
    with pytest.raises(Unreadable, match=r"option 'response_format' is not known; choose from: max_tokens"):
        check_options({"response_format": {}})
    check_options({"max_tokens": 7, "temperature": 0.0, **dict.fromkeys(GUIDES, "x")})


def test_an_answer_that_ends_at_its_last_token_is_whole_when_its_guide_ended_there() -> None:
    assert is_whole('{"score": 7}', {"json": {}})
    assert not is_whole('{"sco', {"json": {}})
    assert not is_whole('{"sco', {"json_object": True})
    assert is_whole("7", {"regex": "[0-9]"})
    assert not is_whole('{"score": 7}', {})


def test_what_the_engine_refuses_is_the_requests_error_unless_the_engine_has_died() -> None:
    class Reader:
        async def answer(self, engine: Any, request: ScoreRequest, number: str) -> RawScore:
            if request.messages:
                raise ValueError("temperature must be non-negative, got -1")
            return RawScore(request.id, 1.0)

    bad = request({"role": "user", "content": "?"})
    alive, dead = SimpleNamespace(errored=False), SimpleNamespace(errored=True)
    [refused, good] = asyncio.run(replica(Reader(), alive).score([bad, request()]))
    assert refused.error == "vLLM: ValueError: temperature must be non-negative, got -1"
    assert (good.error, good.score) == ("", 1.0)
    with pytest.raises(WorkerError, match=r"reward\[0\.0\]: its engine: vLLM: ValueError"):
        asyncio.run(replica(Reader(), dead).score([bad]))


def test_an_engine_that_sleeps_is_not_put_to_sleep_again() -> None:
    """Both the reward manager and the run's turns make a scorer in the actor's pool sleep."""
    events: list[str] = []

    class Engine:
        async def is_sleeping(self) -> bool:
            return events[-1:] == ["sleep"]

        async def sleep(self, level: int) -> None:
            events.append("sleep")

        async def wake_up(self) -> None:
            events.append("wake")

    async def story() -> None:
        slept = replica(None, Engine(), "cuda:0")
        for method in (slept.sleep, slept.sleep, slept.wake, slept.wake):
            await method()

    asyncio.run(story())
    assert events == ["sleep", "wake"]
