"""The endpoint under load: what agents send and hold is bounded, and other agents are served meanwhile."""

import asyncio
import contextlib
import json
import resource
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from rlcore_agent_loop.agents import bodies
from rlcore_agent_loop.agents.bodies import MAX_BODY_BYTES, Bodies, TooBusy
from rlcore_agent_loop.agents.endpoint import Endpoint
from rlcore_agent_loop.agents.messages import BadRequest
from rlcore_agent_loop.agents.recording import PolicyAnswer
from rlcore_agent_loop.testing import HELLO, Ask, says, served

from rlcore.contracts import connections
from rlcore.contracts.connections import descriptor_budget
from rlcore.data.tokenizer import ByteTokens
from rlcore.testing.leaks import leaks


class Echo:
    """A sample that answers at once, or when `go` is set."""

    def __init__(self) -> None:
        self.num_requests, self.text = 0, ""
        self.go = asyncio.Event()
        self.go.set()

    async def complete(self, body: Any) -> PolicyAnswer:
        """An empty answer."""
        self.num_requests += 1
        await self.go.wait()
        return PolicyAnswer({"role": "assistant", "content": self.text}, "stop", 1, 1)

    def close(self) -> None:
        """Nothing is in flight."""


class Server:
    """An endpoint with one sample."""

    def __init__(self) -> None:
        self.endpoint, self.sample = Endpoint(), Echo()
        self.token = self.endpoint.admit(self.sample)  # type: ignore[arg-type]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to it."""
        where = urlsplit(self.endpoint.url)
        return await asyncio.open_connection(where.hostname, where.port)

    def head(self, length: str = "", token: str | None = None) -> bytes:
        """The head of a request; `length` is the header that says how long the body is."""
        token = self.token if token is None else token
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", length or "X: y"]
        return "\r\n".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape")

    async def ask(self, body: bytes = json.dumps(HELLO).encode(), token: str | None = None, headers: str = "") -> bytes:
        """The answer to one request: its status line and what follows."""
        reader, writer = await self.connect()
        try:
            length = f"Content-Length: {len(body)}\r\nConnection: close" + headers
            writer.write(self.head(length, token) + body)
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def serving(work: Callable[[Server], Awaitable[None]]) -> None:
    """Run `work` with a server; nothing of it may be left."""

    async def run() -> None:
        server = Server()
        await server.endpoint.start()
        try:
            await work(server)
        finally:
            await server.endpoint.close()

    with leaks():
        asyncio.run(run())


