"""Training from Python and from the command line.

`train` is the story: a configuration and its plugins become a plan, the plan a run, the run takes steps
(`rlcore.train.trainer.Trainer.step`).
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rlcore import checkpoint
from rlcore.errors import CheckpointError
from rlcore.launch import plan_run
from rlcore.plan import RunPlan
from rlcore.train.directory import choose_directory
from rlcore.train.session import TrainResult, evaluate_async, train_async
from rlcore.train.signals import Stopped
from rlcore.types import Metrics

T = TypeVar("T")

__all__ = ["Stopped", "TrainResult", "run_evaluation", "run_training", "train"]


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str] = (),
    resume: bool = False,
) -> TrainResult:
    """Train as `config` says: a YAML file, or the same as nested mappings; `overrides` are 'key=value'.

    Works in scripts, without a main guard, and in notebooks. RlcoreError when something is wrong.
    """
    source = Path(config) if isinstance(config, str) else config
    return run_training(plan_run([source], overrides, plugins), resume=resume)


def run_training(plan: RunPlan, *, resume: bool = False, resume_from: Path | None = None) -> TrainResult:
    """Train as planned.

    `resume` continues the run of that name (of the newest run of this configuration when it has none) after its newest
    checkpoint; `resume_from` begins a run of its own with that checkpoint. Stopped when a signal ended the run.
    """
    run_dir = choose_directory(plan.loaded, resume)
    if resume_from is not None:
        resume_from = find_checkpoint(resume_from)
    return run_anywhere(train_async(plan, run_dir, resume, resume_from))


def run_evaluation(plan: RunPlan, from_checkpoint: Path | None = None) -> Metrics:
    """Evaluate `eval.sources` with the model as it is configured, or with the weights of a checkpoint or run."""
    path = None if from_checkpoint is None else find_checkpoint(from_checkpoint)
    return run_anywhere(evaluate_async(plan, path))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, which may also be a run directory: then its newest one."""
    if (path / "manifest.json").exists():
        return path
    newest = checkpoint.latest(path) if path.is_dir() else None
    if newest is None:
        raise CheckpointError(f"'{path}': no checkpoint is there; needed is a run directory or its checkpoints/step_N")
    return newest


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; where this thread runs an event loop already (a notebook), in a thread of its own."""
    if not _loop_is_running():
        return asyncio.run(work)
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[T]]] = []

    async def noted() -> T:
        task = asyncio.ensure_future(work)
        running.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1, thread_name_prefix="rlcore run") as thread:
        future = thread.submit(asyncio.run, noted())
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
