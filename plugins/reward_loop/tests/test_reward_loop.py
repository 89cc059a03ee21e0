"""The manager against a real HTTP server on loopback whose answers are scripted."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rlcore_reward_loop import build, requests
from rlcore_reward_loop.manager import RewardLoop
from rlcore_reward_loop.service import pause_s, seconds
from rlcore_reward_loop.settings import RewardLoopSettings

from rlcore import metrics
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.testing import write_prompts
from rlcore.testing.rewards import check_reward_manager, make_trajectory, reward_context, score_all
from rlcore.train import train
from rlcore.types import FrozenDict, RewardStatus, Scored, Trajectory

Answer = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]
"""What to answer to a question that comes for the n-th time, from 1."""
BREAK_OFF = web.Response()
"""An answer that stands for half an answer and a closed connection."""


class ScoringServer:
    """Counts what it is asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.url = ""
        self.questions: list[dict[str, Any]] = []
        self.times: Counter[str] = Counter()
        self.authorizations: set[str | None] = set()
        self.num_open = self.most_open = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        question = await request.json()
        self.questions.append(question)
        self.times[question["id"]] += 1
        self.authorizations.add(request.headers.get("Authorization"))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            answer = await self.answer(question, self.times[question["id"]])
        finally:
            self.num_open -= 1
        return await break_off(request) if answer is BREAK_OFF else answer

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        application = web.Application()
        application.router.add_post("/score", self.handle)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        started.set()
        await stop.wait()
        await runner.cleanup()


async def break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"score": 1.0')
    if request.transport is not None:
        request.transport.close()
    return response


@contextmanager
def serving(answer: Answer) -> Iterator[ScoringServer]:
    """The server in a thread of its own, until the block ends."""
    server, started, loop, stop = ScoringServer(answer), threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(started, stop)))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def score_of(text: str) -> float:
    """A score that tells samples apart."""
    return float(sum(map(ord, text)) % 97)


async def scored(question: dict[str, Any], time: int) -> web.StreamResponse:
    """An answer as it should be."""
    answer = {"score": score_of(str(question["completion"])), "parts": {"length": 2}, "info": {"answer": "x"}}
    return web.json_response(answer)


def samples(number: int) -> list[Trajectory]:
    return [make_trajectory(index // 4, index % 4, text=f"response {index}") for index in range(number)]


def score_with(settings: RewardLoopSettings, trajectories: Sequence[Trajectory]) -> tuple[list[Scored], float]:
    """(what came back, number of retries)"""

    async def run() -> tuple[list[Scored], float]:
        manager = RewardLoop(settings)
        await manager.start()
        try:
            return await score_all(manager, trajectories), manager.metrics()["reward/num_retries"]
        finally:
            await manager.close()

    return asyncio.run(run())


def error_with(settings: RewardLoopSettings) -> str:
    """Why the one sample that was to be scored FAILED."""
    [only], _ = score_with(settings, samples(1))
    assert only.reward.status is RewardStatus.FAILED
    assert only.reward.score == 0.0
    return str(only.reward.info["error"])


def test_the_manager_keeps_the_contract_of_reward_managers(tmp_path: Path) -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        return web.Response(status=400) if question["completion"] == "bad" else await scored(question, time)

    with serving(answer) as server:
        context = reward_context({}, tmp_path, section=RewardLoopSettings(url=server.url))
        report = check_reward_manager(
            build,
            context,
            samples(8),
            failing=[make_trajectory(9, text="bad")],
            expected=lambda each: score_of(each.text()),
        )
    assert report.problems == ()


def test_the_service_gets_prompt_answer_completion_and_columns_and_the_token() -> None:
    said = (FrozenDict({"role": "assistant", "content": "so"}),)
    with serving(scored) as server:
        settings = RewardLoopSettings(url=server.url, token="secret")
        [only], _ = score_with(settings, [make_trajectory(3, sample=2, completion=said)])
    assert server.questions == [
        {
            "id": "test/3/0/2",
            "source": "test",
            "messages": [{"role": "user", "content": "question 3"}],
            "completion": [{"role": "assistant", "content": "so"}],
            "answer": "3",
            "columns": {},
        }
    ]
    assert server.authorizations == {"Bearer secret"}
    assert dict(only.reward.parts) == {"service": only.reward.score, "length": 2.0}
    assert dict(only.reward.info) == {"answer": "x"}


def test_calls_turned_away_are_made_again_until_every_sample_is_scored_once() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        index = int(question["completion"].split()[-1])
        if index % 2 and time == 1:
            return web.Response(status=429, headers={"Retry-After": "0.01"})
        if index == 4 and time < 3:
            return web.Response(status=503)
        return await scored(question, time)

    with serving(answer) as server:
        results, num_retries = score_with(RewardLoopSettings(url=server.url), samples(16))
    assert sorted(each.trajectory.id for each in results) == [each.id for each in samples(16)]
    assert all(each.reward.score == score_of(each.trajectory.text()) for each in results)
    assert num_retries == 8 + 2


def test_a_service_that_stays_unavailable_is_asked_as_often_as_tries_says() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        return web.Response(status=503)

    with serving(answer) as server:
        error = error_with(RewardLoopSettings(url=server.url, tries=2))
    assert server.times == {"test/0/0/0": 2}
    assert error == f"scoring service {server.url}: answered 503 in the last of 2 tries"


def test_nobody_listening_is_a_named_failure() -> None:
    with serving(scored) as server:
        pass
    error = error_with(RewardLoopSettings(url=server.url, tries=2))
    assert "could not be reached (ClientConnectorError" in error
    assert "2 tries" in error


def test_a_call_that_is_never_answered_fails_at_its_deadline_and_the_others_are_scored() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        if question["completion"] == "response 1":
            await asyncio.sleep(600)
        return await scored(question, time)

    with serving(answer) as server:
        results, _ = score_with(RewardLoopSettings(url=server.url, deadline_s=2), samples(8))
    failed = [each for each in results if each.reward.status is RewardStatus.FAILED]
    assert [each.trajectory.text() for each in failed] == ["response 1"]
    assert failed[0].reward.info["error"] == f"scoring service {server.url}: no answer within deadline_s=2"


def test_a_retry_after_beyond_the_deadline_ends_at_the_deadline() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "600"})

    with serving(answer) as server:
        error = error_with(RewardLoopSettings(url=server.url, deadline_s=0.3))
    assert "no answer within deadline_s=0.3, before which it answered 429" in error


