"""The other functions of the Python interface: `plan`, `evaluate`, `resume` and `export`."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.plan import RunPlan
from rlcore.plugins.saved_run import open_run, open_to_resume
from rlcore.runtime.data_preview import preview_data
from rlcore.train import Start, TrainResult, find_checkpoint, run_evaluation, run_training
from rlcore.train.callbacks import Callbacks, OnStep, StopWhen
from rlcore.train.exported import Form, export_checkpoint
from rlcore.train.python.request import Config, request_of
from rlcore.types import Metrics


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of held-out prompts."""

    metrics: Metrics
    path: Path
    """A line of JSON per sample, with the fields of docs/run-directory.md."""

    def samples(self) -> Iterator[dict[str, Any]]:
        """The samples with their rewards, in canonical order."""
        with self.path.open("rb") as file:
            yield from map(json.loads, file)


def plan(
    *config: Config,
    model: Any = None,
    rewards: Any = None,
    data: Any = None,
    eval: Any = None,
    plugins: str | Sequence[str] = (),
    **settings: Any,
) -> RunPlan:
    """The plan of the run that `rlcore.train` would start with these arguments; starts and keeps nothing.

    Data that is quick to read is checked as `rlcore plan` does: ConfigError for a file or a column that does not exist,
    RewardError for a canary that scores too low. Rows and functions that would become files of the run are in a
    temporary directory during planning.
    """
    with request_of(config, plugins, model, rewards, data, eval, settings).planned_briefly() as made:
        preview_data(made)
        return made


def evaluate(
    *config: Config,
    checkpoint: str | os.PathLike[str] | None = None,
    model: Any = None,
    rewards: Any = None,
    data: Any = None,
    eval: Any = None,
    plugins: str | Sequence[str] = (),
    samples: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Evaluation:
    """Sample and score the held-out prompts (`eval`), and keep the samples.

    The model is the configured one, or has the weights of `checkpoint`, a run or one of its checkpoints. With only a
    checkpoint, the configuration is that of its run. `samples` is the file for the samples; the default is in the run's
    `evaluations/`, or below `train.dir`. The other arguments are those of `rlcore.train`; `data` is optional.
    """
    if checkpoint is not None and not config and model is None:
        run = open_run(Path(checkpoint))
        config, settings = (run.path / "config.yaml",), {**run.settings(), **settings}
    if data is None and eval is not None and not config:
        data = eval
    path = None if samples is None else Path(samples)
    with request_of(config, plugins, model, rewards, data, eval, settings).planned_briefly() as made:
        weights = None if checkpoint is None else find_checkpoint(Path(checkpoint))
        path = path or samples_path(made, weights)
        return Evaluation(run_evaluation(made, weights, path), path)


def samples_path(plan: RunPlan, weights: Path | None) -> Path:
    """Directory of an evaluation's samples: in the run whose weights are evaluated, else below `train.dir`."""
    now = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    if weights is not None:
        return open_run(weights).path / "evaluations" / f"{weights.name}-{now}.jsonl"
    return Path(plan.config.train.dir).expanduser() / "evaluations" / f"{now}.jsonl"


def resume(
    run: str | os.PathLike[str],
    *overrides: str,
    from_start: bool = False,
    on_step: OnStep | None = None,
    stop_when: StopWhen | None = None,
) -> TrainResult:
    """Continue the run in the directory `run` after its newest checkpoint, with its configuration.

    `overrides` ('train.max_steps=200') win over that. With `from_start`, begin at step 1 if no checkpoint can be used.
    """
    callbacks = Callbacks(on_step, stop_when)
    return run_training(open_to_resume(Path(run)).plan(overrides), Start(True, from_start), callbacks)


def export(
    source: str | os.PathLike[str], out: str | os.PathLike[str], form: Form = "hf", push: str | None = None
) -> Path:
    """Write the model of a run or checkpoint into the new directory `out`, which is returned.

    `form`: hf, for `from_pretrained`, a LoRA adapter merged; merged, the same of LoRA runs only; adapter, peft's. With
    `push`, the directory is also uploaded to that name on the Hub, for which a token must be known there.
    """
    return export_checkpoint(Path(source), Path(out), form, push).path
