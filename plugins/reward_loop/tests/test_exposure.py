"""Reward code of users may call judges and services; other code may not."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from rlcore_reward_loop.expose import Exposure
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings, ServiceSettings

from rlcore.aio import Stopwatch
from rlcore.config import RewardFunctionConfig
from rlcore.contracts import connections
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.reward_replica import RawScore, ScoreRequest
from rlcore.errors.redaction import redact
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import chat_answer, serving
from rlcore.types import Lane

OWN = """
import json, os, urllib.request

def score(trajectory):
    body = {"model": "api/grader", "messages": [{"role": "user", "content": trajectory.text()}]}
    headers = {"Authorization": "Bearer " + os.environ["RLCORE_REWARD_TOKEN"], "Content-Type": "application/json"}
    url = os.environ["RLCORE_REWARD_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return float(json.loads(answer.read())["choices"][0]["message"]["content"])
"""


def test_idle_connections_take_a_share_of_the_descriptors_and_the_endpoint_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 10)

    async def talk() -> None:
        exposure = Exposure({}, {})
        await exposure.start()
        port = int(exposure.url.rpartition(":")[2].partition("/")[0])
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(50)]
        headers = {"Authorization": f"Bearer {exposure.token}"}
        async with aiohttp.ClientSession() as session, session.get(f"{exposure.url}/models", headers=headers) as answer:
            assert answer.status == 200
        assert exposure._connections is not None
        assert len(exposure._connections._open) <= 10
        for writer in writers:
            writer.close()
        await exposure.close()

    with leaks():
        asyncio.run(talk())


@pytest.mark.slow
def test_a_reward_function_asks_the_judge_through_the_run(tmp_path: Path, score: Callable[..., Any]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    functions = {"own": RewardFunctionConfig(fn=f"{tmp_path / 'own.py'}:score", children=1)}
    with serving(lambda call: chat_answer("4.5")) as service:
        settings = RewardLoopSettings(
            services={"api": ServiceSettings(urls=(f"{service.url}/v1",), token="secret")}, expose=True
        )
        [only], _ = score(settings, [make_trajectory(3, text="so")], functions)
    assert only.reward.score == 4.5, only.reward.info
    [request] = service.calls
    assert request.json() == {"model": "grader", "messages": [{"role": "user", "content": "so"}]}
    assert request.headers["authorization"] == "Bearer secret"
    assert "RLCORE_REWARD_TOKEN" not in os.environ
    record = json.loads((tmp_path / "reward_calls.jsonl").read_text())
    assert record["reward"] == "exposed"


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/v1/models", "right", 200),
        ("GET", "/v1/models", "", 401),
        ("GET", "/v1/models", "wrong", 401),
        ("GET", "/v1/models", "\udcff", 401),
        ("POST", "/v1/chat/completions", "", 401),
        ("POST", "/v1/chat/completions", "right", 400),
        ("POST", "/v1/embeddings", "right", 404),
        ("POST", "/../../etc/passwd", "right", 404),
        ("DELETE", "/v1/models", "right", 405),
        ("GET", "/eval/v1/models", "right", 200),
        ("GET", "/eval/v1/models", "wrong", 401),
        ("GET", "/eval/models", "right", 404),
    ],
)
def test_the_endpoint_is_on_loopback_asks_for_its_token_and_has_three_paths_a_lane(
    method: str, path: str, token: str, status: int
) -> None:
    """Scorecard case 40."""

    async def run() -> None:
        exposure = Exposure({}, {})
        await exposure.start()
        try:
            assert exposure.url.startswith("http://127.0.0.1:")
            assert exposure.token not in redact(f"the token is {exposure.token}")
            root = exposure.url.removesuffix("/v1")
            headers = {"Authorization": f"Bearer {exposure.token if token == 'right' else token}"}
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, root + path, headers=headers, data=b"[]") as answer,
            ):
                assert answer.status == status
                assert exposure.token not in await answer.text()
        finally:
            await exposure.close()

    asyncio.run(run())


class Replica:
    """A judge that answers '?', a classifier that answers '7', and neither to what is malformed."""

    name = "grader[0]"
    alive = True

    def __init__(self) -> None:
        self.calls: list[ScoreRequest] = []

    async def call(self, method: Any, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        self.calls += requests
        [request] = requests
        if request.options.get("temperature") == -1:
            return [RawScore(request.id, error="temperature must not be negative")]
        return [RawScore(request.id, text="so-so") if request.options else RawScore(request.id, 7.0)]


@contextmanager
def exposed(tmp_path: Path, use: Callable[[Exposure, Replicas, aiohttp.ClientSession], Awaitable[None]]) -> Any:
    """An entry `grader` of `models`, exposed, until `use` has used it; its one replica."""
    audit, replica = CallLog(tmp_path, "all", 1000), Replica()
    group: Any = SimpleNamespace(replicas=[replica])

    async def main() -> None:
        replicas = Replicas("grader", ModelSettings(path="p"), group, audit, Stopwatch())
        exposure = Exposure({}, {"grader": replicas})
        await exposure.start()
        headers = {"Authorization": f"Bearer {exposure.token}"}
        try:
            async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(20):
                await use(exposure, replicas, session)
        finally:
            await exposure.close()
            await replicas.close()
            audit.close()

    asyncio.run(main())
    yield replica


def test_models_that_the_run_serves_are_asked_for_scores_and_for_text(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "?"}]

    async def use(exposure: Exposure, replicas: Replicas, session: aiohttp.ClientSession) -> None:
        async def post(path: str, body: Any) -> tuple[int, Any]:
            async with session.post(exposure.url + path, json=body) as answer:
                return answer.status, await answer.json()

        question = {"model": "grader", "messages": messages}
        assert await post("/score", question) == (200, {"model": "grader", "score": 7.0, "text": ""})
        status, answer = await post("/chat/completions", {**question, "max_tokens": 9})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "so-so")
        status, answer = await post("/chat/completions", {**question, "temperature": -1})
        assert (status, answer["error"]["message"]) == (502, "model 'grader': temperature must not be negative")
        assert replicas.router.num_ejected == 0
        status, answer = await post("/chat/completions", question)
        assert (status, answer["error"]["message"]) == (400, "'grader' gives numbers, not text; ask /v1/score")
        status, answer = await post("/score", {**question, "model": "other"})
        assert (status, answer["error"]["message"]) == (404, "there is no 'other'; choose from: grader")
        assert (await post("/score", {"model": "grader"}))[0] == 400

    with exposed(tmp_path, use) as replica:
        assert [dict(request.options) for request in replica.calls] == [{}, {"max_tokens": 9}, {"temperature": -1}, {}]
        assert [dict(message) for message in replica.calls[0].messages] == messages
    rows = [json.loads(line) for line in (tmp_path / "reward_calls.jsonl").read_text().splitlines()]
    assert {(row["reward"], row["target"]) for row in rows} == {("exposed", "grader")}


def test_an_evaluations_own_calls_go_ahead_of_training(tmp_path: Path) -> None:
    async def use(exposure: Exposure, replicas: Replicas, session: aiohttp.ClientSession) -> None:
        assert os.environ["RLCORE_REWARD_EVAL_URL"] == exposure.eval_url
        body = {"model": "grader", "messages": [{"role": "user", "content": "?"}]}
        for _ in range(replicas.settings.concurrency):
            assert replicas.limiter.enter(Lane.TRAIN)

        async def ask(url: str) -> int:
            async with session.post(f"{url}/score", json=body) as answer:
                return answer.status

        training = asyncio.create_task(ask(exposure.url))
        assert await ask(exposure.eval_url) == 200
        assert not training.done()
        replicas.limiter.leave(Lane.TRAIN)
        assert await training == 200

    with exposed(tmp_path, use):
        rows = [json.loads(line) for line in (tmp_path / "reward_calls.jsonl").read_text().splitlines()]
    assert [row["lane"] for row in rows] == ["eval", "train"]


def test_two_exposures_have_separate_ports() -> None:
    async def both() -> list[str]:
        exposures = [Exposure({}, {}), Exposure({}, {})]
        try:
            for exposure in exposures:
                await exposure.start()
            return [exposure.url for exposure in exposures]
        finally:
            for exposure in reversed(exposures):
                await exposure.close()

    first, second = asyncio.run(both())
    assert first != second
    assert "RLCORE_REWARD_URL" not in os.environ
