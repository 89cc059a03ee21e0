"""The core's reward manager: a weighted sum of reward functions."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from rlcore.aio import Stopwatch, all_or_none
from rlcore.config import RewardConfig, RewardFunctionConfig
from rlcore.contracts.call_log import CHARACTERS, CallLog
from rlcore.contracts.components import BuildContext
from rlcore.contracts.offers import Scope
from rlcore.contracts.reward_manager import RewardManager, bound_by
from rlcore.contracts.scorer import Outcome, Scorer
from rlcore.errors import ConfigError, RewardError
from rlcore.reward.calls import FunctionCalls
from rlcore.reward.checked_scorer import CheckedScorer
from rlcore.reward.group_scores import after_the_group, scored_indices, with_score
from rlcore.reward.policy import aborted, allowed_failures, failure_policy, over_budget
from rlcore.reward.spec import FunctionSpec, sent
from rlcore.reward.stream import RewardStream, rows
from rlcore.reward.watchdog import LoopWatch
from rlcore.types import Lane, Metrics, Reward, RewardStatus, ScoredTrajectory, Trajectory


def build_function_rewards(context: BuildContext) -> "FunctionRewards":
    """The manager named 'functions'."""
    return FunctionRewards(context)


class FunctionRewards(RewardManager):
    """Scores each sample the moment it is complete, with every function of `reward.functions`.

    A plugin's manager may contain one and pass `others`: scorers that are weighted and summed with the functions, under
    the same failure policies and budget. The plugin starts and closes its scorers itself.
    """

    def __init__(self, context: BuildContext, others: Sequence[Scorer] = ()) -> None:
        self._context = context
        self._config: RewardConfig = context.config.reward
        self._log = CallLog(context.run_dir, "all", CHARACTERS)
        self._functions = _calls(context, self._log)
        self._scorers: list[Scorer] = [*self._functions, *map(CheckedScorer, others)]
        names = [scorer.name for scorer in self._scorers]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(
                f"reward: two parts are named '{twice}', among the functions of reward.functions and the scorers of "
                "the manager; rename one"
            )
        if not self._scorers and self._context.config.algo.advantage != "none":
            raise RewardError(
                "reward.functions is empty; needs at least one, such as reward.functions.x.fn=file.py:name"
            )
        self._watch = LoopWatch()
        self._queued = {function.name: Stopwatch() for function in self._functions}
        self._call_time = Stopwatch()
        self._restarts_reported = 0

    @property
    def scope(self) -> Scope:
        scopes = {Scope.GROUP if scorer.post_processes else Scope.SAMPLE for scorer in self._scorers}
        scopes |= {Scope(scorer.scope) for scorer in self._scorers}
        return next((scope for scope in (Scope.BATCH, Scope.GROUP) if scope in scopes), Scope.SAMPLE)

    @property
    def weights(self) -> Mapping[str, float]:
        return {scorer.name: scorer.weight for scorer in self._scorers}

    async def start(self) -> None:
        """Start the children and make every function ready. PluginError or ConfigError naming the function."""
        children, queued = self._context.children, self._queued
        await all_or_none(
            [function.start(children, self._watch, queued[function.name]) for function in self._functions]
        )

    async def close(self) -> None:
        try:
            await asyncio.gather(*(function.close() for function in self._functions))
        finally:
            self._watch.close()
            self._log.close()

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        """See `RewardManager.score`. RewardError as soon as the error budget of a training step is certainly spent."""
        evaluation = self._context.config.eval
        group_size = self._context.config.rollout.samples_per_prompt
        if lane is Lane.EVAL:
            group_size = evaluation.samples_per_prompt
        failures: list[Reward] = []
        num_scored = 0
        self._call_time.start()
        try:
            async with aclosing(RewardStream(self._scorers, lane, group_size).results(stream)) as results:  # type: ignore[type-var]
                async for parts, reward in results:
                    num_scored += 1
                    if reward.status is not RewardStatus.OK:
                        failures.append(reward)
                        self._check(parts[-1], failures, num_scored, lane)
                    for row in rows(parts, reward):
                        yield row
        finally:
            self._call_time.stop()

    def _check(self, trajectory: Trajectory, failures: Sequence[Reward], num_scored: int, lane: Lane) -> None:
        if failure_policy(failures[-1], self._config) == "abort":
            raise aborted(trajectory.id.unit(), failures[-1])
        if lane is Lane.EVAL:
            return
        num_samples, num_allowed = self._most_samples()
        num_samples = max(num_scored, num_samples)
        if len(failures) > max(num_allowed, allowed_failures(num_scored, self._config)):
            raise over_budget(failures, num_samples, self._config)

    def _most_samples(self) -> tuple[int, int]:
        """The most samples that a step's budget may be a share of, over all steps that may train on those of one call;
        and how many of them may fail.

        With on_stale=drop these are as many steps as prompts may be old; with dynamic sampling a step may replace all
        of its prompts in every round.
        """
        config = self._context.config
        steps = 1 + config.schedule.max_staleness if config.schedule.on_stale == "drop" else 1
        rounds = 1 + config.algo.max_resample_rounds if config.algo.dynamic_sampling else 1
        num_samples = rounds * config.train.prompts_per_step * config.rollout.samples_per_prompt
        return steps * num_samples, steps * allowed_failures(num_samples, self._config)

    def metrics(self) -> Metrics:
        """time/service_bound is 1.0 if calls of a function waited for a slot most of the time.

        time/bound_by/reward.functions.<x>.children (or .concurrency, of an async function) says which one; for
        functions that wait for I/O, `isolation: threads` helps too. reward/num_restarts counts children that died or
        were killed; time/loop_blocked_s is the longest time that an async function blocked the event loop, if there is
        one.
        """
        self._log.flush()
        waits = {_places(function): self._queued[function.name].take() for function in self._functions}
        total = sum(function.num_restarts for function in self._functions)
        restarts, self._restarts_reported = total - self._restarts_reported, total
        metrics = {**bound_by(waits, self._call_time.take()), "reward/num_restarts": float(restarts)}
        if any(function.is_async for function in self._functions):
            metrics["time/loop_blocked_s"] = self._watch.take_longest_s()
        return metrics


def _places(function: FunctionCalls) -> str:
    """The setting that limits concurrent calls of a function."""
    return f"reward.functions.{function.name}.{'concurrency' if function.is_async else 'children'}"


def function_spec(
    context: BuildContext, name: str, target: str, scope: str, kwargs: Mapping[str, Any], settings: Any = None
) -> FunctionSpec:
    """The spec from which a child of this run loads and calls a function."""
    config = context.config
    sources = {**config.eval.sources, **config.data.sources}
    answer_columns = {
        source: source_config.answer_column for source, source_config in sources.items() if source_config.answer_column
    }
    return FunctionSpec(name, target, dict(kwargs), scope, answer_columns, config.train.max_steps, sent(settings))


def group_function(
    context: BuildContext, name: str, target: str, deadline_s: float, config: RewardFunctionConfig | None = None
) -> FunctionCalls:
    """The function `target` that post-processes a group's scores, called like a reward function of scope 'group'.

    `config` is that of the function whose scores they are.
    """
    spec = function_spec(context, f"{name}.post_process", target, "group", {})
    settings = replace(config or RewardFunctionConfig(), fn=target, scope="group", deadline_s=deadline_s)
    return FunctionCalls(spec, replace(settings, post_process="", log_calls=False), 1.0, deadline_s)


class GroupFunction:
    """A function that post-processes a group's scores, named by the settings of a plugin's reward.

    It runs like a reward function of scope 'group', with the score of each sample as the column `score`.
    """

    def __init__(self, context: BuildContext, name: str, target: str, deadline_s: float) -> None:
        """`name` of the reward whose scores they are; `target` is 'module:attr' or '/abs/file.py:attr'."""
        self._children, self._watch = context.children, LoopWatch()
        self._calls = group_function(context, name, target, deadline_s)

    async def start(self) -> None:
        """Make the function ready. PluginError or ConfigError naming it."""
        await self._calls.start(self._children, self._watch, Stopwatch())

    async def close(self) -> None:
        """Release everything, even if `start` failed."""
        await self._calls.close()
        self._watch.close()

    async def post_process(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane
    ) -> list[Outcome]:
        """The outcomes with the scores that the function gives for those of the group that did not fail.

        The original score is `info['raw_score']`. A skipped sample keeps it, and a failure fails the sample.
        """
        good = scored_indices(outcomes)
        if not good:
            return list(outcomes)
        scored = [with_score(trajectories[index], outcomes[index].score) for index in good]
        return after_the_group(outcomes, good, await self._calls.score(scored, lane))


def _calls(context: BuildContext, log: CallLog) -> list[FunctionCalls]:
    calls = []
    for name, function in context.reward_functions.items():
        config, after = context.config.reward.functions[name], None
        if function.post_process:
            after = group_function(context, name, function.post_process, function.deadline_s, config)
        spec = function_spec(context, name, function.target, function.scope.value, function.kwargs, function.settings)
        kept = log if config.log_calls else None
        calls.append(FunctionCalls(spec, config, function.weight, function.deadline_s, after, kept))
    return calls
