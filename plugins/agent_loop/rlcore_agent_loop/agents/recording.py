"""Records the conversation between agent and policy through the endpoint as the tokens of one sample."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.contracts.activity import AGENT as AGENT_WORK
from rlcore.contracts.activity import Activity, current_activity
from rlcore.errors import ConfigError
from rlcore.types import Completion, FinishReason, Sampling, TrajectoryId
from rlcore_agent_loop.agents.messages import BadRequest, Plain, answer, for_template, normalised, num_chars
from rlcore_agent_loop.conversation.conversation import ConversationContext
from rlcore_agent_loop.conversation.episode import (
    AGENT,
    MAX_TOKENS,
    MAX_TURNS,
    ROLLOUT_FAILED,
    TURN_TOKENS,
    Episode,
    Segment,
)
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler
from rlcore_agent_loop.tools.schemas import typed

OURS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
"""Settings that the run decides: with others, the samples would not come from the policy's distribution."""

MAX_CHARS_PER_TOKEN = 32
"""A longer text fits no context; tokenising one of megabytes would hold up the run for seconds."""

MAX_STOPS, MAX_STOP_CHARS = 16, 1000
"""Most stop strings of a request, and most characters of one; the engine looks for each of them after every token."""

UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
}
"""Settings that would change what is sampled or returned, with their neutral values."""


@dataclass(eq=False)
class Thread:
    """A segment with the messages that its tokens encode."""

    segment: Segment
    history: list[Plain]
    tools: Any
    busy: bool = False
    stable: dict[str, bool] = field(default_factory=dict)
    """By role: True if the chat template leaves earlier tokens unchanged when it appends a message of the role."""


@dataclass(frozen=True)
class PolicyAnswer:
    """The answer to a request."""

    message: Plain
    finish_reason: str
    num_prompt: int
    num_sampled: int


