"""The start of a run: at step 1, or after a checkpoint of this run or another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import CheckpointError
from rlcore.report.metrics import last_step
from rlcore.train import checkpoint
from rlcore.types import Metrics

NAMED = 5
"""Unusable checkpoints that an error names; of more it gives the number."""


@dataclass(frozen=True)
class Start:
    """The requested start of a run; by default step 1 of a new directory."""

    resume: bool = False
    """After the newest checkpoint in the run directory."""
    from_start: bool = False
    """With `resume`: at step 1 if no checkpoint can be used, which is an error otherwise."""
    checkpoint: Path | None = None
    """After this checkpoint of another run."""


@dataclass(frozen=True)
class Origin:
    """The start of a run."""

    checkpoint: Path | None
    """Restored before the first step; None: step 1."""
    resumed: bool
    """The run directory has records of the run, which are cut back to the checkpoint."""
    passed_over: tuple[str, ...] = ()
    """Reasons why newer checkpoints cannot be used."""


def find_origin(run_dir: Path, start: Start) -> Origin:
    """The checkpoint to continue from, verified where it is one of `run_dir`.

    CheckpointError when `run_dir` has checkpoints or finished steps, and no checkpoint that can be used.
    """
    if not start.resume:
        return Origin(start.checkpoint, resumed=False)
    found = checkpoint.survey(run_dir)
    if found.newest is None and not start.from_start:
        _refuse(run_dir, found.passed_over)
    return Origin(found.newest, resumed=True, passed_over=found.passed_over)


def differences_from(step: int, changed: Sequence[str], records: Sequence[Metrics] | None) -> Iterator[str]:
    """Notes on differences between a run that continues and the checkpoint of `step`.

    `changed` are the sources whose rows have the same questions only. `records` are the metrics up to that step; None
    in a new directory.
    """
    for name in changed:
        yield (
            f"data.sources.{name}: its rows have other answers, columns or system messages than when the checkpoint "
            "was saved; the questions are the same"
        )
    recorded = step if records is None else max((int(record["step"]) for record in records), default=0)
    if recorded < step:
        yield (
            f"the metrics end with step {recorded}, and the checkpoint is of step {step}: the steps after {recorded} "
            "have no record"
        )


def _refuse(run_dir: Path, passed_over: Sequence[str]) -> None:
    directory = run_dir / "checkpoints"
    way_out = "begin with step 1 by --resume --from-start, which cuts metrics and trajectories"
    if passed_over:
        more = len(passed_over) - NAMED
        named = "; ".join(passed_over[:NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(
            f"--resume: no checkpoint in '{directory}' can be used: {named}; restore one, or {way_out}"
        )
    step = last_step(run_dir)
    if step > 0:
        raise CheckpointError(
            f"--resume: '{directory}' has no checkpoint, but the run has taken {step} steps; make the checkpoints "
            f"available there (is a volume mounted?), or {way_out}"
        )
