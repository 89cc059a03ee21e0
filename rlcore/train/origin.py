"""The start of a run: at step 1, or after a checkpoint of this run or another."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import CheckpointError, RlcoreError, counted
from rlcore.plan import RunPlan
from rlcore.report.metrics import has_results, last_step
from rlcore.report.status import STATUS, read_status
from rlcore.report.token_log import TOKENS
from rlcore.train import checkpoint
from rlcore.train.run_dir import LOG, plan_changes
from rlcore.types import Metrics

BEGIN_AGAIN = "begin with step 1 by --resume --from-start, which cuts metrics and trajectories"
FINISHED = re.compile(rb" rlcore\.train\.(?:saving: saving step (\d+)|trainer: step (\d+): )")
"""Lines of log.txt that say how far a run has come."""
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


def check_remains(run_dir: Path, start: Start) -> Path:
    """The directory. CheckpointError if it is resumed and other files than those that `find_origin` reads show that a
    run has trained there.

    To be called before anything is written there: a start also writes log.txt and status.json.
    """
    if start.resume and not start.from_start and not has_results(run_dir) and (remains := [*remains_of(run_dir)]):
        raise CheckpointError(
            f"--resume: '{run_dir}' has no checkpoints, metrics and trajectories, but a run has trained there: "
            f"found {', '.join(remains)}; restore the rest (is a volume mounted?), or {BEGIN_AGAIN}"
        )
    return run_dir


def remains_of(run_dir: Path) -> Iterator[str]:
    """Names files that show a finished step. A start that failed leaves its plan, log, status and trace as well."""
    if num_tokens := len([*(run_dir / TOKENS).glob("step_*")]):
        yield f"{counted(num_tokens, 'file')} of {TOKENS}/"
    with suppress(RlcoreError):  # an invalid one says nothing
        status = read_status(run_dir)
        if status is not None and status[0].step > 1:
            yield f"{STATUS} of step {status[0].step}"
    if not (run_dir / LOG).exists():
        yield from (f"{name} without {LOG}" for name in ("plan.json", "rewards.json") if (run_dir / name).exists())
    elif (step := _last_logged(run_dir / LOG)) > 0:
        yield f"{LOG} of step {step}"


def _last_logged(log: Path) -> int:
    """The last step of which a log says that it was finished: that it was saved, or that a later one was begun."""
    with log.open("rb") as lines:
        found = [step for line in lines for step in FINISHED.findall(line[:1000])]
    return max((int(saved or int(begun) - 1) for saved, begun in found), default=0)


def changes_since(resumed: Path | None, saved: Path, plan: RunPlan) -> Iterator[str]:
    """Lines on what differs from the plan in the run directory `resumed`, which its last start wrote, and on what else
    differs from the one in the checkpoint `saved`.

    The latter has others if a resume changed settings before, or if the checkpoint is one of another run.
    """
    changes = [] if resumed is None else plan_changes(resumed, plan)
    yield from (f"changed since the last start: {change}" for change in changes)
    others = (change for change in plan_changes(saved, plan) if change not in changes)
    yield from (f"changed since the checkpoint was saved: {change}" for change in others)


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
    if passed_over:
        more = len(passed_over) - NAMED
        named = "; ".join(passed_over[:NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointError(
            f"--resume: no checkpoint in '{directory}' can be used: {named}; restore one, or {BEGIN_AGAIN}"
        )
    step = last_step(run_dir)
    if step > 0:
        raise CheckpointError(
            f"--resume: '{directory}' has no checkpoint, but the run has reached step {step}; make the checkpoints "
            f"available there (is a volume mounted?), or {BEGIN_AGAIN}"
        )
