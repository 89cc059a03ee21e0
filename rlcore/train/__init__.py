"""Training from Python and from the command line.

`train` is the story: a configuration and its plugins become a plan, the plan a run, the run takes steps
(`rlcore.train.trainer.Trainer.step`).
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlcore.errors import CheckpointError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.train import checkpoint
from rlcore.train.event_loop import run_to_end
from rlcore.train.origin import Start
from rlcore.train.run_dir import choose_directory
from rlcore.train.session import TrainResult, evaluate_async, train_async
from rlcore.train.signals import Stopped
from rlcore.types import Metrics

T = TypeVar("T")

__all__ = ["Start", "Stopped", "TrainResult", "run_evaluation", "run_training", "train"]


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str] = (),
    resume: bool = False,
    from_start: bool = False,
) -> TrainResult:
    """Train as `config` says: a YAML file, or the same as nested mappings; `overrides` are 'key=value'.

    `resume` continues the run after its newest checkpoint; with `from_start` at step 1 if it has none that can be used.

    Works in scripts, without a main guard, and in notebooks. RlcoreError when something is wrong.
    """
    source = Path(config) if isinstance(config, str) else config
    return run_training(plan_run([source], overrides, plugins), Start(resume, from_start))


def run_training(plan: RunPlan, start: Start = Start()) -> TrainResult:  # noqa: B008 (frozen)
    """Train as planned; Stopped when a signal ended the run.

    Without a name, a run that is resumed is the newest one of this configuration. CheckpointError when there is no
    checkpoint where `start` says.
    """
    run_dir = choose_directory(plan.loaded, start.resume)
    if start.checkpoint is not None:
        start = replace(start, checkpoint=find_checkpoint(start.checkpoint))
    return run_anywhere(train_async(plan, run_dir, start))


def run_evaluation(plan: RunPlan, from_checkpoint: Path | None = None) -> Metrics:
    """Evaluate `eval.sources` with the model as it is configured, or with the weights of a checkpoint or run."""
    path = None if from_checkpoint is None else find_checkpoint(from_checkpoint)
    return run_anywhere(evaluate_async(plan, path))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, which may also be a run directory: then its newest one that verifies.

    CheckpointError when there is none, or when a newer one is damaged: then the user chooses by naming one.
    """
    if (path / "manifest.json").exists():
        return path
    found = checkpoint.survey(path) if path.is_dir() else checkpoint.Survey(None, ())
    if found.newest is None:
        problems = f": {'; '.join(found.passed_over)}" if found.passed_over else ""
        raise CheckpointError(
            f"'{path}': no checkpoint is there{problems}; needed is a run directory or its checkpoints/step_N"
        )
    if found.passed_over:
        raise CheckpointError(
            f"'{path}': its newest checkpoint cannot be used: {'; '.join(found.passed_over)}; name the one to use, "
            f"such as {found.newest}"
        )
    return found.newest


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; where this thread runs an event loop already (a notebook), in a separate thread."""
    if not _loop_is_running():
        return run_to_end(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[T]]] = []

    async def noted() -> T:
        task = asyncio.ensure_future(work)
        running.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, thread_name_prefix="rlcore run") as thread:
        future = thread.submit(run_to_end, noted())
        try:
            return future.result()
        except KeyboardInterrupt:
            for loop, task in running:
                loop.call_soon_threadsafe(task.cancel)
            raise


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
