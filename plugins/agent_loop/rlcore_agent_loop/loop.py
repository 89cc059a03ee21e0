"""The agent loop: turns of the policy and results of its tools, until it calls none."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlcore.agents import AgentLoop, RolloutTask
from rlcore.types import Completion, Finish, GenerateRequest, Lane, Metrics, Sampling, Trajectory
from rlcore_agent_loop.calls import ToolCall, find_calls
from rlcore_agent_loop.episode import Episode
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools import Tools
from rlcore_agent_loop.turns import Turns

if TYPE_CHECKING:
    from rlcore.rollout import Generator
    from rlcore.tokens import Tokens


@dataclass
class _Counts:
    samples: int = 0
    turns: int = 0
    calls: int = 0
    errors: int = 0


class ToolLoop(AgentLoop):
    """Generates in rounds: first all samples, then together those whose tools have answered, and so on.

    Rounds make the set of requests, and with it every token, independent of how long tools take.
    """

    def __init__(self, generator: "Generator", tokens: "Tokens", tools: Tools, settings: AgentLoopSettings) -> None:
        self._generator, self._tokens, self._tools, self._settings = generator, tokens, tools, settings
        self._turns = Turns(tokens, settings.result_role)
        self._counts = _Counts()

    async def start(self) -> None:
        """Start the tools; ConfigError when the chat template has no place for their results."""
        self._turns.after(-1, ["a result"])
        await self._tools.start()

    async def close(self) -> None:
        await self._tools.close()

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Every trajectory of every task, the moment its last turn ends; `sampling.max_tokens` bounds the response,
        tool results included."""
        requests, waiting = self._first_round(tasks, sampling)
        for turn in range(1, self._settings.max_turns + 1):
            tools_at_work: list[asyncio.Task[Episode]] = []
            try:
                async with aclosing(self._generator.generate(requests, lane)) as completions:  # type: ignore[type-var]
                    async for completion in completions:
                        episode = waiting[completion.request_id, completion.sample]
                        calls = self._take_turn(episode, completion, last=turn == self._settings.max_turns)
                        if calls:
                            tools_at_work.append(
                                asyncio.create_task(self._call_tools(episode, calls, sampling.max_tokens))
                            )
                        else:
                            yield self._finished(episode, completion.finish)
                episodes = await asyncio.gather(*tools_at_work)
            finally:
                for task in tools_at_work:
                    task.cancel()
                await asyncio.gather(*tools_at_work, return_exceptions=True)
            for episode in episodes:
                if episode.full:
                    yield self._finished(episode, Finish.LENGTH)
            requests, waiting = self._next_round([each for each in episodes if not each.full], sampling)
            if not requests:
                return

    def _first_round(
        self, tasks: Sequence[RolloutTask], sampling: Sampling
    ) -> tuple[list[GenerateRequest], dict[tuple[str, int], Episode]]:
        requests: list[GenerateRequest] = []
        waiting: dict[tuple[str, int], Episode] = {}
        for task in tasks:
            name, ids = f"{task.prompt.id}/{task.epoch}", self._tokens.encode_prompt(task.prompt.messages)
            requests.append(GenerateRequest(name, ids, sampling, task.n, task.seed))
            waiting |= {(name, sample): Episode(task, sample, list(ids)) for sample in range(task.n)}
        return requests, waiting

    def _next_round(
        self, episodes: Sequence[Episode], sampling: Sampling
    ) -> tuple[list[GenerateRequest], dict[tuple[str, int], Episode]]:
        requests: list[GenerateRequest] = []
        waiting: dict[tuple[str, int], Episode] = {}
        for each in episodes:
            name = f"{each.task.prompt.id}/{each.task.epoch}/{each.sample}/{each.turns}"
            rest = replace(sampling, max_tokens=sampling.max_tokens - each.num_response)
            # Each turn draws from a stream of its own, or all of them would begin with the same numbers.
            state = np.random.SeedSequence([each.task.seed, each.sample, each.turns]).generate_state(1, np.uint32)
            requests.append(GenerateRequest(name, tuple(each.ids), rest, 1, int(state[0])))
            waiting[name, 0] = each
        return requests, waiting

    def _take_turn(self, episode: Episode, completion: Completion, last: bool) -> list[ToolCall]:
        """Append the turn; the calls to make, none when it was cut off or is the last."""
        text = self._tokens.decode(completion.token_ids.tolist())
        episode.sampled(completion, text)
        return [] if last or completion.finish is Finish.LENGTH else find_calls(text)

    async def _call_tools(self, episode: Episode, calls: Sequence[ToolCall], max_tokens: int) -> Episode:
        began = time.monotonic()
        results = await self._tools.results(calls)
        ids = self._turns.after(episode.ids[-1], results)
        episode.full = episode.num_response + len(ids) >= max_tokens
        if not episode.full:
            episode.told(ids, self._settings.result_role, results)
        episode.tools_s += time.monotonic() - began
        return episode

    def _finished(self, episode: Episode, finish: Finish) -> Trajectory:
        self._counts.samples += 1
        self._counts.turns += episode.turns
        return episode.trajectory(finish)

    def metrics(self) -> Metrics:
        """Since the last time: agent/turns_mean a sample; agent/num_tool_calls, and agent/num_tool_errors of them."""
        counts, told = self._counts, _Counts(calls=self._tools.num_calls, errors=self._tools.num_errors)
        self._counts = _Counts(calls=told.calls, errors=told.errors)
        return {
            "agent/turns_mean": counts.turns / max(1, counts.samples),
            "agent/num_tool_calls": float(told.calls - counts.calls),
            "agent/num_tool_errors": float(told.errors - counts.errors),
        }
