"""Post-processes the scores of a group: original and new score of each sample."""

from collections.abc import Sequence
from dataclasses import replace

from rlcore.contracts.scorer import Outcome, failed
from rlcore.types import FrozenDict, RewardStatus, Trajectory

SCORE_COLUMN = "score"
"""The column with each sample's score, for post-processing functions."""


def scored_indices(outcomes: Sequence[Outcome]) -> list[int]:
    """Indices of a group's samples that have a score."""
    return [index for index, outcome in enumerate(outcomes) if outcome.status is RewardStatus.OK]


def with_score(trajectory: Trajectory, score: float) -> Trajectory:
    """The trajectory whose prompt has the score as a column."""
    prompt = trajectory.prompt
    columns = FrozenDict({**prompt.columns, SCORE_COLUMN: score})
    return replace(trajectory, prompt=replace(prompt, columns=columns))


def after_the_group(outcomes: Sequence[Outcome], indices: Sequence[int], processed: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes with the `processed` scores of the samples at `indices`.

    The original score is `info['raw_score']`. A failure fails the sample; a skipped sample keeps its score.
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
