"""What a user's own reward code may ask of the judges and services, and who may not (case 40)."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rlcore_reward_loop.expose import Exposure
from rlcore_reward_loop.settings import RewardLoopSettings, ServiceSettings

from rlcore.config import RewardFunctionConfig
from rlcore.config.redaction import redact
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import chat_answer, serving

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


def test_a_reward_function_asks_the_judge_through_the_run(tmp_path: Path, score: Callable[..., Any]) -> None:
    (tmp_path / "own.py").write_text(OWN)
    functions = {"own": RewardFunctionConfig(fn=f"{tmp_path / 'own.py'}:score", children=1)}
    with serving(lambda asked: chat_answer("4.5")) as service:
        settings = RewardLoopSettings(
            services={"api": ServiceSettings(urls=(f"{service.url}/v1",), token="secret")}, expose=True
        )
        [only], _ = score(settings, [make_trajectory(3, text="so")], functions)
    assert only.reward.score == 4.5, only.reward.info
    [asked] = service.asked
    assert asked.json() == {"model": "grader", "messages": [{"role": "user", "content": "so"}]}
    assert asked.headers["authorization"] == "Bearer secret"
    assert "RLCORE_REWARD_TOKEN" not in os.environ
    record = json.loads((tmp_path / "reward_calls.jsonl").read_text())
    assert record["reward"] == "exposed"


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/v1/models", "right", 200),
        ("GET", "/v1/models", "", 401),
        ("GET", "/v1/models", "wrong", 401),
        ("POST", "/v1/chat/completions", "", 401),
        ("POST", "/v1/chat/completions", "right", 400),
        ("POST", "/v1/embeddings", "right", 404),
        ("POST", "/../../etc/passwd", "right", 404),
        ("DELETE", "/v1/models", "right", 405),
    ],
)
def test_the_endpoint_is_on_loopback_asks_for_its_token_and_has_three_paths(
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


def test_two_exposures_have_ports_of_their_own() -> None:
    async def both() -> list[str]:
        exposures = [Exposure({}, {}), Exposure({}, {})]
        try:
            for each in exposures:
                await each.start()
            return [each.url for each in exposures]
        finally:
            for each in reversed(exposures):
                await each.close()

    first, second = asyncio.run(both())
    assert first != second
    assert "RLCORE_REWARD_URL" not in os.environ
