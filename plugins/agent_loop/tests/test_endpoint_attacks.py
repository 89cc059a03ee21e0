"""Requests of agents that mean to break the endpoint: each is answered or refused, and the next one is answered."""

import asyncio
import contextlib
import json
import logging
import math
from typing import Any
from urllib.parse import urlsplit

import pytest
from rlcore_agent_loop.agents.endpoint import Endpoint
from rlcore_agent_loop.agents.recording import PolicyAnswer
from rlcore_agent_loop.testing import HELLO, Ask, says, served

from rlcore.testing.leaks import leaks

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**9,
    10**400,
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    "\x00\x1b[31m[bold]\u202e",
    "x" * 100_000,
    [],
    [None],
    [[[]]],
    ["x"] * 100_000,
    {},
    {"": None},
    {"type": "json_object"},
    {"__class__": "x", "role": "user"},
)
FIELDS = (
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stop", "max_tokens", "temperature"),
    *("max_completion_tokens", "top_p", "logit_bias", "logprobs", "top_logprobs", "response_format", "stream", "user"),
    *("stream_options", "metadata", "store", "functions", "function_call", "presence_penalty", "frequency_penalty"),
    *("service_tier", "modalities", "audio", "prediction", "reasoning_effort", "seed", "__proto__"),
)
IN_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "__class__")
IN_CALL = ("id", "type", "function")
IN_FUNCTION = ("name", "arguments", "description", "parameters", "strict")


