"""The reward manager: every sample is a call to the service, made the moment the sample is complete."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rlcore.reward import RewardManager
from rlcore.reward.outcome import number
from rlcore.reward.stream import Units, rows
from rlcore.types import FrozenDict, Lane, Metrics, Reward, RewardStatus, Scored, Trajectory
from rlcore_reward_loop.service import NoAnswer, ScoringService
from rlcore_reward_loop.settings import RewardLoopSettings


class RewardLoop(RewardManager):
    """Scores by a service; a sample without a usable answer is FAILED, and says why."""

    def __init__(self, settings: RewardLoopSettings) -> None:
        self._url = settings.url
        self._service = ScoringService(settings)
        self._retries_told = 0

    async def start(self) -> None:
        await self._service.start()

    async def close(self) -> None:
        await self._service.close()

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[Scored]:
        """See `RewardManager.score`; what the stream raises passes."""
        scored: asyncio.Queue[list[Scored] | None] = asyncio.Queue()
        calls: set[asyncio.Task[None]] = set()

        async def judge(parts: list[Trajectory]) -> None:
            scored.put_nowait(rows(parts, await self._reward(parts[-1], lane)))

        async def read() -> None:
            units = Units()
            async for trajectory in stream:
                if (parts := units.add(trajectory)) is not None:
                    calls.add(asyncio.create_task(judge(parts), name=f"reward of {trajectory.id}"))
            for parts in units.rest():
                calls.add(asyncio.create_task(judge(parts), name=f"reward of {parts[-1].id}"))
            await asyncio.gather(*calls)

        reading = asyncio.create_task(read(), name="trajectories to the scoring service")
        reading.add_done_callback(lambda _: scored.put_nowait(None))
        try:
            while (done := await scored.get()) is not None:
                for each in done:
                    yield each
            await reading
        finally:
            for task in (reading, *calls):
                task.cancel()
            await asyncio.gather(reading, *calls, return_exceptions=True)

    def metrics(self) -> Metrics:
        """reward/num_retries: calls that were made again since the last time."""
        retries = self._service.num_retries - self._retries_told
        self._retries_told = self._service.num_retries
        return {"reward/num_retries": float(retries)}

    async def _reward(self, trajectory: Trajectory, lane: Lane) -> Reward:
        began = time.monotonic()
        try:
            score, parts, info = judgement(await self._service.ask(question(trajectory), lane))
        except NoAnswer as cause:
            error = FrozenDict({"error": f"scoring service {self._url}: {cause}"})
            return Reward(0.0, status=RewardStatus.FAILED, latency_s=time.monotonic() - began, info=error)
        return Reward(score, FrozenDict(parts), latency_s=time.monotonic() - began, info=FrozenDict(info))


def question(trajectory: Trajectory) -> dict[str, Any]:
    """What the service is sent for a sample."""
    identity, prompt = trajectory.id, trajectory.prompt
    return {
        "id": f"{identity.prompt}/{identity.epoch}/{identity.sample}",
        "source": prompt.source,
        "messages": prompt.messages,
        "completion": trajectory.completion,
        "answer": prompt.answer,
        "columns": prompt.columns,
    }


def judgement(answer: Any) -> tuple[float, dict[str, float], Mapping[str, Any]]:
    """(score, scores by part, info) of the service's answer; NoAnswer for anything but finite numbers."""
    if not isinstance(answer, Mapping) or "score" not in answer:
        raise NoAnswer(f"answered with {str(answer)[:80]!r}; an object with 'score' is needed")
    parts, info = answer.get("parts") or {}, answer.get("info") or {}
    if not isinstance(parts, Mapping) or not isinstance(info, Mapping):
        raise NoAnswer("answered with 'parts' or 'info' that is no object")
    score = finite("score", answer["score"])
    return score, {"service": score} | {str(name): finite(name, part) for name, part in parts.items()}, info


def finite(name: str, value: Any) -> float:
    """The value as a finite float; NoAnswer naming it when it is none."""
    checked = number(value)
    if isinstance(checked, str):
        raise NoAnswer(f"'{name}' {checked}")
    return checked
