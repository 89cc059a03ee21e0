"""One named component of the reward: its request, and the score it makes of the answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np

from rlcore import FrozenDict, GroupFunction, Lane, RewardStatus, Scope, ScoreRequest, Trajectory
from rlcore.contracts.scorer import Outcome, Scorer, extra_value_problem, failed, number
from rlcore.errors.redaction import clipped
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.client.service import Call, Service
from rlcore_reward_loop.judges.judge import (
    answer_text,
    answer_tokens,
    chat,
    engine_options,
    messages,
    response_text,
    score_of,
)
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.running import RunningStatistics
from rlcore_reward_loop.settings import JudgeSettings, RewardSettings

CHAT_PATH = "/chat/completions"


class ScoreSource(ABC):
    """A source of scores."""

    @abstractmethod
    async def ask(self, reward: str, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        """An outcome per trajectory; NoAnswer when no outcome is available for any of them."""


class ServiceSource(ScoreSource):
    """A scoring service. It gets one object per sample, or `samples` for a group or batch."""

    def __init__(self, service: Service, scope: str) -> None:
        self._service, self._scope = service, scope

    async def ask(self, reward: str, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        questions = [question(trajectory) for trajectory in trajectories]
        body = questions[0] if self._scope == "sample" else {"samples": questions}
        ids = [sample["id"] for sample in questions]
        read = partial(self._outcomes, ids)
        call = Call(reward, ids[0], body, with_ids=True, readable=partial(can_read, read))
        return read(await self._service.ask(call, lane))

    def _outcomes(self, ids: Sequence[str], answer: Any) -> list[Outcome]:
        if self._scope == "sample":
            return [self._judgement(answer, ids[0])]
        answers = answer.get("scores") if isinstance(answer, Mapping) else None
        if not isinstance(answers, list) or len(answers) != len(ids):
            found = f"{len(answers)} of them" if isinstance(answers, list) else clipped(repr(answer), 80)
            raise self._named(f"answered with {found}; needs 'scores' with {len(ids)} objects")
        return [self._judged(answer, request_id) for answer, request_id in zip(answers, ids, strict=True)]

    def _judged(self, answer: Any, request_id: str) -> Outcome:
        """A wrong answer within a group fails only its own sample."""
        try:
            return self._judgement(answer, request_id)
        except NoAnswer as cause:
            return failed(str(cause))

    def _judgement(self, answer: Any, request_id: str) -> Outcome:
        try:
            return judgement(answer, request_id)
        except NoAnswer as cause:
            raise self._named(str(cause)) from cause

    def _named(self, why: str) -> NoAnswer:
        return NoAnswer(f"service '{self._service.name}': {why}")


class JudgeSource(ScoreSource):
    """A language model behind a chat API, or one that the run serves."""

    def __init__(self, served_by: Service | Replicas, template: str, settings: JudgeSettings) -> None:
        self._served_by, self._template, self._settings = served_by, template, settings

    async def ask(self, reward: str, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        [trajectory] = trajectories
        judge = self._settings
        if isinstance(self._served_by, Service):
            body = chat(trajectory, self._template, judge)
            readable = partial(can_read, lambda answer: self._outcomes(answer_text(answer)))
            call = Call(reward, identity(trajectory), body, CHAT_PATH, answer_tokens(judge), readable=readable)
            return self._outcomes(answer_text(await self._served_by.ask(call, lane)))
        conversation = tuple(FrozenDict[str, Any](message) for message in messages(trajectory, self._template, judge))
        request = ScoreRequest(identity(trajectory), conversation, FrozenDict(engine_options(judge)))
        return self._outcomes((await self._served_by.ask(reward, request, lane)).text)

    def _outcomes(self, text: str) -> list[Outcome]:
        return [Outcome(RewardStatus.OK, score_of(text, self._settings), info={"said": clipped(text, 500)})]


class ModelSource(ScoreSource):
    """A classifier or scalar head that the run serves, and that scores the whole conversation."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def ask(self, reward: str, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        [trajectory] = trajectories
        answered = FrozenDict({"role": "assistant", "content": response_text(trajectory)})
        conversation = (*trajectory.prompt_messages, answered)
        if not isinstance(trajectory.completion, str):
            conversation = (*trajectory.prompt_messages, *trajectory.completion)
        raw = await self._replicas.ask(reward, ScoreRequest(identity(trajectory), conversation), lane)
        if raw.score is None:
            raise NoAnswer(f"model '{self._replicas.name}' gave text, not a score; kind=judge reads text")
        return [Outcome(RewardStatus.OK, finite("score", raw.score))]