def bodies(field: str) -> list[Any]:
    """Bodies with every odd value in this field, at each level that may have it."""
    found: list[Any] = []
    for value in ODD:
        if field in FIELDS:
            found.append({**HELLO, field: value})
        if field in IN_MESSAGE:
            found.append({"messages": [*HELLO["messages"], {"role": "tool", "content": "x", field: value}]})
        if field in IN_CALL:
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, field: value}
            found.append({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
            found.append({**HELLO, "tools": [{"type": "function", "function": {"name": "f"}, field: value}]})
        if field in IN_FUNCTION:
            function = {"name": "f", field: value}
            call = {"id": "1", "type": "function", "function": function}
            found.append({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
            found.append({**HELLO, "tools": [{"type": "function", "function": function}]})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("field", sorted({*FIELDS, *IN_MESSAGE, *IN_CALL, *IN_FUNCTION}))
def test_any_value_of_a_field_is_served_or_refused(field: str, caplog: pytest.LogCaptureFixture) -> None:
    sent = bodies(field)

    async def work(ask: Ask) -> None:
        for body in sent:
            status, answer = await ask(body)
            assert status in (200, 400), body
            assert status == 200 or len(answer["error"]["message"]) < 2000
        assert (await ask(HELLO))[0] == 200

    recording = served(says(*["-"] * (len(sent) + 2)), work, max_turns=len(sent) + 2)
    assert recording.failure is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("body", [*ODD, [HELLO], "messages"], ids=lambda body: repr(body)[:20])
def test_a_body_that_is_not_an_object_is_refused(body: Any) -> None:
    async def work(ask: Ask) -> None:
        assert (await ask(body))[0] in (400, 405)

    if body is None:  # which sends no body at all
        return
    assert served(says("-"), work).num_requests == 0


class Echo:
    """A sample that answers at once."""

    num_requests = 0

    async def complete(self, body: Any) -> PolicyAnswer:
        """An empty answer."""
        return PolicyAnswer({"role": "assistant", "content": ""}, "stop", 1, 1)

    def close(self) -> None:
        """Nothing is in flight."""


BODY = json.dumps(HELLO).encode()
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
RAW: dict[str, tuple[bytes, bytes]] = {
    "well formed": (POST + b"TOKEN" + LENGTH + b"\r\n" + BODY, b"200"),
    "HTTP/1.0": (POST.replace(b"1.1", b"1.0") + b"TOKEN" + LENGTH + b"\r\n" + BODY, b"200"),
    "chunks with extensions": (
        POST + b"TOKENTransfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY),
        b"200",
    ),
    "expects 100": (POST + b"TOKENExpect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY, b"100"),
    "expects magic": (POST + b"TOKENExpect: magic\r\n" + LENGTH + b"\r\n" + BODY, b"417"),
    "a hundred in one line": ((POST + b"TOKEN" + LENGTH + b"\r\n" + BODY) * 100, b"200"),
    "10 000 headers": (POST + b"TOKEN" + b"X: y\r\n" * 10_000 + LENGTH + b"\r\n" + BODY, b"400"),
    "a header of 1 MB": (POST + b"TOKENX: " + b"y" * 1_000_000 + b"\r\n" + LENGTH + b"\r\n" + BODY, b"400"),
    "a path of 1 MB": (b"POST /" + b"y" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\nTOKEN\r\n", b"400"),
    "two lengths": (POST + b"TOKEN" + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY, b"400"),
    "length and chunks": (POST + b"TOKEN" + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
    "a negative length": (POST + b"TOKENContent-Length: -5\r\n\r\n", b"400"),
    "a chunk of -1": (POST + b"TOKENTransfer-Encoding: chunked\r\n\r\n-1\r\nx", b"400"),
    "two tokens": (POST + b"TOKENAuthorization: Bearer x\r\n" + LENGTH + b"\r\n" + BODY, b""),
    "another scheme": (POST + b"Authorization: Basic eDp5\r\n" + LENGTH + b"\r\n" + BODY, b"401"),
    "a token of 7000 bytes": (
        POST + b"Authorization: Bearer " + b"0." * 3500 + b"\r\n" + LENGTH + b"\r\n" + BODY,
        b"401",
    ),
    "no line ends": (b"x" * 100_000, b"400"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", b"400"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
    "a method that does not exist": (b"BREW /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTOKEN\r\n", b"40"),
    "CONNECT": (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: x\r\nTOKEN\r\n", b"40"),
    "TRACE": (b"TRACE /v1/models HTTP/1.1\r\nHost: x\r\nTOKEN\r\n", b"40"),
    "a path upwards": (b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: x\r\nTOKEN\r\n", b"40"),
    "an absolute address": (b"GET http://example.com/v1/models HTTP/1.1\r\nHost: x\r\nTOKEN\r\n", b""),
    "a websocket": (
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nTOKENUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        b"200",
    ),
    "gzip that is none": (POST + b"TOKENContent-Encoding: gzip\r\n" + LENGTH + b"\r\n" + BODY, b"400"),
    "a mark of byte order": (POST + b"TOKENContent-Length: 5\r\n\r\n\xef\xbb\xbf{}", b"200"),
    "keys twice": (POST + b'TOKENContent-Length: 45\r\n\r\n{"messages": 1, "messages": 2, "messages": 3}', b"200"),
}


@pytest.mark.parametrize("name", RAW)
def test_any_bytes_are_answered_and_others_are_served(name: str, caplog: pytest.LogCaptureFixture) -> None:
    sent, expected = RAW[name]

    async def exchange(endpoint: Endpoint, data: bytes) -> bytes:
        where = urlsplit(endpoint.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(data)
            with contextlib.suppress(ConnectionError):
                return await asyncio.wait_for(reader.readline(), 5)
            return b"HTTP/1.1 400 reset"
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def run() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        try:
            token = b"Authorization: Bearer " + endpoint.admit(Echo()).encode() + b"\r\n"  # type: ignore[arg-type]
            answer = await exchange(endpoint, sent.replace(b"TOKEN", token))
            assert expected in answer[:13]
            assert b"500" not in answer[:13]
            assert b"200" in await exchange(endpoint, RAW["well formed"][0].replace(b"TOKEN", token))
        finally:
            await endpoint.close()

    with leaks():
        asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
