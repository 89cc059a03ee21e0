"""Computes the inputs of an update per trajectory, except for rewards: log-probs of the reference and pi_old, values.

They do not depend on rewards, so they are computed while rewards are pending, with the weights before the first update
of the step. They are stored by trajectory, independently of the division into mini-batches.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.reference import REFERENCE, ReferenceWorker
from rlcore.contracts.workers import ReplicaHandle
from rlcore.data.batch import collate, rescored
from rlcore.errors import WorkerError, worker_call
from rlcore.errors.checks.arrays import check_tokens, per_token
from rlcore.errors.checks.results import kind
from rlcore.plan import OldLogprobs
from rlcore.runtime.launch import Runtime, owner_of
from rlcore.train.timing import StepTimeline
from rlcore.types import Batch, Float32s, Reward, ScoredTrajectory, TokenScores, Trajectory, TrajectoryId


class ForwardPasses:
    """Arrays by trajectory, for one step."""

    def __init__(self, run: Runtime, timeline: StepTimeline) -> None:
        self._run, self._timeline = run, timeline
        self._old = run.plan.schedule.old_logprobs
        config = run.plan.config
        self._chooses = config.algo.top_entropy_quantile < 1.0
        self._with_entropy = self._chooses or config.train.record_tokens != "none"
        self._passes: list[_Pass] = []
        self._where: dict[TrajectoryId, tuple[int, int]] = {}
        """The pass and the row of each trajectory."""

    async def ensure(self, trajectories: Iterable[Trajectory]) -> None:
        """Compute what the plan needs for the trajectories that do not have it yet, in one pass per model."""
        if not self._run.plan.schedule.passes:
            return
        trajectories = list(trajectories)
        rows = [trajectory.id for trajectory in trajectories]
        if any(pass_.rows == rows for pass_ in self._passes):
            return
        groups: dict[tuple[str, int], list[ScoredTrajectory]] = {}
        unknown = Reward(0.0)
        for trajectory in trajectories:
            if not self._where or trajectory.id not in self._where:
                groups.setdefault((trajectory.id.prompt, trajectory.id.epoch), []).append(
                    ScoredTrajectory(trajectory, unknown)
                )
        if not groups:
            return
        rows = [row.trajectory.id for group in groups.values() for row in sorted(group, key=_place)]
        batch = self._collate(rows, list(groups.values()))
        self._where |= {row: (len(self._passes), index) for index, row in enumerate(rows)}
        self._passes.append(begun := _Pass(rows, batch))  # before any await: rewards may already be in
        with self._timeline.passing():
            begun.found = await self._pass(batch)

    def collated(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> tuple[list[TrajectoryId], Batch]:
        """The rows of the groups, ordered by sample and segment, and their batch.

        A pass may have collated them, even one in flight.
        """
        rows = [row.trajectory.id for group in groups for row in group]
        for pass_ in self._passes:
            if pass_.rows == rows:
                return rows, rescored(pass_.batch, groups)
        return rows, self._collate(rows, groups)

    def _collate(self, rows: Sequence[TrajectoryId], groups: Sequence[Sequence[ScoredTrajectory]]) -> Batch:
        """The groups, whose trajectories are `rows`, as a batch whose tokens can be trained on."""
        batch = collate(groups, self._run.tokens.pad_id)
        if rows:
            agent = owner_of(self._run.plan.components["agent"])
            check_tokens(f"{agent}: rollout()", batch, rows, self._run.vocabulary)
        return batch

    async def _pass(self, batch: Batch) -> dict[str, Float32s]:
        run, found = self._run, dict[str, Float32s]()
        if run.reference is not None:
            found["reference_logprobs_BT"] = await _logprobs(
                REFERENCE.name, run.reference.replicas[0], ReferenceWorker.logprobs, batch
            )
        if self._old is OldLogprobs.PASS:
            found |= await self._old_policy(batch)
        if (values := await run.critic.values(batch)) is not None:
            found["values_BT"] = values
        return found

    async def _old_policy(self, batch: Batch) -> dict[str, Float32s]:
        """Log-probs of pi_old, and entropies if the engine computes them and the run records or uses them."""
        actor = self._run.actor.replicas[0]
        if not self._with_entropy:
            return {"old_logprobs_BT": await _logprobs(ACTOR.name, actor, ActorWorker.logprobs, batch)}
        who = f"{actor.name}.{ActorWorker.token_scores.__name__}()"
        with worker_call(ACTOR.name, ActorWorker.token_scores.__name__):
            scores = await actor.call(ActorWorker.token_scores, batch)
            if not isinstance(scores, TokenScores):
                raise WorkerError(f"{who} returned {kind(scores)}; needs TokenScores")
            found = {"old_logprobs_BT": per_token(who, scores.logprobs_BT, batch, WorkerError, "log-probs")}
            if scores.entropy_BT is not None:
                found["entropy_BT"] = per_token(who, scores.entropy_BT, batch, WorkerError, "entropies")
            elif self._chooses:
                share = self._run.plan.config.algo.top_entropy_quantile
                raise WorkerError(
                    f"{who} returned no entropies; algo.top_entropy_quantile={share:g} chooses tokens by them; "
                    "choose 1, or an actor that computes them"
                )
            return found

    def attach(self, batch: Batch, rows: Sequence[TrajectoryId]) -> Batch:
        """The batch, whose rows are `rows`, with its arrays; 0 at padding."""
        if self._old is OldLogprobs.SAMPLED:
            batch = replace(batch, old_logprobs_BT=batch.tokens.rollout_logprobs_BT)
        if not self._passes or not rows:
            return batch
        for pass_ in self._passes:
            if pass_.rows == rows:
                for name, values_BT in pass_.found.items():
                    batch = _FILL[name](batch, values_BT)
                return batch
        where_B2 = np.array([self._where[row] for row in rows])
        shape = batch.tokens.token_ids_BT.shape
        for name in self._passes[0].found:
            if name == "entropy_BT" and any(name not in pass_.found for pass_ in self._passes):
                continue
            values_BT = np.zeros(shape, dtype=np.float32)
            for number, pass_ in enumerate(self._passes):
                mine, known_BT = np.flatnonzero(where_B2[:, 0] == number), pass_.found[name]
                length = min(shape[1], known_BT.shape[1])
                values_BT[mine, :length] = known_BT[where_B2[mine, 1], :length]
            batch = _FILL[name](batch, values_BT)
        return batch


async def _logprobs(role: str, replica: ReplicaHandle[Any], method: Callable[..., Any], batch: Batch) -> Float32s:
    """(B, T) of one model."""
    with worker_call(role, method.__name__):
        found = await replica.call(method, batch)
        return per_token(f"{replica.name}.{method.__name__}()", found, batch, WorkerError, "log-probs")


@dataclass
class _Pass:
    """A pass over some of the step's trajectories."""

    rows: list[TrajectoryId]
    batch: Batch
    """The batch that they were collated to."""
    found: dict[str, Float32s] = field(default_factory=dict)
    """By field, (B, T); empty until it has ended."""


_FILL: dict[str, Callable[[Batch, Float32s], Batch]] = {
    "reference_logprobs_BT": lambda batch, value: replace(batch, reference_logprobs_BT=value),
    "old_logprobs_BT": lambda batch, value: replace(batch, old_logprobs_BT=value),
    "entropy_BT": lambda batch, value: replace(batch, entropy_BT=value),
    "values_BT": lambda batch, value: replace(batch, values_BT=value),
}
"""By the name of the field of a `Batch`."""


def _place(scored: ScoredTrajectory) -> tuple[int, int]:
    return scored.trajectory.id.sample, scored.trajectory.id.segment
