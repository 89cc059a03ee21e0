"""For authors of tools, environments and agents: conversations with a scripted policy."""

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.contracts.children import Children
from rlcore.contracts.tokens import Tokens
from rlcore.contracts.workers import ReplicaEvent, ReplicaHandle
from rlcore.testing import ByteTokens, open_children
from rlcore.testing.here import HereChildren
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import make_prompt
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Metrics, Prompt, Sampling, Trajectory
from rlcore_agent_loop.agents.endpoint import Endpoint
from rlcore_agent_loop.agents.recording import Recording
from rlcore_agent_loop.conversation.conversation import ConversationContext
from rlcore_agent_loop.conversation.episode import AGENT, Episode
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler
from rlcore_agent_loop.loop import ToolLoop
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.parsers import hermes
from rlcore_agent_loop.tools.tools import Tools
from rlcore_agent_loop.workers.distributed_loop import DistributedToolLoop
from rlcore_agent_loop.workers.worker import LoopWorker

END = ByteTokens.EOS
Script = Callable[[int, int, tuple[int, ...]], Sequence[int]]
"""(sample, turn from 1, tokens so far) -> the ids of the turn."""
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
"""The smallest request."""
Ask = Callable[..., Awaitable[tuple[int, dict[str, Any]]]]
"""Sends a body to the endpoint and returns (status, answer)."""


