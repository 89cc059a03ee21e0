"""Facts of a step for rlcore-view's rules, which explain why a run does not learn."""

import math
from collections.abc import Sequence

from rlcore_view import Outcome, StepFacts, facts_of

from rlcore.errors.redaction import redact
from rlcore.types import FinishReason, RewardStatus, ScoredTrajectory


def step_facts(step: int, rows: Sequence[tuple[ScoredTrajectory, float | None]]) -> StepFacts:
    """The facts of rows (trajectory with its reward; its advantage, or None if it is not trained on), without metrics.

    They equal the facts that rlcore-view computes from the run's directory.
    """
    outcomes = [
        Outcome(
            (row.trajectory.id.prompt, row.trajectory.id.epoch),
            row.trajectory.id.sample,
            row.reward.score if row.reward.status is RewardStatus.OK and math.isfinite(row.reward.score) else None,
            redact(str(row.reward.info.get("error", ""))) if row.reward.status is RewardStatus.FAILED else None,
            row.trajectory.finish is FinishReason.LENGTH,
            row.trajectory.num_sampled,
            row.reward.info,
            row.reward.components,
            advantage,
            0.0 if row.reward.token_scores is None else row.token_score,
        )
        for row, advantage in rows
    ]
    return facts_of(step, outcomes, {})
