"""Samples of an external agent: a program that talks to the policy through the endpoint."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from rlcore.contracts.agents import RolloutTask
from rlcore.contracts.children import Child, ChildPool, Children
from rlcore.errors import ChildError
from rlcore.types import Sampling, Trajectory
from rlcore_agent_loop.agents.endpoint import MODEL, Endpoint
from rlcore_agent_loop.agents.recording import Recording
from rlcore_agent_loop.checks import absolute
from rlcore_agent_loop.conversation.conversation import ConversationContext
from rlcore_agent_loop.conversation.episode import AGENT, AGENT_FAILED, TIME, Episode, Segment
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler
from rlcore_agent_loop.settings import AgentSettings
from rlcore_agent_loop.tools.in_child import CallLost, in_child

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Seconds for an agent to notice that its sample has run out of time, before its process is killed."""
START_S = 120.0
"""Seconds allowed for a child to import the agent."""
MAX_BEGINS = 2
"""Attempts at a sample whose process is killed because of another sample's agent."""


class Agents:
    """The endpoint, and the child processes in which agents run."""

    def __init__(
        self, children: Children, settings: AgentSettings, env: Sequence[str] = (), grace_s: float = GRACE_S
    ) -> None:
        """`env`: environment variables for agents, in addition to those that any Python process needs."""
        self._children, self._settings, self._env, self._grace_s = children, settings, env, grace_s
        self._endpoint = Endpoint()
        self._pool = ChildPool(self._start_child, settings.children, settings.threads)
        self._lingering: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Open the endpoint and start the children; ConfigError or PluginError when the agent cannot be run."""
        await self._endpoint.start()
        await self._pool.start()

    async def close(self) -> None:
        """End what was started. Safe to call more than once."""
        lingering = list(self._lingering)
        for task in lingering:
            task.cancel()
        await asyncio.gather(*lingering, return_exceptions=True)
        await self._pool.close()
        await self._endpoint.close()

    async def run(
        self, kit: ConversationContext, turns: TurnSampler, task: RolloutTask, sample: int, sampling: Sampling
    ) -> list[Trajectory]:
        """The sample that agent and policy produced; errors of the agent become data.

        Retried once if its process was killed because of another sample's agent.
        """
        for left in reversed(range(MAX_BEGINS)):
            episode = Episode(task, sample, ended_by=AGENT)
            recording = Recording(kit, turns, sampling, episode, name=self._settings.fn.rpartition(":")[2])
            token = self._endpoint.admit(recording)
            try:
                lost = await self._talk(recording, token, kit.settings.time_s)
            finally:
                self._endpoint.revoke(token)
            await recording.ended()
            if lost is None or not left or recording.failure is not None:
                break
            logger.warning("sample %s/%d/%d is begun again: %s", task.prompt.id, task.epoch, sample, lost)
        if recording.failure is not None:
            raise recording.failure
        episode.info["num_requests"] = recording.num_requests
        if recording.overridden:
            episode.info["overridden"] = tuple(sorted(recording.overridden))
        episode.segments = [part for part in episode.segments if part.turns] or [
            Segment(list(kit.tokens.encode_prompt(task.prompt.messages)))
        ]
        return episode.trajectories()

    async def _talk(self, recording: Recording, token: str, time_s: float) -> CallLost | None:
        """Run the agent until it ends or its time is up. Returns the loss of its process if another agent caused it."""
        episode, began = recording.episode, asyncio.Event()
        work = self._call(self._arguments(episode.task, token), time_s, began)
        running = self._linger(work)
        recording.begin_agent()
        waiting = asyncio.create_task(began.wait())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([running], timeout=time_s)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        if not running.done():
            episode.ended_by = TIME
            return None
        try:
            returned = running.result()
        except ChildError as error:
            if episode.ended_by == AGENT:
                episode.failed(AGENT_FAILED, str(error))
            else:  # a limit ended it, and the agent failed on that
                episode.info["error"] = str(error)
            return error if isinstance(error, CallLost) else None
        if isinstance(returned, float):
            episode.add_reward(returned)
        elif returned is not None:
            episode.info["result"] = returned
        return None

    def _linger(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """A call that may outlive its sample: cancelling it would kill the child and the other agents in it."""
        task = asyncio.create_task(work)
        self._lingering.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._lingering.discard(task)
        if not task.cancelled():
            task.exception()

    async def _call(self, arguments: Mapping[str, Any], time_s: float, began: asyncio.Event) -> Any:
        deadline_s, threads = time_s + self._grace_s, self._settings.threads
        return await in_child(
            self._pool, "agent", deadline_s, "run", dict(arguments), began=lambda slot: began.set(), shared_by=threads
        )

    def _arguments(self, task: RolloutTask, token: str) -> dict[str, Any]:
        messages = [dict(message) for message in task.prompt.messages]
        return {
            "base_url": self._endpoint.url,
            "api_key": token,
            "model": MODEL,
            "messages": messages,
            "question": str(messages[-1].get("content", "")) if messages else "",
            "columns": dict(task.prompt.columns),
        }

    async def _start_child(self, index: int) -> Child:
        settings = self._settings
        return await self._children.start(
            "rlcore_agent_loop.agents.program:Program",
            absolute(settings.fn),
            dict(settings.kwargs),
            settings.threads == 1,
            name=f"agents {index}",
            threads=settings.threads,
            deadline_s=START_S,
            env=self._env,
        )
