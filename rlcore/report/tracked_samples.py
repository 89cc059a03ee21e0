"""Samples as text, for trackers that show text or tables."""

from collections.abc import Sequence
from typing import Any

from rlcore.errors.redaction import redact
from rlcore.types import ScoredTrajectory

COLUMNS = ("prompt", "completion", "reward", "advantage")
NAME = "samples"
MAX_TEXT = 4000
"""Characters of a prompt or a completion that a tracker gets."""

Rows = list[list[Any]]
"""A row per sample, with `COLUMNS`."""


def sample_rows(scored: Sequence[tuple[ScoredTrajectory, float | None]]) -> Rows:
    """The samples with their advantages (None of one that is not trained on), without secrets."""
    return [
        [
            _text(row.trajectory.prompt.messages[-1].get("content", "")),
            _text(row.trajectory.text()),
            float(row.reward.score),
            advantage,
        ]
        for row, advantage in scored
    ]


def log_samples(name: str, tracker: Any, step: int, rows: Rows) -> None:
    """Give the samples to accelerate's tracker of that name, in the form that it shows."""
    if name == "tensorboard":
        tracker.log({NAME: _markdown(rows)}, step=step)
    elif name == "wandb":
        tracker.log_table(NAME, columns=list(COLUMNS), data=rows, step=step)
    elif name == "mlflow":
        import mlflow  # type: ignore[import-not-found]

        columns = {column: list(values) for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
        mlflow.log_table({"step": [step] * len(rows), **columns}, f"{NAME}.json")
    elif name == "trackio":
        import pandas  # type: ignore[import-untyped]
        import trackio  # type: ignore[import-not-found]

        tracker.log({NAME: trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))}, step=step)


def _text(value: Any) -> str:
    text = redact(str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " ..."


def _markdown(rows: Rows) -> str:
    """A table; what would end a cell or begin HTML is escaped."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else str(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return "<br>".join(text.splitlines())