def call(name: str, /, **arguments: Any) -> str:
    """A call in the format of the parser 'hermes'."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def says(*turns: str) -> "ScriptedPolicy":
    """A policy that says these turns, in every sample."""
    return ScriptedPolicy(lambda sample, turn, ids: [*turns[turn - 1].encode(), END])


class ScriptedPolicy:
    """A rollout service that follows a script. The log-prob of every token is minus its position."""

    def __init__(self, script: Script, version_of_turn: int = 0, seconds: float = 0.0) -> None:
        self._script, self._version_of_turn, self._seconds = script, version_of_turn, seconds
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        """Names of requests that were cancelled before they were answered."""

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """See `rlcore.contracts.rollout.Generator`."""
        self.requests += requests
        for request in requests:
            fields = request.id.split("/")  # source/index/epoch, and of later turns /sample/turns before
            for draw in range(request.n):
                answered = False
                try:
                    await asyncio.sleep(self._seconds)
                    answered = True
                finally:
                    if not answered:
                        self.cancelled.append(request.id)
                sample, turn = (int(fields[-2]), int(fields[-1]) + 1) if len(fields) > 3 else (draw, 1)
                yield self._completion(request, draw, sample, turn)

    def _completion(self, request: GenerateRequest, draw: int, sample: int, turn: int) -> Completion:
        ids = list(self._script(sample, turn, request.token_ids))
        cut = len(ids) > request.sampling.max_tokens
        ids, start = ids[: request.sampling.max_tokens], len(request.token_ids)
        return Completion(
            request_id=request.id,
            sample=draw,
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array([-float(start + index) for index in range(len(ids))], dtype=np.float32),
            finish=FinishReason.LENGTH if cut else FinishReason.STOP,
            version=self._version_of_turn * turn,
            generate_s=0.5,
        )


class HereWorker:
    """A stand-in for a worker of the role `agent`: its methods run on this loop."""

    alive = True

    def __init__(self, index: int, tokens: Tokens, children: Any) -> None:
        self.name = f"agent[{index}]"
        context: Any = SimpleNamespace(children=children)
        self._worker = LoopWorker(context)
        self._worker.tokens = tokens

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `rlcore.contracts.workers.ReplicaHandle`. Arguments and result are pickled, as between processes."""
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        return pickle.loads(pickle.dumps(await getattr(self._worker, method.__name__)(*args, **kwargs)))

    async def stream(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """See `rlcore.contracts.workers.ReplicaHandle`."""
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        async with aclosing(getattr(self._worker, method.__name__)(*args, **kwargs)) as items:
            async for result in items:
                yield pickle.loads(pickle.dumps(result))

    def excuse(self) -> None:
        """See `rlcore.contracts.workers.ReplicaHandle`: it never dies."""


class HerePool:
    """Workers that never die. Implements `rlcore.contracts.workers.WorkerGroup`."""

    def __init__(self, num: int, tokens: Tokens, children: Any) -> None:
        self.replicas = [HereWorker(index, tokens, children) for index in range(num)]

    async def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The method's result of every worker."""
        return [await worker.call(method, *args, **kwargs) for worker in self.replicas]

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        """Does nothing: there are no events."""

    def before_launch(self, allow: Callable[[ReplicaHandle[Any]], Awaitable[None]]) -> None:
        """Does nothing: no worker is ever launched again."""

    def before_return(self, prepare: Callable[[ReplicaHandle[Any]], Awaitable[None]]) -> None:
        """Does nothing: no worker ever comes back."""


@dataclass(frozen=True)
class Talk:
    """The results of conversations."""

    trajectories: list[Trajectory]
    """Trajectories in order of arrival."""
    metrics: Metrics

    @property
    def only(self) -> Trajectory:
        """The only trajectory."""
        [trajectory] = self.trajectories
        return trajectory


def talk(
    policy: ScriptedPolicy,
    settings: AgentLoopSettings,
    *,
    num_samples: int = 1,
    max_tokens: int = 10_000,
    prompts: Sequence[Prompt] = (),
    tokens: Tokens | None = None,
    processes: bool = False,
    window: int | None = None,
) -> Talk:
    """Run conversations with the tools and environment of the settings; `processes`: in real child processes.

    `window` is the context length that the engine reports. With `settings.workers`, conversations run in that many
    workers of the role `agent`, which live on the test's loop. The call fails if a task, process or descriptor is left
    behind.
    """

    async def roll() -> Talk:
        async with open_children(processes) as children:
            loop = loop_of(policy, settings, tokens or ByteTokens(), children, window)
            try:
                await loop.start()
                await loop.check(prompts or [make_prompt(0)])
                tasks = [RolloutTask(prompt, 0, num_samples, 7) for prompt in prompts or [make_prompt(0)]]
                found = [
                    trajectory async for trajectory in loop.rollout(tasks, Sampling(max_tokens=max_tokens), Lane.TRAIN)
                ]
                return Talk(found, loop.metrics())
            finally:
                await loop.close()
                await loop.close()

    with leaks():
        return asyncio.run(roll())


def loop_of(
    policy: ScriptedPolicy, settings: AgentLoopSettings, tokens: Tokens, children: Children, window: int | None = None
) -> AgentLoop:
    """The loop for these settings, not yet started."""
    if settings.workers:
        pool: Any = HerePool(settings.workers, tokens, children)
        return DistributedToolLoop(policy, pool, settings, window=window)
    return ToolLoop(policy, tokens, children, settings, window)


def kit_of(settings: AgentLoopSettings, tokens: Tokens | None = None) -> ConversationContext:
    """The shared objects of conversations, by default byte-level ones, not started, for unit tests."""
    return ConversationContext(tokens or ByteTokens(), Tools(HereChildren(), settings), None, hermes, settings)


def served(
    policy: ScriptedPolicy, work: Callable[[Ask], Awaitable[None]], tokens: Tokens | None = None, **settings: Any
) -> Recording:
    """The recording of one sample after `work` has used its endpoint."""
    import aiohttp

    async def run() -> Recording:
        kit = kit_of(AgentLoopSettings(**settings), tokens)
        sampling = Sampling(max_tokens=200)
        episode = Episode(RolloutTask(make_prompt(0), 0, 1, 7), 0, ended_by=AGENT)
        recording = Recording(kit, TurnSampler(policy, sampling, Lane.TRAIN), sampling, episode)
        endpoint = Endpoint()
        await endpoint.start()
        token = endpoint.admit(recording)
        try:
            async with aiohttp.ClientSession() as session:

                async def ask(
                    body: Any, path: str = "/chat/completions", token: str = token, method: str = "POST"
                ) -> tuple[int, dict[str, Any]]:
                    headers = {"Authorization": f"Bearer {token}"} if token else {}
                    data = None if body is None else json.dumps(body)
                    async with session.request(method, endpoint.url + path, data=data, headers=headers) as response:
                        text = await response.text()
                        return response.status, json.loads(text) if text.startswith("{") else {"text": text}

                await work(ask)
        finally:
            endpoint.revoke(token)
            await endpoint.close()
            await endpoint.close()
        return recording

    with leaks():
        return asyncio.run(run())


def contents(trajectory: Trajectory) -> list[tuple[str, str]]:
    """(role, content) of the messages after the prompt."""
    messages = trajectory.completion
    return (
        [] if isinstance(messages, str) else [(str(message["role"]), str(message["content"])) for message in messages]
    )
