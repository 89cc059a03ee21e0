"""The agent loop: every sample is a conversation, and every conversation a coroutine of its own."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.agents import AgentLoop, RolloutTask
from rlcore.child import load_reference
from rlcore.errors import ConfigError, WorkerError
from rlcore.types import Completion, Lane, Metrics, Sampling, Trajectory
from rlcore_agent_loop.admission import Admission
from rlcore_agent_loop.agent import Agents
from rlcore_agent_loop.conversation import Conversation, Kit
from rlcore_agent_loop.environments import Environments
from rlcore_agent_loop.parsers import PARSERS
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools import Tools
from rlcore_agent_loop.turns import Turns, group_name

if TYPE_CHECKING:
    from rlcore.rollout import Generator
    from rlcore.tokens import Tokens
    from rlcore.workers import Children


class ToolLoop(AgentLoop):
    """Turns of the policy, and answers of its tools and of its environment, until something ends the sample.

    The first turns of a step's groups are asked for together, so that their prompts are computed once; from then on
    every conversation goes its own way and is delivered the moment it ends.
    """

    def __init__(
        self, generator: "Generator", tokens: "Tokens", children: "Children", settings: AgentLoopSettings
    ) -> None:
        self._generator, self._tokens, self._settings = generator, tokens, settings
        self._tools = Tools(children, settings)
        self._agents = Agents(children, settings.agent) if settings.agent.fn else None
        self._admission = Admission(settings.max_conversations)
        self._environments = Environments(settings.environment, self._tools.seats) if settings.environment.fn else None
        parser = PARSERS.get(settings.parser)
        self._kit = Kit(tokens, self._tools, self._environments, parser or load_reference(settings.parser), settings)
        self._counts = _Counts()

    async def start(self) -> None:
        """Start tools and environment. ConfigError when the chat template cannot serve their messages."""
        if self._agents is not None:
            await self._agents.start()
            return
        settings = self._settings
        with_tools = bool(settings.tools or settings.mcp)
        try:
            self._tokens.check_continuation(
                [*([settings.result_role] if with_tools else []), *(["user"] if self._environments else [])]
            )
        except ConfigError as error:
            raise ConfigError(f"{error}; or another plugins.agent_loop.result_role") from error
        describe = with_tools and settings.describe_tools == "template"
        if describe and not self._tokens.tells_tools():
            raise ConfigError(
                "plugins.agent_loop.describe_tools=template: the chat template does not tell the policy about tools; "
                "choose never and describe them in data.system_prompt, or name another template in model.chat_template"
            )
        await self._tools.start(describe)
        if self._environments is not None:
            await self._environments.start()

    async def close(self) -> None:
        await self._tools.close()
        if self._agents is not None:
            await self._agents.close()

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Every trajectory of every task, the moment its sample ends; `sampling.max_tokens` bounds what follows the
        prompt of each part, results included."""
        if len({group_name(task) for task in tasks}) != len(tasks):
            raise WorkerError("agent loop: a pair of prompt and epoch came twice in one call; each must come once")
        flight = _Flight(self._admission)
        turns = Turns(self._generator, sampling, lane)
        flight.spawn(self._admit(flight, turns, list(tasks), sampling))
        left = sum(task.n for task in tasks)
        try:
            while left:
                arrived = await flight.arrived.get()
                if isinstance(arrived, BaseException):
                    raise arrived
                left -= 1
                self._counts.sample(arrived)
                for trajectory in arrived:
                    yield trajectory
        finally:
            await flight.close()

    async def _admit(self, flight: "_Flight", turns: Turns, tasks: list[RolloutTask], sampling: Sampling) -> None:
        """Begin the groups, in order, as many at a time as there is room for."""
        while tasks:
            await self._admission.take(tasks[0].n)
            group = [tasks.pop(0)]
            while tasks and self._admission.take_now(tasks[0].n):
                group.append(tasks.pop(0))
            flight.owed += sum(task.n for task in group)
            if self._agents is None:
                self._begin(flight, turns, group, sampling)
                continue
            for task in group:
                for sample in range(task.n):
                    flight.spawn_sample(self._agents.run(self._kit, turns, task, sample, sampling))

    def _begin(self, flight: "_Flight", turns: Turns, tasks: Sequence[RolloutTask], sampling: Sampling) -> None:
        waiting: dict[tuple[str, int], asyncio.Future[Completion]] = {}
        requests = []
        for task in tasks:
            ids: Sequence[int] = ()
            if self._environments is None:
                schemas = self._tools.open("", task.prompt).schemas
                ids = self._tokens.encode_prompt(task.prompt.messages, schemas)
                budget = self._kit.budget(len(ids), sampling.max_tokens, task.prompt.id)
                requests.append(turns.first(task, ids, self._kit.turn_budget(budget)))
            for sample in range(task.n):
                first = None
                if self._environments is None:
                    first = waiting[group_name(task), sample] = asyncio.get_running_loop().create_future()
                conversation = Conversation(self._kit, turns, task, sample, sampling, ids)
                flight.spawn_sample(conversation.run(first))
        if requests:
            flight.spawn(turns.sample_groups(requests, waiting))

    def metrics(self) -> Metrics:
        """Since the last time: means over the samples, agent/turns_mean, agent/parts_mean and agent/ended/<why>_frac;
        agent/num_new_parts, how often a sample began a part anew; agent/num_tool_calls, and agent/num_tool_errors."""
        counts, self._counts = self._counts, _Counts()
        calls = self._tools.counts
        found = {
            "agent/turns_mean": counts.turns / max(1, counts.samples),
            "agent/parts_mean": counts.parts / max(1, counts.samples),
            "agent/num_new_parts": float(counts.parts - counts.samples),
            "agent/num_tool_calls": float(calls.calls),
            "agent/num_tool_errors": float(calls.errors),
        }
        calls.calls = calls.errors = 0
        return found | {f"agent/ended/{why}_frac": n / counts.samples for why, n in sorted(counts.ended.items())}


class _Counts:
    """What `metrics` tells next."""

    def __init__(self) -> None:
        self.samples = self.parts = self.turns = 0
        self.ended: Counter[str] = Counter()

    def sample(self, parts: Sequence[Trajectory]) -> None:
        """A sample has ended."""
        self.samples += 1
        self.parts += len(parts)
        self.turns += sum(part.turns for part in parts)
        self.ended[str(parts[-1].info["ended_by"])] += 1


class _Flight:
    """The tasks of one rollout; none outlives it."""

    def __init__(self, admission: Admission) -> None:
        self.arrived: asyncio.Queue[Sequence[Trajectory] | BaseException] = asyncio.Queue()
        self.owed = 0
        """Places taken and not yet given back."""
        self._admission = admission
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; what it raises ends the rollout."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def spawn_sample(self, work: Coroutine[Any, Any, Sequence[Trajectory]]) -> None:
        """Run a sample and deliver it."""
        self.spawn(self._deliver(work))

    async def _deliver(self, work: Coroutine[Any, Any, Sequence[Trajectory]]) -> None:
        self.arrived.put_nowait(await work)
        self.owed -= 1
        await self._admission.give_back(1)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.arrived.put_nowait(error)

    async def close(self) -> None:
        """Cancel what still runs, wait for it, and give its places back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        owed, self.owed = self.owed, 0
        if owed:
            await self._admission.give_back(owed)
