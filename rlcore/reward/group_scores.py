"""Scores of a group that are looked at together: what each sample's score was, and what it becomes."""

from collections.abc import Sequence
from dataclasses import replace

from rlcore.contracts.scorer import Outcome, failed
from rlcore.types import FrozenDict, RewardStatus, Trajectory

SCORE_COLUMN = "score"
"""The column in which a post-processing function finds what was said of each sample."""


def scored_indices(outcomes: Sequence[Outcome]) -> list[int]:
    """Of a group, the samples that have a score: the others are left out."""
    return [index for index, outcome in enumerate(outcomes) if outcome.status is RewardStatus.OK]


def with_score(trajectory: Trajectory, score: float) -> Trajectory:
    """The trajectory whose prompt has the score as a column."""
    prompt = trajectory.prompt
    columns = FrozenDict({**prompt.columns, SCORE_COLUMN: score})
    return replace(trajectory, prompt=replace(prompt, columns=columns))


def after_the_group(outcomes: Sequence[Outcome], indices: Sequence[int], processed: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with the scores that were `processed` of the samples at `indices`.

    The score before is `info['raw_score']`. A failure fails the sample; no opinion leaves the score as it is.
    """
    changed = list(outcomes)
    for index, outcome in zip(indices, processed, strict=True):
        before = outcomes[index]
        if outcome.status is RewardStatus.FAILED:
            changed[index] = failed(f"post_process: {outcome.error}")
        elif outcome.status is RewardStatus.OK:
            info = {**before.info, **outcome.info, "raw_score": before.score}
            changed[index] = replace(before, score=outcome.score, info=info)
    return changed
