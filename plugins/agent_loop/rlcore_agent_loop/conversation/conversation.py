"""One sample of the tool loop, in one coroutine: turns, calls and answers until something ends it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcore.aio import Timers
from rlcore.contracts.activity import ENVIRONMENT as ENVIRONMENT_WORK
from rlcore.contracts.activity import current_activity
from rlcore.contracts.agents import RolloutTask
from rlcore.errors import ChildError, ConfigError, RlcoreError, boundary
from rlcore.types import Completion, FinishReason, Message, Sampling, Trajectory, TrajectoryId
from rlcore_agent_loop.conversation.environments import Environments, SampleEnvironment
from rlcore_agent_loop.conversation.episode import (
    ENVIRONMENT,
    FAILED,
    MAX_TOKENS,
    MAX_TURNS,
    SAME_CALLS,
    STOP,
    TIME,
    TURN_TOKENS,
    Episode,
    Segment,
)
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.calls import ToolCall, problem_of, refused, spelled
from rlcore_agent_loop.tools.parsers import Parser
from rlcore_agent_loop.tools.tools import SampleTools, Tools

if TYPE_CHECKING:
    from rlcore.contracts.tokens import Tokens


@dataclass(frozen=True, eq=False)
class ConversationContext:
    """The objects that all conversations share."""

    tokens: "Tokens"
    tools: Tools
    environments: Environments | None
    parser: Parser
    settings: AgentLoopSettings
    timers: Timers = field(default_factory=Timers)
    """Timers that end conversations at their deadline."""
    window: int | None = None
    """Longest context of the engine, if known."""

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and all that follows it; None: unknown."""
        chosen = self.settings.context_tokens
        known = [budget for budget in (chosen, self.window) if budget]
        return min(known) if known else self.tokens.context_length

    def budget(self, num_prompt: int, max_tokens: int, who: str) -> int:
        """Tokens that may follow a prompt; ConfigError if the prompt leaves none."""
        context = self.context
        if context is None:
            return max_tokens
        if num_prompt >= context:
            chosen = context == self.settings.context_tokens
            raise ConfigError(
                f"agent loop: the prompt '{who}' has {num_prompt} tokens, schemas of its tools included, and "
                f"{'plugins.agent_loop.context_tokens' if chosen else 'the model window'} is {context}: nothing could "
                f"be sampled; {'raise it, or lower' if chosen else 'lower'} data.max_prompt_tokens"
            )
        return min(max_tokens, context - num_prompt)

    def calls(self, text: str) -> list[ToolCall]:
        """The calls in a turn; a failing parser counts as one refused call."""
        try:
            with boundary(f"the parser {self.settings.parser}", ChildError):
                calls = list(self.parser(text))
                wrong = next((problem for call in calls if (problem := problem_of(call))), "")
        except ChildError as error:
            return [refused(str(error))]
        return [refused(f"the parser {self.settings.parser} returned {wrong}")] if wrong else calls

    def stable(self, role: str, tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """True if appending a message of this role after a turn leaves the earlier tokens unchanged."""
        try:
            self.tokens.check_continuation([role], tools)
        except ConfigError:
            return False
        return True

    def turn_budget(self, rest: int) -> int:
        """Most tokens of the next turn when `rest` are left."""
        return min(rest, self.settings.turn_tokens or rest)


class Conversation:
    """Runs one sample."""

    def __init__(
        self,
        kit: ConversationContext,
        turns: TurnSampler,
        task: RolloutTask,
        sample: int,
        sampling: Sampling,
        due: float,
        prompt_ids: Sequence[int],
    ) -> None:
        """`due`: its deadline, on the loop's clock."""
        self._kit, self._turns, self._sampling, self._due = kit, turns, sampling, due
        self._settings = kit.settings
        self.episode = Episode(task, sample)
        self._prompt_ids = prompt_ids
        """Empty when the environment opens the conversation."""
        self._row = TrajectoryId(task.prompt.id, task.epoch, sample)
        self._name = f"{task.prompt.id}/{task.epoch}/{sample}"
        self._opening: Sequence[Message] = task.prompt.messages
        self._last_calls: list[tuple[str, str]] = []
        self._num_same = 0
        self._environment: SampleEnvironment | None = None

    async def run(self, first: Completion | None = None) -> list[Trajectory]:
        """The finished sample.

        `first` is the first turn, where no environment opens the conversation; None if it did not arrive in time.
        """
        tools = self._kit.tools.open(self._name, self.episode.task.prompt, self._row)
        try:
            if self._kit.environments is None:
                await self._converse_in_time(tools, first)
            else:
                self._environment = self._kit.environments.open(self._name)
                try:
                    await self._converse_in_time(tools, first)
                finally:
                    await self._environment.close()
            self.episode.info["num_calls"] = tools.num_calls
            self.episode.info["num_call_errors"] = tools.num_errors
        finally:
            await tools.close()
        if not self.episode.segments:
            prompt = self.episode.task.prompt.messages
            self.episode.segments.append(Segment(list(self._kit.tokens.encode_prompt(prompt, tools.schemas))))
        return self.episode.trajectories()

    async def _converse_in_time(self, tools: SampleTools, first: Completion | None) -> None:
        limit = self._kit.timers.until(self._due)
        try:
            with limit:
                self.episode.ended_by = await self._converse(tools, first)
        except TimeoutError:
            if not limit.expired:
                raise
            self.episode.ended_by = TIME

    async def _converse(self, tools: SampleTools, first: Completion | None) -> str:
        """Take turns until one ends the sample. Returns the reason."""
        if (problem := await self._open(tools)) is not None:
            return problem
        if first is None and self._environment is None:
            return TIME
        for turn in range(1, self._settings.max_turns + 1):
            part = self.episode.segments[-1]
            completion = await self._turn(part, turn, first if turn == 1 else None)
            if completion.error:
                return self.episode.not_sampled(completion.error)
            text = self._kit.tokens.decode(completion.token_ids.tolist())
            part.sampled(completion, {"role": "assistant", "content": text})
            if completion.finish is FinishReason.LENGTH:
                return MAX_TOKENS if self._rest(part) <= 0 else TURN_TOKENS
            began = time.monotonic()
            ended, messages, restart = await self._answer(tools, text, last=turn == self._settings.max_turns)
            part.waited(time.monotonic() - began)
            if ended:
                return ended
            if problem := self._begin(messages, tools) if restart else self._tell(part, messages, tools):
                return problem
        return MAX_TURNS

    async def _open(self, tools: SampleTools) -> str | None:
        """Begin the first part. Returns why the sample ends right away, or None."""
        if self._environment is None:
            self.episode.segments.append(Segment(list(self._prompt_ids)))
            return None
        task = self.episode.task
        try:
            with self._environment_at_work("reset"):
                self._opening = await self._environment.reset(task.prompt, task.seed)
        except ChildError as error:
            return self._failed(error)
        self.episode.add_reward(0.0)  # the sum of a sample that is cut off before its first step
        return self._begin(self._opening, tools)

    @contextmanager
    def _environment_at_work(self, method: str) -> Iterator[None]:
        """Count the time inside as waiting for the environment."""
        activity, environments = current_activity(), self._kit.environments
        key = activity.begin(ENVIRONMENT_WORK, environments.name if environments else "", method, self._row)
        try:
            yield
        finally:
            activity.end(key)

    def _failed(self, error: RlcoreError) -> str:
        return self.episode.failed(FAILED, str(error))

    def _begin(self, messages: Sequence[Message], tools: SampleTools) -> str | None:
        """Begin a new part, opened by the environment. Returns why the sample ends instead, or None."""
        try:
            ids = self._kit.tokens.encode_prompt(messages, tools.schemas)
        except ConfigError as error:
            return self._failed(error)
        try:
            self._kit.budget(len(ids), self._sampling.max_tokens, self.episode.task.prompt.id)
        except ConfigError:
            if self.episode.segments:
                return MAX_TOKENS
            return self._failed(
                ChildError(
                    f"environment.reset opened the conversation with {len(ids)} tokens, and the context has "
                    f"{self._kit.context}: nothing could be sampled; needs fewer"
                )
            )
        self.episode.segments.append(Segment(list(ids), messages))
        self._opening = messages
        return None

    def _rest(self, part: Segment) -> int:
        """Tokens that the part has left."""
        who = self.episode.task.prompt.id
        return self._kit.budget(part.num_prompt, self._sampling.max_tokens, who) - part.num_response

    async def _turn(self, part: Segment, turn: int, first: Completion | None) -> Completion:
        if first is not None:
            return first
        budget = self._kit.turn_budget(self._rest(part))
        return await self._turns.next(self.episode.task, self.episode.sample, turn - 1, part.ids, budget)

    def _tell(self, part: Segment, messages: Sequence[Message], tools: SampleTools) -> str | None:
        """Append the messages and the header of the next turn. Returns why the sample ends instead, or None."""
        for role in {str(message["role"]) for message in messages} - {"user", self._settings.result_role}:
            if not self._kit.stable(role, tools.schemas):
                return self._failed(
                    ChildError(
                        f"environment.step returned a message of the role '{role}', which changes how the chat "
                        "template renders earlier messages, or is refused by it; needs the role user, or restart=True"
                    )
                )
        try:
            ids = self._kit.tokens.continuation(messages, part.ids[-1])
        except ConfigError as error:
            return self.episode.not_sampled(str(error)) if self._environment is None else self._failed(error)
        if len(ids) >= self._rest(part):
            return MAX_TOKENS
        part.append_given(ids, messages)
        return None

    async def _answer(self, tools: SampleTools, text: str, last: bool) -> tuple[str, Sequence[Message], bool]:
        """(why the sample ends or '', the messages to the policy, True if they begin a new part)."""
        settings, calls = self._settings, self._kit.calls(text)
        if calls:
            if self._repeats(calls):
                return SAME_CALLS, (), False
            if last:
                return MAX_TURNS, (), False
            results = await tools.results(calls, settings.max_calls, settings.max_result_chars)
            messages = [
                {"role": settings.result_role, "name": call.name or "tool", "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
            return "", messages, False
        self._last_calls = []
        if self._environment is None:
            return STOP, (), False
        try:
            with self._environment_at_work("step"):
                step = await self._environment.step([*self._opening, *self.episode.segments[-1].messages])
        except ChildError as error:
            return self._failed(error), (), False
        self.episode.add_turn_reward(step.reward)
        if step.info:
            self.episode.info["environment"] = dict(step.info)
        if step.done:
            return ENVIRONMENT, (), False
        return (MAX_TURNS if last else ""), step.messages, step.restart

    def _repeats(self, calls: Sequence[ToolCall]) -> bool:
        """True if too many turns in a row have made the same calls."""
        made = [(call.name, spelled(call.arguments) + call.problem) for call in calls]
        self._num_same = self._num_same + 1 if made == self._last_calls else 1
        self._last_calls = made
        return self._num_same > self._settings.max_same_calls
