"""Services that answer anything, and agents that send anything: samples fail, and the run continues."""

import asyncio
import json
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rlcore_agent_loop.agents.endpoint import Endpoint
from rlcore_agent_loop.testing import HELLO, Ask, ScriptedPolicy, served
from rlcore_reward_loop import build
from rlcore_reward_loop.expose import Exposure
from rlcore_reward_loop.settings import JudgeSettings, RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.cluster.child import ChildProcesses
from rlcore.report.metrics import trajectory_lines
from rlcore.testing.hostile import changed, damaged, encoded, json_values, settings_of_fuzz, texts
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.testing.service import chat_answer
from rlcore.types import Lane, RewardStatus

SCORE = {"score": 0.5, "info": {"why": "because", "components": [1, 2.0, None]}}
CHAT = json.loads(chat_answer('{"score": 7}').encoded().partition(b"\r\n\r\n")[2])
REQUEST: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "max_tokens": 5,
    "stop": ["x"],
    "temperature": 0.5,
    "tools": [],
    "stream": False,
    "n": 1,
}
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 0.x\r\nContent-Length: 2\r\n\r\n{}"
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(("Retry-After", "Content-Encoding", "Location", "Transfer-Encoding", "Set-Cookie", "X-Y")),
        st.one_of(st.sampled_from(("gzip", "chunked", "0", "-1", "1e400", "Mon, 99 Jan 2024 00:00:00 +9999")), texts()),
    ),
    max_size=2,
)


@st.composite
def answers(draw: st.DrawFn, good: Any) -> bytes:
    """A whole answer as it goes over the wire."""
    body = draw(st.one_of(changed(good).map(encoded), json_values().map(encoded), damaged(encoded(good))))
    status = draw(st.sampled_from((200, 200, 200, 204, 307, 400, 404, 429, 500, 503, 999)))
    kind = draw(st.sampled_from(("application/json", "application/json", "text/html", "", "a/b; charset=nonsense")))
    length = draw(st.sampled_from((len(body), len(body), len(body), len(body) + 5, 0, -1, "x")))
    lines = [f"HTTP/1.1 {status} OK", f"Content-Type: {kind}", f"Content-Length: {length}"]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in draw(HEADERS))])
    whole = head.encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body
    return draw(st.one_of(st.just(whole), st.just(whole), damaged(whole)))


async def read_request(reader: asyncio.StreamReader) -> None:
    """Take one request off the wire."""
    head = await reader.readuntil(b"\r\n\r\n")
    [length] = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    await reader.readexactly(int(length))


def scored(answer: bytes, reward: RewardSettings, path: str) -> None:
    """Three samples of which each is answered so: they come back, each once, and can be recorded."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def score(scratch: Path) -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
        service = ServiceSettings(urls=(url,), tries=2, deadline_s=2.0, eject_s=0.01, max_response_bytes=10_000)
        settings = RewardLoopSettings(rewards={"r": reward}, services={"s": service})
        manager = build(reward_context({}, scratch, ChildProcesses(), section=settings))
        try:
            await manager.start()
            samples = [make_trajectory(0, sample) for sample in range(3)]
            found = await score_all(manager, samples, Lane.EVAL)
            assert sorted(sample.trajectory.id.sample for sample in found) == [0, 1, 2]
            assert all(sample.reward.status in (RewardStatus.OK, RewardStatus.FAILED) for sample in found)
            for line in trajectory_lines(((result, None) for result in found), Lane.EVAL).splitlines():
                json.loads(line)
            manager.metrics()
        finally:
            await manager.close()
            server.close()

    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(score(Path(scratch)))


@pytest.mark.slow
@settings_of_fuzz(25)
@given(answers(SCORE))
def test_a_service_that_answers_anything_fails_samples_at_most(answer: bytes) -> None:
    scored(answer, RewardSettings(served_by="s"), "/score")


@pytest.mark.slow
@settings_of_fuzz(25)
@given(answers(CHAT))
def test_a_judge_that_answers_anything_fails_samples_at_most(answer: bytes) -> None:
    scored(answer, RewardSettings(kind="judge", served_by="s", judge=JudgeSettings(model="j")), "/v1")


@pytest.mark.slow
@settings_of_fuzz(15)
@given(answers({"scores": [SCORE, {"score": 1}, {"score": 0}]}))
def test_a_service_of_groups_that_answers_anything_fails_samples_at_most(answer: bytes) -> None:
    scored(answer, RewardSettings(served_by="s", scope="group"), "/score")


@pytest.fixture(autouse=True)
def _a_server_prints_no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield
    assert not [record for record in caplog.get_records("call") if record.exc_info]


async def continues(ask: Ask) -> None:
    """A request in order is answered, whatever was sent before."""
    status, found = await ask(HELLO)
    assert status == 200 or found["error"]["code"] in ("max_turns", "context_length_exceeded"), found


@pytest.mark.slow
@settings_of_fuzz(25)
@given(changed(REQUEST))
def test_an_agent_may_request_anything_and_learns_what_is_wrong(body: Any) -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask(body)
        assert status in (200, 400), (status, found)
        await continues(ask)

    recording = served(ScriptedPolicy(lambda sample, turn, ids: b"ok"), work)
    for trajectory in recording.episode.trajectories():
        assert len(trajectory.token_ids) == len(trajectory.logprobs) == len(trajectory.loss_mask)


SENT = st.one_of(
    damaged(REQUEST),
    st.binary(max_size=200),
    texts().map(lambda text: b"GET /v1/models HTTP/1.1\r\nAuthorization: " + text.encode("utf-8", "surrogatepass")),
)
NOT_UTF8 = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer 0.\xff\xfe"
NO_HTTP = b"POST /v1/x HTTP/1.1\r\nHost: x\r\n\xae\x92U"


async def answered(url: str, sent: bytes) -> bytes:
    """The first line of the answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))
    writer.write(sent + b"\r\n\r\n")
    writer.write_eof()
    try:
        async with asyncio.timeout(10):
            return (await reader.read()).partition(b"\r\n")[0]
    except ConnectionError:
        return b""
    finally:
        writer.close()


@settings_of_fuzz(25)
@example(NOT_UTF8)
@example(NO_HTTP)
@given(SENT)
def test_what_is_no_http_or_has_no_token_is_refused_by_the_endpoint_of_agents(sent: bytes) -> None:
    async def talk() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        recording: Any = SimpleNamespace(close=lambda: None)
        endpoint.admit(recording)
        try:
            first = await answered(endpoint.url, sent)
            assert not any(status in first for status in (b" 200 ", b" 500 ")), first
        finally:
            await endpoint.close()

    asyncio.run(talk())


@pytest.mark.slow
@settings_of_fuzz(25)
@example(NOT_UTF8)
@example(NO_HTTP)
@given(SENT)
def test_what_is_no_http_or_has_no_token_is_refused_by_the_endpoint_of_rewards(sent: bytes) -> None:
    async def talk() -> None:
        exposure = Exposure({}, {})
        await exposure.start()
        try:
            first = await answered(exposure.url, sent)
            assert not any(status in first for status in (b" 200 ", b" 500 ")), first
        finally:
            await exposure.close()

    asyncio.run(talk())
