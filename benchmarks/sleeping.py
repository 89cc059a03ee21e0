"""An rlcore plugin for benchmarks of the schedule: workers and rewards that sleep instead of computing.

Generation takes `generate_s` for any number of samples: sample i of N is finished at generate_s * (i + 1) / N, in a
random order. The names of the samples determine this order, and also each reward's duration and score. The oracle
computes them again from the names, and so does the check that every sample got its reward.
"""

import asyncio
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config.providers import ConfigSection
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.components import BuildContext, Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.reference import ReferenceWorker
from rlcore.contracts.reward_manager import RewardManager
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
    TrajectoryId,
)

RLCORE_API = "1"
NUM_TOKENS = 4


@dataclass(frozen=True)
class Sleeping:
    """Seconds of the parts of a step: the section `plugins.sleeping`."""

    generate_s: float = 0.0
    """Sampling of a step's prompts."""
    pass_s: float = 0.0
    """The forward passes that need no reward."""
    update_s: float = 0.0
    """One update."""
    reward_low_s: float = 0.0
    """The shortest reward."""
    reward_high_s: float = 0.0
    """The longest reward."""
    slots: int = 0
    """The most rewards at a time; 0: any number."""


def chance(what: str, prompt: str, epoch: int, sample: int) -> float:
    """A number in [0, 1) that the names determine."""
    return zlib.crc32(f"{what}/{prompt}/{epoch}/{sample}".encode()) / 2**32


def reward_s(settings: Sleeping, prompt: str, epoch: int, sample: int) -> float:
    """The seconds of a sample's reward."""
    low, high = settings.reward_low_s, settings.reward_high_s
    return low + (high - low) * chance("reward", prompt, epoch, sample)


def score(prompt: str, epoch: int, sample: int) -> float:
    """The reward of a sample."""
    return chance("score", prompt, epoch, sample)


def finishing_order(names: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The samples (prompt, epoch, sample) of one pass, in the order in which they are finished."""
    return sorted(names, key=lambda name: chance("finish", *name))


class SleepingActor(ActorWorker):
    """Sleeps for every pass and update, and updates nothing."""

    version = 0

    def setup(self) -> None:
        self.settings: Sleeping = self.context.section

    def logprobs(self, batch: Batch) -> Float32s:
        return batch_zeros(batch)

    def update(self, minibatch: Batch) -> Metrics:
        time.sleep(self.settings.update_s)
        return {}

    def publish(self, version: int) -> None:
        self.version = version

    def save(self, directory: Path) -> None:
        (directory / "model").mkdir()

    def restore(self, directory: Path) -> None:
        """Do nothing, because there is no state."""

    def facts(self) -> dict[str, Any]:
        return {"num_parameters": 0, "context_length": None}


class SleepingReference(ReferenceWorker):
    """Sleeps for all forward passes of a step."""

    def setup(self) -> None:
        """Does nothing: there are no files."""

    def logprobs(self, batch: Batch) -> Float32s:
        time.sleep(self.context.section.pass_s)
        return batch_zeros(batch)


def batch_zeros(batch: Batch) -> Float32s:
    """(B, T) zeros."""
    return np.zeros(batch.tokens.token_ids_BT.shape, np.float32)


class SleepingRollout(RolloutWorker):
    """Samples a few equal tokens per response."""

    def setup(self) -> None:
        if not isinstance(self.context.host, SleepingActor):
            raise TypeError("the sleeping rollout is served inside the sleeping actor")
        self._actor = self.context.host

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        by_name = {}
        for request in requests:
            prompt, _, epoch = request.id.rpartition("/")
            by_name |= {(prompt, int(epoch), sample): request for sample in range(request.n)}
        began, total_s = time.monotonic(), self._actor.settings.generate_s
        for index, name in enumerate(finishing_order(list(by_name))):
            left_s = began + total_s * (index + 1) / len(by_name) - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
            yield Completion(
                request_id=by_name[name].id,
                sample=name[2],
                token_ids=np.full(NUM_TOKENS, 97, np.int32),
                logprobs=np.zeros(NUM_TOKENS, np.float32),
                finish=FinishReason.LENGTH,
                version=self._actor.version,
            )


class SleepingRewards(RewardManager):
    """A service with a number of slots, first come, first served."""

    def __init__(self, settings: Sleeping) -> None:
        self._settings = settings
        self._free = settings.slots or 10**9
        self._queue: deque[tuple[float, asyncio.Future[None]]] = deque()
        self.served: list[tuple[float, float]] = []
        """(begin, end) of each call, on the loop's clock."""
        self.late_s = 0.0
        """Total seconds for which calls were served longer than drawn, because the loop was busy when they ended."""

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[ScoredTrajectory]:
        scored: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read(stream, scored))
        try:
            while (row := await scored.get()) is not None:
                yield ScoredTrajectory(row, Reward(score(*names_of(row.id))))
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, stream: AsyncIterator[Trajectory], scored: "asyncio.Queue[Trajectory | None]") -> None:
        calls = []
        try:
            async for row in stream:
                call = self._call(reward_s(self._settings, *names_of(row.id)))
                call.add_done_callback(lambda _, row=row: scored.put_nowait(row))
                calls.append(call)
            await asyncio.gather(*calls)
        finally:
            scored.put_nowait(None)

    def _call(self, seconds: float) -> "asyncio.Future[None]":
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((seconds, call))
        self._serve()
        return call

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._free and self._queue:
            self._free -= 1
            seconds, call = self._queue.popleft()
            loop.call_later(seconds, self._end, loop.time(), seconds, call)

    def _end(self, began: float, seconds: float, call: "asyncio.Future[None]") -> None:
        now = asyncio.get_running_loop().time()
        self.served.append((began, now))
        self.late_s += now - began - seconds
        self._free += 1
        if not call.done():
            call.set_result(None)
        self._serve()


def names_of(row: TrajectoryId) -> tuple[str, int, int]:
    """The names that random numbers are derived from."""
    return row.prompt, row.epoch, row.sample


def build(context: BuildContext) -> RewardManager:
    """The manager."""
    return SleepingRewards(context.section)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("sleeping", Sleeping, {"reward.manager": "sleeping"})]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component("sleeping", build)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(ActorWorker, "sleeping", SleepingActor),
        WorkerClass(ReferenceWorker, "sleeping", SleepingReference),
        WorkerClass(RolloutWorker, "sleeping", SleepingRollout, embedded_in=ACTOR),
    ]