def test_no_more_calls_are_open_than_concurrency_allows_and_waiting_for_a_slot_fails_nobody() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return await scored(question, time)

    # Six rounds of two take longer than one call's deadline.
    with serving(answer) as server:
        results, _ = score_with(RewardLoopSettings(url=server.url, concurrency=2, deadline_s=1.5), samples(12))
    assert server.most_open == 2
    assert all(each.reward.status is RewardStatus.OK for each in results)


BAD_ANSWERS = {
    "prose": (b"I would give it a ten.", "JSON is needed"),
    "truncated": (b'{"score": 1.0', "JSON is needed"),
    "empty": (b"", "JSON is needed"),
    "a list": (b"[1.0]", "an object with 'score' is needed"),
    "no score": (b'{"reward": 1.0}', "an object with 'score' is needed"),
    "null": (b'{"score": null}', "'score' returned None"),
    "text": (b'{"score": "10"}', "'score' returned str '10'"),
    "not a number": (b'{"score": NaN}', "a finite number is needed"),
    "infinite": (b'{"score": -Infinity}', "a finite number is needed"),
    "a part that is none": (b'{"score": 1, "parts": {"style": []}}', "'style' returned list []"),
    "parts that are none": (b'{"score": 1, "parts": [1]}', "'parts' or 'info' that is no object"),
    "10 MB": (b" " * 10_000_000, "more than max_response_bytes=1000000"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_without_a_usable_score_is_a_failure_that_is_not_tried_again(name: str) -> None:
    body, expected = BAD_ANSWERS[name]

    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        return web.Response(body=body)

    with serving(answer) as server:
        error = error_with(RewardLoopSettings(url=server.url))
    assert expected in error
    assert server.times == {"test/0/0/0": 1}


def test_a_redirect_is_not_followed() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/elsewhere")

    with serving(answer) as server:
        assert "answered 307; 200 is needed" in error_with(RewardLoopSettings(url=server.url))


def test_an_answer_that_breaks_off_is_a_failure() -> None:
    async def answer(question: dict[str, Any], time: int) -> web.StreamResponse:
        return BREAK_OFF

    with serving(answer) as server:
        assert "broke off (ClientPayloadError" in error_with(RewardLoopSettings(url=server.url))


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "file:///etc/passwd", "http://"])
def test_an_address_that_is_none_is_said_when_the_plan_is_made(url: str) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.reward_loop\.url: found '.*'; needs the address"):
        requests(RunConfig(), RewardLoopSettings(url=url))


def test_retry_after_may_be_a_number_or_a_date() -> None:
    assert seconds("3") == 3.0
    assert seconds("-3") == 0.0
    assert seconds(formatdate(0, usegmt=True)) == 0.0
    assert seconds("soon") is None
    assert seconds("") is None


def test_pauses_double_with_jitter_unless_the_service_says_how_long() -> None:
    assert pause_s(5, retry_after_s=2.5) == 2.5
    for tried, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (30, 10.0)):
        pauses = [pause_s(tried, None) for _ in range(50)]
        assert all(longest / 2 <= pause <= longest for pause in pauses)
        assert len(set(pauses)) > 1


def test_a_run_takes_its_rewards_from_the_service(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
    }
    with serving(scored) as server:
        result = train(config, f"plugins.reward_loop.url={server.url}", plugins=["null", "reward_loop"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    texts = [question["completion"] for question in server.questions]
    assert len(texts) == 2 * 8
    total = sum(row["reward/mean"] for row in steps) * 8
    assert total == pytest.approx(sum(score_of(text) for text in texts))
    assert steps[0]["reward/length/mean"] == 2.0