@contextmanager
def allowed(descriptors: int) -> Iterator[None]:
    """This process may open so many descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
def test_idle_connections_take_a_share_of_the_descriptors_and_others_are_served(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 50)

    async def work(server: Server) -> None:
        async with AsyncExitStack() as stack:
            for number in range(300):
                _, writer = await server.connect()
                stack.callback(writer.close)
                if number % 100 == 0:
                    assert (await server.ask()).startswith(b"HTTP/1.1 200")
            assert len(server.endpoint._connections._open) <= 50  # type: ignore[union-attr]
            assert (await server.ask()).startswith(b"HTTP/1.1 200")

    serving(work)
    assert not caplog.records


def test_the_budget_of_descriptors_is_a_share_of_what_the_process_may_open() -> None:
    with allowed(400):
        assert descriptor_budget() == 100
    with allowed(2):
        assert descriptor_budget() == 1


def test_a_wrong_token_closes_its_connection() -> None:
    async def work(server: Server) -> None:
        reader, writer = await server.connect()
        writer.write(server.head("Content-Length: 0", token="0.wrong"))
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 401")
        writer.close()

    serving(work)


def test_a_connection_with_a_running_request_is_not_closed_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)

    async def work(server: Server) -> None:
        server.sample.go.clear()
        task = asyncio.create_task(server.ask())
        while not server.sample.num_requests:
            await asyncio.sleep(0.01)
        async with AsyncExitStack() as stack:
            for _ in range(8):  # so that the connection is the oldest with a token
                reader, writer = await server.connect()
                stack.callback(writer.close)
                writer.write(server.head("Content-Length: 0"))
                assert b"400" in await asyncio.wait_for(reader.readline(), 10)
        server.sample.go.set()
        assert (await task).startswith(b"HTTP/1.1 200")

    serving(work)


@pytest.mark.slow
def test_connections_on_which_an_ended_sample_reads_no_answers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr("rlcore_agent_loop.agents.endpoint.CLOSE_S", 0.2)

    async def work(server: Server) -> None:
        server.sample.text = "x" * 8_000_000
        async with AsyncExitStack() as stack:
            for _ in range(4):
                _, writer = await server.connect()
                stack.callback(writer.close)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                body = json.dumps({**HELLO, "stream": True}).encode()
                writer.write(server.head(f"Content-Length: {len(body)}") + body)
            while server.sample.num_requests < 4:
                await asyncio.sleep(0.01)
            server.endpoint.revoke(server.token)
            server.sample.text = ""
            server.token = server.endpoint.admit(server.sample)  # type: ignore[arg-type]
            async with asyncio.timeout(20):
                while server.endpoint._connections._open:  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
            assert (await server.ask()).startswith(b"HTTP/1.1 200")

    serving(work)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat", b"POST / HTTP/1.1\r\nX: y\r\n"], ids=["none", "half", "most"])
def test_a_connection_that_shows_no_token_in_time_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)

    async def work(server: Server) -> None:
        reader, writer = await server.connect()
        writer.write(sent)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        assert time.monotonic() - began < 5
        writer.close()

    serving(work)


def test_a_head_that_trickles_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)

    async def work(server: Server) -> None:
        _, writer = await server.connect()
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 8:
                writer.write(b"X")
                await writer.drain()
                await asyncio.sleep(0.02)
        assert time.monotonic() - began < 5
        writer.close()

    serving(work)


@pytest.mark.slow
def test_a_body_without_a_token_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore_agent_loop.agents.endpoint.LINGER_S", 0.2)

    async def work(server: Server) -> None:
        reader, writer = await server.connect()
        writer.write(server.head("Content-Length: 1000000000", token="0.wrong"))
        sent = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
                    sent += 1 << 16
        assert sent < 900_000_000
        assert server.sample.num_requests == 0
        writer.close()
        del reader

    serving(work)


@pytest.mark.fault
def test_a_body_that_comes_too_slowly_or_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 1.0)

    async def work(server: Server) -> None:
        reader, writer = await server.connect()
        writer.write(server.head("Content-Length: 100") + b"{")
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        assert b"400 Bad Request" in answer
        assert b"the body has not come within 1 s" in answer
        writer.close()
        packed = zlib.compressobj(wbits=31)
        bomb = packed.compress(bytes(4 * MAX_BODY_BYTES)) + packed.flush()
        answer = await server.ask(bomb, headers="\r\nContent-Encoding: gzip")
        assert answer.startswith(b"HTTP/1.1 400")

        answer = await server.ask(json.dumps({**HELLO, "user": "x" * MAX_BODY_BYTES}).encode())
        assert f"the body has more than {MAX_BODY_BYTES} bytes".encode() in answer

    serving(work)


async def _chunks(num: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(num):
        await asyncio.sleep(0)
        yield bytes(size)


def test_bodies_of_one_sample_and_of_all_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("MAX_BODY_BYTES", 100), ("MAX_SAMPLE_BYTES", 150), ("MAX_BYTES", 250)):
        monkeypatch.setattr(bodies, name, size)

    async def read(*samples: str) -> list[Any]:
        bodies = Bodies()
        found = await asyncio.gather(
            *(bodies.read(sample, _chunks(10, 10)) for sample in samples), return_exceptions=True
        )
        assert not bodies._num_bytes
        assert await bodies.read("a", _chunks(10, 10)) == bytes(100)
        with pytest.raises(BadRequest, match="more than 100 bytes"):
            await bodies.read("a", _chunks(11, 10))
        return found

    assert asyncio.run(read("a", "b")) == [bytes(100)] * 2
    assert sum(isinstance(found, TooBusy) for found in asyncio.run(read("a", "a"))) == 1
    assert sum(isinstance(found, TooBusy) for found in asyncio.run(read("a", "b", "c"))) == 1


def test_requests_of_one_sample_at_once_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_AT_ONCE", 3)

    async def work(server: Server) -> None:
        server.sample.go.clear()
        tasks = [asyncio.create_task(server.ask()) for _ in range(5)]
        while sum(task.done() for task in tasks) < 2:
            await asyncio.sleep(0.01)
        server.sample.go.set()
        found = sorted(await asyncio.gather(*tasks))
        assert [answer.split()[1] for answer in found] == [b"200"] * 3 + [b"429"] * 2
        assert (await server.ask()).startswith(b"HTTP/1.1 200")

    serving(work)


@pytest.mark.parametrize("token", ["\udcff\udcfe", "0.\udcff", "0.é", "\udcff.x", "0.\udced\udca0\udc80"])
def test_a_token_that_is_not_unicode_is_unknown(token: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work(server: Server) -> None:
        assert (await server.ask(token=token)).startswith(b"HTTP/1.1 401")

    serving(work)
    assert not caplog.records


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({**HELLO, "max_tokens": True}, "max_tokens: needs a number"),
        ({**HELLO, "max_completion_tokens": False}, "max_tokens: needs a number"),
        ({**HELLO, "max_tokens": 0}, "max_tokens: needs a number"),
        ({**HELLO, "max_tokens": 5, "max_completion_tokens": True}, "max_tokens: needs a number"),
        ({**HELLO, "n": True}, "n=True: one choice"),
        ({**HELLO, "n": 1.0}, "n=1.0: one choice"),
        ({**HELLO, "stream": "no"}, "stream='no': needs true or false"),
        ({**HELLO, "user": "a\ud800"}, "half of a surrogate pair"),
        ({**HELLO, "a\udfff": 1}, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": "\udc00\ud800"}]}, "half of a surrogate pair"),
        ({"messages": [{"role": "a\ud800", "content": ""}]}, "half of a surrogate pair"),
        ({**HELLO, "stop": ["\ud800"]}, "half of a surrogate pair"),
        ({**HELLO, "stop": ["x"] * 17}, "stop: needs at most 16 texts of at most 1000 characters"),
        ({**HELLO, "stop": "x" * 1001}, "stop: needs at most 16 texts of at most 1000 characters"),
    ],
)
def test_what_is_no_number_or_no_text_is_refused(body: Any, message: str) -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask(body)
        assert status == 400
        assert message in found["error"]["message"]

    assert served(says("-"), work).num_requests == 0


@pytest.mark.parametrize("opened", ["[", '{"a":', '{"messages":[', '{"tools":[', '{"messages":[{"content":['])
@pytest.mark.parametrize("depth", [70, 400, 900, 200_000])
def test_a_body_that_is_nested_deep_is_refused(opened: str, depth: int, caplog: pytest.LogCaptureFixture) -> None:
    closed = "".join({"[": "]", "{": "}"}[letter] for letter in reversed(opened) if letter in "[{")

    async def work(server: Server) -> None:
        body = (opened * depth + "1" + closed * depth).encode()
        assert (await server.ask(body)).startswith(b"HTTP/1.1 400")

    serving(work)
    assert not caplog.records


@pytest.mark.slow
def test_a_body_of_very_many_values_is_refused_before_it_is_parsed() -> None:
    async def work(server: Server) -> None:
        answer = await server.ask(b'{"messages": [' + b"[]," * 500_000 + b"[]]}")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"the body has more than 1000000 lists, objects and entries" in answer

    serving(work)


class Counting(ByteTokens):
    """Counts the conversations that are tokenised."""

    num = 0

    def _encode_text(self, text: str) -> tuple[int, ...]:
        self.num += 1
        return super()._encode_text(text)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 3201}]},
        {"messages": [{"role": "user"}] * 3201},
        {**HELLO, "tools": [{"function": {"name": "add", "parameters": {"x" * 3201: {}}}}]},
        {**HELLO, "tools": [{"function": {"enum": [0] * 3201}}]},
    ],
)
def test_a_conversation_that_fits_no_context_is_refused_before_it_is_tokenised(body: Any) -> None:
    async def work(ask: Ask) -> None:
        status, found = await ask(body)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")

    tokens = Counting()
    served(says("-"), work, tokens, context_tokens=100)
    assert tokens.num == 0
