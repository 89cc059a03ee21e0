"""An HTTP service on loopback with scripted answers, for tests of rewards and tools that call one.

It uses plain asyncio, because tests need faults that HTTP servers never have: half an answer, the same answer twice, or
none.
"""

import asyncio
import inspect
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

REASONS = {200: "OK", 307: "Temporary Redirect", 429: "Too Many Requests", 503: "Service Unavailable"}


@dataclass(frozen=True)
class ServiceCall:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Values by lower-case name."""
    body: bytes
    times: int
    """Number of requests with this body so far, including this one."""

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass(frozen=True)
class ServiceAnswer:
    """The service's reaction to one request."""

    body: Any = b""
    """Bytes, or a value to send as JSON."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    """Pause before the answer in seconds; infinity: it never comes."""
    content_type: str = "application/json"
    cut_at: int | None = None
    """Number of body bytes after which the connection closes; -1: it closes before any byte of the answer."""
    copies: int = 1
    """Number of times that the whole answer is sent."""

    def encoded(self) -> bytes:
        """The bytes of one copy on the wire."""
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        head = f"HTTP/1.1 {self.status} {REASONS.get(self.status, 'Status')}\r\nContent-Type: {self.content_type}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: self.cut_at]


NEVER = ServiceAnswer(after_s=float("inf"))
Script = Callable[[ServiceCall], ServiceAnswer | Awaitable[ServiceAnswer]]


class ScriptedService:
    """Answers requests as its script decides, and records them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        """URL of the root, without a slash at its end."""
        self.calls: list[ServiceCall] = []
        self.num_open = 0
        """Number of requests without an answer."""
        self.most_open = 0
        self.num_answered = 0
        self._times: Counter[bytes] = Counter()
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self, started: Callable[[], None], stop: asyncio.Event, port: int = 0) -> None:
        """Listen on 127.0.0.1 until `stop` is set."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", port, limit=1 << 24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started()
        await stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            # Only `serve` cancels this, at the end.
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False when the connection has ended."""
        call = await self._read(reader)
        self.calls.append(call)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            answer = await self._answer(call, reader)
        finally:
            self.num_open -= 1
        if answer is None or answer.cut_at == -1:
            return False
        self.num_answered += 1
        writer.write(answer.encoded() * answer.copies)
        await writer.drain()
        return answer.cut_at is None

    async def _answer(self, call: ServiceCall, reader: asyncio.StreamReader) -> ServiceAnswer | None:
        """The script's answer, after its pause; None when the client has disconnected meanwhile."""
        answer = self.script(call)
        answer = await answer if inspect.isawaitable(answer) else answer
        if answer.after_s <= 0:
            return answer
        # A client that disconnects ends its request, as with a real server.
        gone = asyncio.ensure_future(reader.read(1))
        try:
            limit_s = None if answer.after_s == float("inf") else answer.after_s
            done, _ = await asyncio.wait([gone], timeout=limit_s)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        return None if done else answer

    async def _read(self, reader: asyncio.StreamReader) -> ServiceCall:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self._times[body] += 1
        method, path, _ = first.split(" ")
        return ServiceCall(method, path, headers, body, self._times[body])


@contextmanager
def serving(script: Script, port: int = 0) -> Iterator[ScriptedService]:
    """Runs the service on a separate thread until the block ends."""
    service, ready = ScriptedService(script), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(service.serve(ready.set, stop, port)), name="scripted service"
    )
    thread.start()
    if not ready.wait(10):
        raise TimeoutError("the scripted service did not start")
    try:
        yield service
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def chat_answer(text: str, total_tokens: int = 0) -> ServiceAnswer:
    """The answer of an OpenAI-style chat API with this text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return ServiceAnswer({"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": total_tokens}})
