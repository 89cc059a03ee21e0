"""For authors of tools, environments and agents: conversations with a policy that says what you tell it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.agents import RolloutTask
from rlcore.child import load_reference
from rlcore.cluster.child import ChildProcesses
from rlcore.errors import ChildError, boundary
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import make_prompt
from rlcore.tokens import ByteTokens, Tokens
from rlcore.types import Completion, Finish, GenerateRequest, Lane, Metrics, Prompt, Sampling, Trajectory
from rlcore.workers import Child
from rlcore_agent_loop.conversation import Kit
from rlcore_agent_loop.loop import ToolLoop
from rlcore_agent_loop.parsers import hermes
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools import Tools

END = ByteTokens.EOS
Script = Callable[[int, int, tuple[int, ...]], Sequence[int]]
"""(sample, turn from 1, tokens so far) -> the ids of the turn."""


def call(name: str, **arguments: Any) -> str:
    """A call as the parser 'hermes' reads it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def says(*turns: str) -> "ScriptedPolicy":
    """A policy that says these turns, in every sample."""
    return ScriptedPolicy(lambda sample, turn, ids: [*turns[turn - 1].encode(), END])


class ScriptedPolicy:
    """A rollout service that says what a script says; every token has log-prob -its position."""

    def __init__(self, script: Script, version_of_turn: int = 0, seconds: float = 0.0) -> None:
        self._script, self._version_of_turn, self._seconds = script, version_of_turn, seconds
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        """Names of requests that were given up before they were answered."""

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """See `rlcore.rollout.Generator`."""
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
            finish=Finish.LENGTH if cut else Finish.STOP,
            version=self._version_of_turn * turn,
            generate_s=0.5,
        )


class HereChild:
    """A child that is none: for tools that do not misbehave."""

    alive = True

    def __init__(self, served: Any) -> None:
        self._served = served

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result; what it raises comes as a child would send it."""
        with boundary("", ChildError):
            return await asyncio.to_thread(getattr(self._served, method), *args)

    async def close(self) -> None:
        """Nothing runs on after a call."""
        self.alive = False


class HereChildren:
    """Runs what children would serve in this process."""

    async def start(self, reference: str, *args: Any, name: str, threads: int = 1, deadline_s: float = 60.0) -> Child:
        """See `rlcore.workers.Children`."""
        return HereChild(load_reference(reference)(*args))

    async def close(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class Talk:
    """What came of conversations."""

    trajectories: list[Trajectory]
    """In the order they came."""
    metrics: Metrics

    @property
    def only(self) -> Trajectory:
        """The one there is."""
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
) -> Talk:
    """Conversations of the policy with the tools and environment of the settings, with `processes` in real children.

    Nothing of them may be left behind, no task, process or descriptor.
    """

    async def roll() -> Talk:
        children = ChildProcesses() if processes else HereChildren()
        loop = ToolLoop(policy, tokens or ByteTokens(), children, settings)
        try:
            await loop.start()
            tasks = [RolloutTask(each, 0, num_samples, 7) for each in prompts or [make_prompt(0)]]
            found = [each async for each in loop.rollout(tasks, Sampling(max_tokens=max_tokens), Lane.TRAIN)]
            return Talk(found, loop.metrics())
        finally:
            await loop.close()
            await loop.close()
            await children.close()

    with leaks():
        return asyncio.run(roll())


def kit_of(settings: AgentLoopSettings) -> Kit:
    """What conversations over bytes share, for tests of a part of them; nothing of it is started."""
    return Kit(ByteTokens(), Tools(HereChildren(), settings), None, hermes, settings)


def contents(trajectory: Trajectory) -> list[tuple[str, str]]:
    """(role, content) of the messages after the prompt."""
    messages = trajectory.completion
    return [] if isinstance(messages, str) else [(str(each["role"]), str(each["content"])) for each in messages]
