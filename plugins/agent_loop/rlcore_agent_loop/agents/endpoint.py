"""An OpenAI-compatible endpoint on loopback: each sample has its own token, and only two paths exist."""

import asyncio
import hmac
import itertools
import json
import logging
import secrets
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlcore.contracts.connections import Connections, descriptor_budget
from rlcore.contracts.foreign_json import TooManyValues, read_json
from rlcore.errors import RlcoreError
from rlcore_agent_loop.agents.bodies import MAX_BODY_BYTES, Bodies, TooBusy
from rlcore_agent_loop.agents.messages import BadRequest, check_texts
from rlcore_agent_loop.agents.recording import PolicyAnswer, Recording

MODEL = "policy"
"""The only model; requests may name any."""
CLOSE_S = 2.0
IDLE_S = 75.0
"""Seconds that a connection may wait for its next request."""
LINGER_S = 1.0
"""Seconds for the rest of a refused body to arrive, so that its sender reads the reason."""


KINDS = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
"""The protocol's error type per HTTP status."""


CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
"""Server errors caused by the client: bytes that are not HTTP, or a closed connection."""
server_logger = logging.getLogger(f"{__name__}.server")
server_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], CLIENT_FAULTS)))


class Unknown(RlcoreError):
    """A request without the token of a running sample."""


class Endpoint:
    """Serves /v1/chat/completions and /v1/models to agents that hold a sample's token."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._samples: dict[str, tuple[str, Recording]] = {}
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._connections: Connections | None = None
        self._bodies = Bodies()
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=server_logger,
            handle_signals=False,
            handler_cancellation=True,  # a client that left reads no answer
            shutdown_timeout=CLOSE_S,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
        )
        await self._runner.setup()
        if self._runner.server is None:
            raise RuntimeError("the runner was set up without a server")
        self._connections = Connections(descriptor_budget(), self._runner.server)
        self._server = await asyncio.get_running_loop().create_server(self._connections.accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}/v1"

    async def close(self) -> None:
        """Stop listening. Safe to call more than once."""
        runner, self._runner = self._runner, None
        if self._server is not None:
            self._server.close()
        for _, recording in self._samples.values():
            recording.close()
        if runner is not None:
            await runner.cleanup()

    def admit(self, recording: Recording) -> str:
        """A token that lets the sample's agent talk to the policy."""
        number, secret = str(next(self._numbers)), secrets.token_urlsafe(32)
        self._samples[number] = (secret, recording)
        return f"{number}.{secret}"

    def revoke(self, token: str) -> None:
        """Invalidate the token of a sample that has ended."""
        number = token.partition(".")[0]
        _, recording = self._samples.pop(number)
        recording.close()
        if self._connections is not None:
            asyncio.get_running_loop().call_later(CLOSE_S, self._connections.abort_of, number)

    def _sample(self, request: web.Request) -> tuple[str, Recording]:
        """The sample whose token the request carries, compared in constant time; Unknown without a valid token."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        number, _, secret = bearer.partition(".")
        known, recording = self._samples.get(number, ("", None))
        secret_bytes = secret.encode("utf-8", "surrogateescape")  # the bytes that arrived
        if recording is None or not hmac.compare_digest(known.encode(), secret_bytes):
            raise Unknown("needs the token of a running sample")
        return number, recording

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            number, _ = self._sample(request)
            with self._in_use(request, number), self._bodies.request(number):
                response: web.StreamResponse = await handler(request)
        except Unknown as error:
            refused = _error(401, str(error), "invalid_api_key")
            refused.force_close()
            return refused
        except TooBusy as error:
            return _error(429, str(error), "rate_limit_exceeded")
        except BadRequest as error:
            return _error(400, str(error), error.code)
        return response

    def _in_use(self, request: web.Request, number: str) -> AbstractContextManager[None]:
        connections = self._connections
        return connections.in_use(request.transport, number) if connections is not None else nullcontext()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlcore"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        number, _ = self._sample(request)
        raw = await self._bodies.read(number, request.content.iter_any())
        try:
            body = read_json(raw)
        except TooManyValues as cause:
            raise BadRequest(f"the body has {cause}") from cause
        except ValueError as cause:
            raise BadRequest("the body is not JSON") from cause
        if not isinstance(body, dict):
            raise BadRequest("the body is not an object")
        check_texts(body)
        _, recording = self._sample(request)  # which may have ended while the body arrived
        answer = await recording.complete(body)
        name = f"chatcmpl-{recording.num_requests}"
        if not body.get("stream"):
            return web.json_response(_whole(name, answer))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in (json.dumps(_chunk(name, answer)), "[DONE]"):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response


def _whole(name: str, answer: PolicyAnswer) -> dict[str, Any]:
    message = {**answer.message, "content": answer.message["content"] or None, "refusal": None}
    return {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}],
        "usage": _usage(answer),
    }


def _chunk(name: str, answer: PolicyAnswer) -> dict[str, Any]:
    """The whole answer as a single chunk of a stream."""
    delta = dict(answer.message)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    return {
        "id": name,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": answer.finish_reason}],
        "usage": _usage(answer),
    }


def _usage(answer: PolicyAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt,
        "completion_tokens": answer.num_sampled,
        "total_tokens": answer.num_prompt + answer.num_sampled,
    }


def _error(status: int, message: str, code: str) -> web.Response:
    kind = KINDS[status]
    return web.json_response({"error": {"message": message, "type": kind, "code": code, "param": None}}, status=status)