class RemoteReward(Scorer):
    """A reward from a service, a judge or a model."""

    def __init__(
        self, name: str, settings: RewardSettings, source: ScoreSource, post_processing: GroupFunction | None
    ) -> None:
        self._name, self._settings, self._source = name, settings, source
        self.post_processing = post_processing
        self.statistics = RunningStatistics() if settings.normalise else None
        self._latencies: list[float] = []

    @property
    def name(self) -> str:
        """The key in `plugins.reward_loop.rewards`."""
        return self._name

    @property
    def scope(self) -> str:
        """The unit that one call sees."""
        return self._settings.scope

    @property
    def weight(self) -> float:
        """Its factor in the weighted sum."""
        return self._settings.weight

    @property
    def on_failure(self) -> str:
        """The policy for samples without a score."""
        return self._settings.on_failure

    @property
    def post_processes(self) -> bool:
        """True if a function post-processes each group's scores."""
        return self.post_processing is not None

    @property
    def needs(self) -> Scope:
        """The unit that one run must score, because its scores depend on each other."""
        if self._settings.scope == "sample" and (self.post_processes or self.statistics is not None):
            return Scope.GROUP
        return Scope(self._settings.scope)

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        """An outcome per trajectory. A sample without an answer fails, with the reason."""
        began = monotonic()
        try:
            outcomes = await self._source.ask(self._name, trajectories, lane)
        except NoAnswer as cause:
            outcomes = [failed(str(cause))] * len(trajectories)
        finally:
            if lane is Lane.TRAIN:
                self._latencies.append(monotonic() - began)
        # Evaluation compares raw scores over time, and its samples are not training samples.
        if self.statistics is None or lane is Lane.EVAL:
            return outcomes
        pairs = zip(trajectories, outcomes, strict=True)
        return [_normalised(self.statistics, pair, outcome) for pair, outcome in pairs]

    async def post_process(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane
    ) -> list[Outcome]:
        """The outcomes, with the function's scores for those that did not fail."""
        if self.post_processing is None:
            return list(outcomes)
        return await self.post_processing.post_process(trajectories, outcomes, lane)

    def take_latencies(self) -> dict[str, float]:
        """latency_p50_s and latency_p95_s of training's calls since the last time, waiting included."""
        taken, self._latencies = self._latencies, []
        if not taken:
            return {}
        return {f"latency_p{rank}_s": float(np.percentile(taken, rank)) for rank in (50, 95)}


def can_read(read: Callable[[Any], list[Outcome]], answer: Any) -> bool:
    """True if `read` finds a score for every sample in a service's answer."""
    with suppress(NoAnswer):
        return all(outcome.status is not RewardStatus.FAILED for outcome in read(answer))
    return False


def identity(trajectory: Trajectory) -> str:
    """A sample's name in requests and logs."""
    return f"{trajectory.id.prompt}/{trajectory.id.epoch}/{trajectory.id.sample}"


def group_of(trajectory: Trajectory) -> str:
    """The name of a sample's group in the running statistics."""
    return f"{trajectory.id.prompt}/{trajectory.id.epoch}"


def question(trajectory: Trajectory) -> dict[str, Any]:
    """The request to a service for one sample."""
    prompt = trajectory.prompt
    return {
        "id": identity(trajectory),
        "source": prompt.source,
        "messages": [dict(message.items()) for message in trajectory.prompt_messages],
        "completion": trajectory.completion,
        "answer": prompt.answer,
        "columns": dict(prompt.columns.items()),
    }


def judgement(answer: Any, request_id: str) -> Outcome:
    """A service's answer about one sample; NoAnswer if not finite numbers, or about another sample."""
    if not isinstance(answer, dict) or "score" not in answer:
        raise NoAnswer(f"answered with {clipped(str(answer), 80)!r}; needs an object with 'score'")
    if answer.get("id", request_id) != request_id:
        raise NoAnswer(f"answered about {clipped(str(answer['id']), 80)!r} when it was asked about '{request_id}'")
    components, info = answer.get("components") or {}, answer.get("info") or {}
    if not isinstance(components, dict) or not isinstance(info, dict):
        raise NoAnswer("answered with 'components' or 'info' that is not an object")
    if (wrong := extra_value_problem(info) or extra_value_problem(components)) is not None:
        raise NoAnswer(f"answered with {wrong}")
    checked = {str(name): finite(str(name), component) for name, component in components.items()}
    return Outcome(RewardStatus.OK, finite("score", answer["score"]), components=checked, info=info)


def finite(name: str, value: Any) -> float:
    """The value as a finite float; NoAnswer naming it otherwise."""
    checked = number(value)
    if isinstance(checked, str):
        raise NoAnswer(f"'{name}' {checked}")
    return checked


def _normalised(statistics: RunningStatistics, trajectory: Trajectory, outcome: Outcome) -> Outcome:
    score = outcome.score if outcome.status is RewardStatus.OK else None
    normalised = statistics.answered(group_of(trajectory), trajectory.id.sample, score)
    if score is None:
        return outcome
    return replace(outcome, score=normalised, info={**outcome.info, "raw_score": score})
