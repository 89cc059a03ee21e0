"""The reward manager: functions, services, judges and models, each called as soon as a sample is complete."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol

from rlcore import (
    BuildContext,
    FunctionRewards,
    GroupFunction,
    Lane,
    Metrics,
    RewardManager,
    Role,
    Scope,
    ScoredTrajectory,
    Trajectory,
)
from rlcore.aio import Stopwatch, all_or_none
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.reward_manager import bound_by
from rlcore.contracts.reward_replica import RewardReplica
from rlcore_reward_loop.checks import WHERE, template_of
from rlcore_reward_loop.client.http import allow_connections
from rlcore_reward_loop.client.service import Service
from rlcore_reward_loop.expose import Exposure
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.rewards import JudgeSource, ModelSource, RemoteReward, ScoreSource, ServiceSource, group_of
from rlcore_reward_loop.running import RunningStatistics
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings


class _Closed(Protocol):
    async def close(self) -> None: ...


class RewardLoop(RewardManager):
    """Scores by all of `plugins.reward_loop` and `reward.functions`. Failures are data that say why."""

    def __init__(self, context: BuildContext) -> None:
        settings = context.settings(RewardLoopSettings)
        self._context = context
        self._call_time = Stopwatch()
        self._audit = CallLog(context.run_dir, settings.audit, settings.audit_characters)
        self._services = {
            name: Service(name, service, self._audit, self._call_time) for name, service in settings.services.items()
        }
        self._models = {
            name: Replicas(name, model, context.workers(Role(name, RewardReplica)), self._audit, self._call_time)
            for name, model in settings.models.items()
        }
        self._rewards = [
            RemoteReward(name, reward, self._source(name, reward), _post_processing(context, name, reward))
            for name, reward in settings.rewards.items()
        ]
        self._functions = FunctionRewards(context, self._rewards)
        self._exposure = Exposure(self._services, self._models) if settings.expose else None

    def _source(self, name: str, settings: RewardSettings) -> ScoreSource:
        if settings.kind == "service":
            return ServiceSource(self._services[settings.served_by], settings.scope)
        if settings.kind == "model":
            return ModelSource(self._models[settings.served_by])
        served_by: Service | Replicas = (
            self._models[settings.served_by]
            if settings.served_by in self._models
            else self._services[settings.served_by]
        )
        template = template_of(f"{WHERE}.rewards.{name}.judge", settings.judge)
        return JudgeSource(served_by, template, settings.judge)

    @property
    def _post_processing(self) -> list[GroupFunction]:
        return [reward.post_processing for reward in self._rewards if reward.post_processing is not None]

    @property
    def scope(self) -> Scope:
        """The widest scope of any component; see `RewardManager.scope`."""
        found = {self._functions.scope, *(reward.needs for reward in self._rewards)}
        return next(scope for scope in (Scope.BATCH, Scope.GROUP, Scope.SAMPLE) if scope in found)

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of the functions and of the plugin's rewards."""
        return self._functions.weights

    async def start(self) -> None:
        """Connect, and start children. Exposure starts first, so that reward functions find it."""
        limits = [service.settings for service in self._services.values()]
        allow_connections(sum(limit.concurrency + limit.eval_slots for limit in limits))
        for service in self._services.values():
            await service.start()
        if self._exposure is not None:
            await self._exposure.start()
        await self._functions.start()
        await all_or_none([function.start() for function in self._post_processing])

    async def close(self) -> None:
        """Close all parts at once: one after the other, their deadlines would add up."""
        parts: list[_Closed] = [self._functions, *self._post_processing]
        parts += [*self._services.values(), *self._models.values()]
        if self._exposure is not None:
            parts.append(self._exposure)
        try:
            found = await asyncio.gather(*(part.close() for part in parts), return_exceptions=True)
        finally:
            self._audit.close()
        for error in found:
            if error is not None:
                raise error

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        """See `RewardManager.score`; errors of the stream propagate."""
        groups: dict[str, set[int]] = {}
        normalising = lane is Lane.TRAIN and bool(self._normalising)
        if normalising:
            stream = self._scaled(stream, groups)
        results = self._functions.score(stream, lane)
        async with AsyncExitStack() as stack:
            for statistics in self._normalising:
                stack.callback(statistics.end, groups)
            await stack.enter_async_context(aclosing(results))  # type: ignore[type-var]
            async for scored in results:
                if normalising:
                    self._count(scored.trajectory, groups)
                yield scored

    def _count(self, trajectory: Trajectory, groups: dict[str, set[int]]) -> None:
        """The sample has its whole reward, like those in `groups`. One that could not be sampled never comes, so that
        its group does not count."""
        group = group_of(trajectory)
        groups[group].add(trajectory.id.sample)
        if len(groups[group]) == self._context.config.rollout.samples_per_prompt:
            for statistics in self._normalising:
                statistics.complete(group)

    @property
    def _normalising(self) -> list[RunningStatistics]:
        return [reward.statistics for reward in self._rewards if reward.statistics is not None]

    async def _scaled(
        self, stream: AsyncIterator[Trajectory], groups: dict[str, set[int]]
    ) -> AsyncIterator[Trajectory]:
        """The stream. Notes its groups in `groups`, to be normalised by the statistics as of now."""
        scales = [(function, function.scale()) for function in self._normalising]
        async for trajectory in stream:
            if (group := group_of(trajectory)) not in groups:
                groups[group] = set()
                for statistics, scale in scales:
                    statistics.begin(group, scale)
            yield trajectory

    def metrics(self) -> Metrics:
        """See docs/rewards.md. Ends the step: its samples enter the statistics."""
        served: dict[str, Service | Replicas] = {**self._services, **self._models}
        waits = {setting: seconds for replica in served.values() for setting, seconds in replica.take_waits().items()}
        found, metrics = bound_by(waits, self._call_time.take()), self._functions.metrics()
        bound = max(metrics["time/service_bound"], found["time/service_bound"])
        metrics |= found | {"time/service_bound": bound}
        for name, replica in served.items():
            for count, value in replica.take_counts().items():
                metrics[f"reward/{name}/{count}"] = value
        for count in ("num_retries", "num_cache_hits", "num_ejections", "ejected"):
            metrics[f"reward/{count}"] = sum(metrics.get(f"reward/{name}/{count}", 0.0) for name in served)
        # a sum of them would be of different moments
        metrics["reward/in_flight_max"] = max((metrics[f"reward/{name}/in_flight_max"] for name in served), default=0.0)
        for reward in self._rewards:
            metrics |= {f"time/reward/{reward.name}/{name}": value for name, value in reward.take_latencies().items()}
            if reward.statistics is not None:
                reward.statistics.step()
                metrics[f"reward/{reward.name}/running_mean"] = reward.statistics.mean
                metrics[f"reward/{reward.name}/running_std"] = reward.statistics.deviation
        self._audit.flush()
        return metrics

    def state(self) -> dict[str, Any]:
        """The running statistics of the rewards that have some."""
        return {reward.name: reward.statistics.state() for reward in self._rewards if reward.statistics is not None}

    def restore(self, state: dict[str, Any]) -> None:
        for reward in self._rewards:
            if reward.statistics is not None and reward.name in state:
                reward.statistics.restore(state[reward.name])


def _post_processing(context: BuildContext, name: str, settings: RewardSettings) -> GroupFunction | None:
    """The function for a group's scores, called like a reward function of scope 'group'."""
    if not settings.post_process:
        return None
    return GroupFunction(context, name, settings.post_process, settings.post_process_s)
