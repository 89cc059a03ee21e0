"""Samples as text, for trackers that show text or tables."""

from collections.abc import Sequence
from typing import Any

from rlcore.contracts.tracking import TrackedSample
from rlcore.errors.redaction import redact
from rlcore.types import ScoredTrajectory

MAX_TEXT = 4000
"""Most characters of a prompt or a completion that a tracker gets."""


def tracked_samples(scored: Sequence[tuple[ScoredTrajectory, float | None]]) -> list[TrackedSample]:
    """The samples with their advantages (None: not trained on), without secrets."""
    return [
        TrackedSample(
            _text(row.trajectory.prompt_messages[-1].get("content", "")),
            _text(row.trajectory.text()),
            float(row.reward.score),
            advantage,
        )
        for row, advantage in scored
    ]


def _text(value: Any) -> str:
    text = redact(str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."
