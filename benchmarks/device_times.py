"""An rlcore plugin for benchmarks of pools: workers sleep in separate pools as long as devices would compute.

Every cost is in device seconds per sample, divided by the devices that share the work: a rollout or judge replica is
one device, the actor has all devices of its pool.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlcore import FrozenDict, RunConfig
from rlcore.config.providers import ConfigSection
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.components import BuildContext, Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import PoolSpec, WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
from rlcore.contracts.rollout import RolloutWorker
from rlcore.types import (
    Batch,
    Completion,
    FinishReason,
    Float32s,
    GenerateRequest,
    Lane,
    Metrics,
    Reward,
    ScoredTrajectory,
    Trajectory,
    WeightsHandle,
)

RLCORE_API = "1"
JUDGE = Role("judge", RewardReplica)
NUM_TOKENS = 4


@dataclass(frozen=True)
class DeviceTimes:
    """The cost of a sample: the section `plugins.device_times`."""

    generate_s: float = 0.0
    """Device seconds of sampling."""
    judge_s: float = 0.0
    """Device seconds of judging."""
    train_s: float = 0.0
    """Device seconds of all passes and updates."""
    turn_s: float = 0.0
    """Seconds that a server takes to fall asleep, and to wake up."""
    judges: int = 1
    """Judge replicas, with one device each."""
    train_devices: int = 1
    """Devices of the actor's pool."""


class TimedActor(ActorWorker):
    """Sleeps as long as its devices would take, and updates nothing."""

    def setup(self) -> None:
        self._times: DeviceTimes = self.context.section

    def logprobs(self, batch: Batch) -> Float32s:
        return np.zeros(batch.tokens.token_ids_BT.shape, np.float32)

    def update(self, minibatch: Batch) -> Metrics:
        time.sleep(self._times.train_s * len(minibatch) / self._times.train_devices)
        return {}

    def publish(self, version: int) -> None:
        """Does nothing: there are no weights."""

    def weights(self, version: int, directory: Path) -> WeightsHandle:
        return WeightsHandle(version, "directory", str(directory))

    def save(self, directory: Path) -> None:
        (directory / "model").mkdir()

    def restore(self, directory: Path) -> None:
        """Do nothing, because there is no state."""

    def facts(self) -> dict[str, Any]:
        return {"num_parameters": 0, "context_length": None}


class TimedServer:
    """Takes `turn_s` to fall asleep and to wake up."""

    _times: DeviceTimes

    async def sleep(self) -> None:
        await asyncio.sleep(self._times.turn_s)

    async def wake(self) -> None:
        await asyncio.sleep(self._times.turn_s)


class TimedRollout(TimedServer, RolloutWorker):
    """Finishes its samples one after another, evenly spaced."""

    def setup(self) -> None:
        self._times = self.context.section
        self._version = 0

    async def load_weights(self, handle: WeightsHandle) -> int:
        self._version = handle.version
        return handle.version

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        began = time.monotonic()
        samples = [(request, sample) for request in requests for sample in range(request.n)]
        for number, (request, sample) in enumerate(samples, 1):
            await asyncio.sleep(max(0.0, began + number * self._times.generate_s - time.monotonic()))
            yield Completion(
                request_id=request.id,
                sample=sample,
                token_ids=np.full(NUM_TOKENS, 97, np.int32),
                logprobs=np.zeros(NUM_TOKENS, np.float32),
                finish=FinishReason.LENGTH,
                version=self._version,
            )


class TimedJudge(TimedServer, RewardReplica):
    """Answers one request after another."""

    def setup(self) -> None:
        self._times = self.context.section
        self._free_at = 0.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        self._free_at = max(self._free_at, time.monotonic()) + len(requests) * self._times.judge_s
        await asyncio.sleep(self._free_at - time.monotonic())
        return [RawScore(request.id, float(len(request.id) % 3)) for request in requests]

    async def health(self) -> str:
        return str(self.context)


class Judged(RewardManager):
    """Sends each sample to the judge with the fewest pending ones."""

    def __init__(self, context: BuildContext) -> None:
        self._replicas = context.workers(JUDGE).replicas
        self._num_pending = [0] * len(self._replicas)

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        finished: asyncio.Queue[ScoredTrajectory | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(stream, finished))
        try:
            while (scored := await finished.get()) is not None:
                yield scored
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(
        self, stream: AsyncIterator[Trajectory], finished: "asyncio.Queue[ScoredTrajectory | None]"
    ) -> None:
        try:
            async with asyncio.TaskGroup() as tasks, aclosing(stream) as rows:  # type: ignore[type-var]
                async for row in rows:
                    tasks.create_task(self._judge(row, finished))
        finally:
            finished.put_nowait(None)

    async def _judge(self, row: Trajectory, finished: "asyncio.Queue[ScoredTrajectory | None]") -> None:
        place = min(range(len(self._num_pending)), key=self._num_pending.__getitem__)
        self._num_pending[place] += 1
        request = ScoreRequest(str(row.id), (), FrozenDict({}))
        [raw] = await self._replicas[place].call(RewardReplica.score, [request])
        self._num_pending[place] -= 1
        finished.put_nowait(ScoredTrajectory(row, Reward((raw.score or 0.0) + row.id.sample)))


def requests(config: RunConfig, section: DeviceTimes) -> list[WorkerRequest]:
    """The judges, in a separate pool."""
    return [WorkerRequest(JUDGE, "timed", pool="reward", replicas=section.judges)]


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("device_times", DeviceTimes, {"reward.manager": "timed"})]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component("timed", Judged, requests)]


@hookimpl
def rlcore_resource_pools() -> Sequence[PoolSpec]:
    return [PoolSpec("reward")]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(ActorWorker, "timed", TimedActor),
        WorkerClass(RolloutWorker, "timed", TimedRollout),
        WorkerClass(RewardReplica, "timed", TimedJudge),
    ]
