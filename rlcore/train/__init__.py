"""Training from Python and from the command line.

`train` is the entry point: configuration and plugins become a plan, the plan becomes a run, and the run takes steps
(`rlcore.train.trainer.Trainer.step`).
"""

import asyncio
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rlcore.errors import CheckpointError, ConfigError, describe
from rlcore.plan import RunPlan
from rlcore.report.files import write_atomically
from rlcore.report.metrics import trajectory_lines
from rlcore.report.terminal import Terminal
from rlcore.train import checkpoint
from rlcore.train.callbacks import Callbacks, OnStep, StopWhen
from rlcore.train.event_loop import run_to_end
from rlcore.train.loaded_run import evaluate_async
from rlcore.train.origin import Start
from rlcore.train.python.request import Config, request_of
from rlcore.train.result import TrainResult
from rlcore.train.run_dir import choose_directory
from rlcore.train.session import train_async
from rlcore.train.signals import Stopped
from rlcore.types import Lane, Metrics

T = TypeVar("T")

__all__ = ["Start", "Stopped", "TrainResult", "run_evaluation", "run_training", "train"]


def train(
    *config: Config,
    model: Any = None,
    rewards: Any = None,
    data: Any = None,
    eval: Any = None,
    plugins: str | Sequence[str] = (),
    resume: bool = False,
    from_start: bool = False,
    on_step: OnStep | None = None,
    stop_when: StopWhen | None = None,
    **settings: Any,
) -> TrainResult:
    """Train, and return the result.

    `config` is any number of YAML files, mappings (keys may be dotted) and 'key=value' texts, later ones over earlier
    ones, texts over all; `settings` are further keys, above files and mappings: `**{"actor.lr": 2e-5}`.

    * `model`: a directory or a name on the Hub.
    * `rewards`: a function, a text such as 'exact_match' or 'file.py:f', a list of these, or these or settings by name.
    * `data`, `eval`: training and held-out prompts: a path or name on the Hub, a list of dicts, a `datasets.Dataset`,
      or these or settings by the names of sources.
    * `plugins`: the name of a plugin, or several.
    * `resume` continues the run after its newest checkpoint; with `from_start` at step 1 if none can be used.
    * `on_step(step, metrics)` is called after each step, `stop_when(step, metrics)` ends the run where it is true:
      `rlcore.train.callbacks`.

    Rows, and functions that other processes cannot import, are written to `<run>/inputs/`, so that the run resumes
    without these objects. Works in scripts, without a main guard, and in notebooks. One-line RlcoreError if something
    is wrong; Stopped if a signal ended the run.
    """
    callbacks = Callbacks(on_step, stop_when)
    request = request_of(config, plugins, model, rewards, data, eval, settings)
    with request.planned(resume) as plan:
        for note in request.inputs.notes:
            Terminal().say(note)
        return run_training(plan, Start(resume, from_start), callbacks)


def run_training(
    plan: RunPlan,
    start: Start = Start(),  # noqa: B008 (frozen)
    callbacks: Callbacks = Callbacks(),  # noqa: B008 (frozen)
) -> TrainResult:
    """Train as planned; Stopped when a signal ended the run.

    Without a name, a run that is resumed is the newest one of this configuration. CheckpointError if the place
    that `start` names has no checkpoint.
    """
    if start.checkpoint is not None:
        start = replace(start, checkpoint=find_checkpoint(start.checkpoint))
    run_dir = choose_directory(plan.loaded, start.resume)
    return run_anywhere(train_async(plan, run_dir, start, callbacks))


def run_evaluation(plan: RunPlan, from_checkpoint: Path | None = None, samples: Path | None = None) -> Metrics:
    """Evaluate `eval.sources` with the configured model, or with the weights of a checkpoint or run.

    The trajectories are written to the file `samples`, in the lines of docs/run-directory.md. ConfigError, before the
    evaluation, if it cannot be written.
    """
    path = None if from_checkpoint is None else find_checkpoint(from_checkpoint)
    if samples is not None:
        with _writing(samples):
            samples.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=samples.parent).close()
    result = run_anywhere(evaluate_async(plan, path))
    if samples is not None:
        with _writing(samples):
            write_atomically(samples, trajectory_lines([(row, None) for row in result.rows], Lane.EVAL))
    return result.metrics


@contextmanager
def _writing(samples: Path) -> Iterator[None]:
    try:
        if samples.is_dir():
            raise IsADirectoryError("it is a directory")
        yield
    except OSError as cause:
        raise ConfigError(
            f"--samples: '{samples}' cannot be written ({describe(cause)}); needs a file in a directory that can be "
            "written to; choose another"
        ) from cause


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, which may also be a run directory (its newest one that verifies), or checkpoints/best.

    CheckpointError if there is none, or if a newer one is damaged: then the user has to name one.
    """
    if path.name in (checkpoint.BEST, checkpoint.POINTER) and path.is_file():
        path = path.with_name(path.read_text("utf-8", "replace").strip()[:100])
    if (path / "manifest.json").exists():
        return path
    found = checkpoint.survey(path) if path.is_dir() else checkpoint.Survey(None, ())
    if found.newest is None:
        problems = f": {'; '.join(found.passed_over)}" if found.passed_over else ""
        siblings = checkpoint.complete_steps(path.parent.parent) if path.parent.name == "checkpoints" else []
        choice = f"; choose from: {', '.join(f'step_{step}' for step in siblings)}" if siblings else ""
        raise CheckpointError(
            f"'{path}': no checkpoint is there{problems}; needs a run directory or its checkpoints/step_N{choice}"
        )
    if found.passed_over:
        raise CheckpointError(
            f"'{path}': its newest checkpoint cannot be used: {'; '.join(found.passed_over)}; name the one to use, "
            f"such as {found.newest}"
        )
    return found.newest


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; runs in a separate thread if this one already has an event loop (a notebook)."""
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
