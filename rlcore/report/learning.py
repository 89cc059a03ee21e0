"""Facts of a step for the rules that say why nothing is learned; the rules are those of rlcore-view."""

import math
from collections.abc import Sequence

from rlcore_view import Outcome, StepFacts, facts_of

from rlcore.errors.redaction import redact
from rlcore.types import FinishReason, RewardStatus, ScoredTrajectory


def step_facts(step: int, rows: Sequence[tuple[ScoredTrajectory, float | None]]) -> StepFacts:
    """Facts of (trajectory with its reward, advantage or None where it is not trained on), without metrics.

    They equal those that rlcore-view makes from the run's directory.
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
        )
        for row, advantage in rows
    ]
    return facts_of(step, outcomes, {})
