"""Services and models for the user's own reward code: an OpenAI-style endpoint on loopback that asks for a token.

Exposed services and models keep their slots, rates, retries and audit log. Children find the address and the token in
their environment.
"""

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rlcore import FrozenDict, Lane, ScoreRequest
from rlcore.contracts.connections import Connections, descriptor_budget
from rlcore.errors.redaction import remember_variable
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.client.service import Call, Service
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.rewards import CHAT_PATH

URL_VARIABLE, TOKEN_VARIABLE = "RLCORE_REWARD_URL", "RLCORE_REWARD_TOKEN"
EVAL_URL_VARIABLE = "RLCORE_REWARD_EVAL_URL"
EVAL_PREFIX = "/eval"
"""Paths below it use the evaluation lane."""
MAX_BODY_BYTES = 4_000_000
REWARD = "exposed"
"""Name of the caller in the audit log."""

CLIENT_FAULTS = (HttpProcessingError, web.RequestPayloadError, ConnectionError)
"""Server errors caused by the client: bytes that are not HTTP, or a closed connection."""
server_logger = logging.getLogger(f"{__name__}.server")
server_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], CLIENT_FAULTS)))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Exposure:
    """The server. It has these paths only: GET /v1/models, POST /v1/chat/completions, POST /v1/score.

    The same paths below /eval serve evaluation samples, which do not queue behind training.
    """

    def __init__(self, services: Mapping[str, Service], models: Mapping[str, Replicas]) -> None:
        self._services, self._models = services, models
        self.token = secrets.token_urlsafe(32)
        self.url = self.eval_url = ""
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._connections: Connections | None = None
        self._before: dict[str, str | None] = {}

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1 and export address and token to the environment."""
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        for prefix in ("", EVAL_PREFIX):
            application.router.add_get(f"{prefix}/v1/models", self._list)
            application.router.add_post(f"{prefix}/v1{CHAT_PATH}", self._chat)
            application.router.add_post(f"{prefix}/v1/score", self._score)
        self._runner = web.AppRunner(
            application, access_log=None, logger=server_logger, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        if self._runner.server is None:
            raise RuntimeError("the runner was set up without a server")
        self._connections = Connections(descriptor_budget(), self._runner.server)
        self._server = await asyncio.get_running_loop().create_server(self._connections.accept, "127.0.0.1", 0)
        root = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.url, self.eval_url = f"{root}/v1", f"{root}{EVAL_PREFIX}/v1"
        variables = {URL_VARIABLE: self.url, EVAL_URL_VARIABLE: self.eval_url, TOKEN_VARIABLE: self.token}
        for name, value in variables.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        remember_variable(TOKEN_VARIABLE)

    async def close(self) -> None:
        """Stop listening and restore the environment. Safe to call more than once."""
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        runner, self._runner = self._runner, None
        if self._server is not None:
            self._server.close()
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        header = request.headers.get("Authorization", "")
        if not hmac.compare_digest(header.encode(errors="surrogatepass"), f"Bearer {self.token}".encode()):
            return _error(401, "the token is missing or wrong")
        try:
            with self._connections.in_use(request.transport) if self._connections is not None else nullcontext():
                return await handler(request)
        except NoAnswer as cause:
            return _error(502, str(cause))
        except (ValueError, KeyError, TypeError, RecursionError) as cause:
            return _error(400, f"not understood: {cause}")

    async def _list(self, request: web.Request) -> web.StreamResponse:
        names = [*self._services, *self._models]
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        """`model` is '<service>/<model of its API>' or '<entry of models>'."""
        body = await _object(request)
        name, _, model = str(body.get("model", "")).partition("/")
        if body.get("stream"):
            return _error(400, "streams are not offered; leave stream out")
        if name in self._services:
            call = Call(REWARD, "", {**body, "model": model}, CHAT_PATH, int(body.get("max_tokens") or 0))
            return web.json_response(await self._services[name].ask(call, _lane(request)))
        if name not in self._models:
            return self._unknown(name)
        options = FrozenDict({key: value for key, value in body.items() if key not in ("model", "messages")})
        raw = await self._models[name].ask(REWARD, _request(body, options), _lane(request))
        if raw.score is not None:
            return _error(400, f"'{name}' gives numbers, not text; ask /v1/score")
        message = {"role": "assistant", "content": raw.text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "model": name, "choices": [choice]})

    async def _score(self, request: web.Request) -> web.StreamResponse:
        """{"model": entry of models, "messages": the conversation} -> {"score": number}."""
        body = await _object(request)
        name = str(body.get("model", ""))
        if name not in self._models:
            return self._unknown(name)
        raw = await self._models[name].ask(REWARD, _request(body, FrozenDict()), _lane(request))
        return web.json_response({"model": name, "score": raw.score, "text": raw.text})

    def _unknown(self, name: str) -> web.StreamResponse:
        return _error(404, f"there is no '{name}'; choose from: {', '.join([*self._services, *self._models])}")


async def _object(request: web.Request) -> dict[str, Any]:
    body = await request.json()
    if not isinstance(body, dict):
        raise ValueError("needs an object")
    return body


def _lane(request: web.Request) -> Lane:
    return Lane.EVAL if request.path.startswith(f"{EVAL_PREFIX}/") else Lane.TRAIN


def _request(body: Mapping[str, Any], options: FrozenDict[str, Any]) -> ScoreRequest:
    return ScoreRequest("", tuple(FrozenDict[str, Any](message) for message in body["messages"]), options)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