@dataclass(eq=False)
class Recording:
    """One sample. A request that extends recorded messages continues their tokens; any other begins a new part."""

    kit: ConversationContext
    turns: TurnSampler
    sampling: Sampling
    episode: Episode
    threads: list[Thread] = field(default_factory=list)
    num_requests: int = 0
    overridden: set[str] = field(default_factory=set)
    failure: BaseException | None = None
    """The error of generation: the run's, not the agent's, to handle."""
    closed: bool = False
    name: str = ""
    """The agent's, in the run's status and trace."""
    _activity: Activity = field(default_factory=current_activity)
    _agents_turn: int | None = None
    """The key of the work of the agent, while no request of it is open."""
    _at_work: "set[asyncio.Task[Completion]]" = field(default_factory=set)

    def begin_agent(self) -> None:
        """Count the time from now on as waiting for the agent, except while it has an open request."""
        if self._agents_turn is None and not self._at_work and not self.closed:
            row = TrajectoryId(self.episode.task.prompt.id, self.episode.task.epoch, self.episode.sample)
            self._agents_turn = self._activity.begin(AGENT_WORK, self.name, sample=row)

    def _end_agent(self) -> None:
        if self._agents_turn is not None:
            self._activity.end(self._agents_turn)
            self._agents_turn = None

    async def complete(self, body: Mapping[str, Any]) -> PolicyAnswer:
        """Sample the next turn; BadRequest, which the agent receives, when it cannot."""
        messages, tools = normalised(body.get("messages")), body.get("tools") or []
        self._check(body, tools)
        if self.kit.context and num_chars([messages, tools]) > MAX_CHARS_PER_TOKEN * self.kit.context:
            raise self._too_long()
        limit, stop = _max_tokens(body), _stop(body)
        try:
            thread, new, ids = self._extended(messages, tools) or self._begun(messages, tools)
        except ConfigError as error:
            raise BadRequest(f"messages: {error}") from error
        self.num_requests += 1
        number = self.num_requests
        part, prompt_ids = thread.segment, [*thread.segment.ids, *ids]
        rest = self._rest(part) - len(ids)
        allowed = self.kit.turn_budget(rest)
        budget = min(allowed, limit or rest)
        thread.busy, answered = True, False
        try:
            completion = await self._sample(number, prompt_ids, budget, stop)
            text = self.kit.tokens.decode(completion.token_ids.tolist())
            calls = self.kit.calls(text) if tools and body.get("tool_choice") != "none" else []
            message = answer(text, [typed(call, tools) for call in calls], number)
            answered = True
        finally:
            thread.busy = False
            if not (answered or part.turns):  # a part without a turn cannot be continued
                self.threads.remove(thread)
                self.episode.segments.remove(part)
        # Only now: an unanswered request is retried, and must not be recorded twice.
        part.append_given(ids, new)
        part.sampled(completion, message)
        thread.history = [*messages, message]
        cut = completion.finish is FinishReason.LENGTH
        self._answered(part, by_run=cut and budget == allowed)
        reason = "length" if cut else ("tool_calls" if "tool_calls" in message else "stop")
        return PolicyAnswer(message, reason, len(prompt_ids), len(completion.token_ids))

    def _answered(self, part: Segment, by_run: bool) -> None:
        """Set the end reason in case this was the agent's last request; `by_run`: a budget of the run cut it off.

        Like the trajectories' `finish`, it is that of the last part. A refusal for length before it does not count.
        """
        part.cut_by = "" if not by_run else MAX_TOKENS if self._rest(part) <= 0 else TURN_TOKENS
        if self.episode.ended_by in (AGENT, MAX_TOKENS, TURN_TOKENS):
            self.episode.ended_by = [part for part in self.episode.segments if part.turns][-1].cut_by or AGENT

    def close(self) -> None:
        """Answer no more requests; abort those in flight."""
        self.closed = True
        self._end_agent()
        for task in tuple(self._at_work):
            task.cancel()

    async def ended(self) -> None:
        """Wait until generation has stopped."""
        if self._at_work:
            await asyncio.wait(tuple(self._at_work))

    def _check(self, body: Mapping[str, Any], tools: Any) -> None:
        if self.episode.ended_by == ROLLOUT_FAILED:
            raise BadRequest("this sample has ended: generation failed", ROLLOUT_FAILED)
        if self.num_requests >= self.kit.settings.max_turns:
            self.episode.ended_by = MAX_TURNS
            raise BadRequest(f"this sample has had its {self.kit.settings.max_turns} turns", MAX_TURNS)
        if body.get("n") is not None and (type(body["n"]) is not int or body["n"] != 1):
            raise BadRequest(f"n={body['n']!r:.80}: one choice is served")
        if not isinstance(body.get("stream") or False, bool):
            raise BadRequest(f"stream={body['stream']!r:.80}: needs true or false")
        if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise BadRequest("tools: needs a list of objects")
        if tools and not self.kit.tokens.tells_tools():
            raise BadRequest("tools: the chat template does not describe tools to the policy")
        for name, ignorable in UNSERVED.items():
            if body.get(name) not in (None, *ignorable):
                raise BadRequest(f"{name}={body[name]!r:.80}: it is not served; leave it out")
        self.overridden |= {name for name in OURS if body.get(name) is not None}

    async def _sample(self, number: int, ids: Sequence[int], budget: int, stop: Sequence[str]) -> Completion:
        episode = self.episode
        task = asyncio.create_task(self.turns.next(episode.task, episode.sample, number, tuple(ids), budget, stop))
        self._at_work.add(task)
        self._end_agent()
        task.add_done_callback(self._at_work.discard)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._at_work.discard(task)
            self.begin_agent()
        if task.cancelled():
            raise BadRequest("this sample has ended", "sample_ended")
        if (error := task.exception()) is not None:
            self.failure = self.failure or error
            raise BadRequest("generation failed", "generation_failed")
        if task.result().error:
            raise BadRequest("generation failed", episode.not_sampled(task.result().error))
        return task.result()

    def _extended(self, messages: list[Plain], tools: Any) -> tuple[Thread, list[Plain], Sequence[int]] | None:
        """(the thread that these messages extend, the new messages, their ids); None if there is none."""
        for thread in reversed(self.threads):
            known = len(thread.history)
            new = messages[known:]
            if thread.busy or thread.tools != tools or not new or messages[:known] != thread.history:
                continue
            if any(turn["role"] in ("assistant", "system") or not self._stable(thread, turn["role"]) for turn in new):
                continue
            ids = self.kit.tokens.continuation(for_template(new), thread.segment.ids[-1])
            if len(ids) >= self._rest(thread.segment):
                raise self._too_long()
            return thread, new, ids
        return None

    def _begun(self, messages: list[Plain], tools: Any) -> tuple[Thread, list[Plain], Sequence[int]]:
        """A new thread, whose part already contains the messages' ids."""
        part = Segment(list(self.kit.tokens.encode_prompt(for_template(messages), tools)), tuple(messages))
        if self._rest(part) <= 0:
            raise self._too_long()
        thread = Thread(part, list(messages), tools)
        self.threads.append(thread)
        self.episode.segments.append(part)
        return thread, [], ()

    def _stable(self, thread: Thread, role: str) -> bool:
        if role not in thread.stable:
            thread.stable[role] = self.kit.stable(role, thread.tools)
        return thread.stable[role]

    def _rest(self, part: Segment) -> int:
        try:
            who = self.episode.task.prompt.id
            return self.kit.budget(part.num_prompt, self.sampling.max_tokens, who) - part.num_response
        except ConfigError:
            return 0

    def _too_long(self) -> BadRequest:
        self.episode.ended_by = MAX_TOKENS
        return BadRequest("this conversation has used its tokens", "context_length_exceeded")


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise BadRequest("max_tokens: needs a number of at least 1")
    return limits[0] if limits else None


def _stop(body: Mapping[str, Any]) -> Sequence[str]:
    stop = body.get("stop") or []
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(string, str) and string for string in found):
        raise BadRequest("stop: needs a text or a list of texts")
    if len(found) > MAX_STOPS or any(len(string) > MAX_STOP_CHARS for string in found):
        raise BadRequest(f"stop: needs at most {MAX_STOPS} texts of at most {MAX_STOP_CHARS} characters")
    return found
