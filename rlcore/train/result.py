"""The result of a run, read from its directory when it is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.engines.hf import load_saved
from rlcore.errors import CheckpointError
from rlcore.report.metrics import read, read_trajectories
from rlcore.types import Metrics


@dataclass(frozen=True)
class TrainResult:
    """The result of a run."""

    run_dir: Path
    steps: int
    checkpoint: Path | None
    """The last checkpoint; `model` is its model."""
    evaluations: tuple[tuple[int, Metrics], ...]
    """(step, metrics) of each evaluation."""
    best: Path | None = None
    """The checkpoint with the best evaluation, where `checkpoint.best` names a metric."""
    stopped: str = ""
    """Reason why the run ended before its last step; empty: it did not."""

    @cached_property
    def history(self) -> tuple[Metrics, ...]:
        """The metrics of each training step, with 'step'; those of steps before a resume too."""
        return tuple(record for record in read(self.run_dir) if "time/step_s" in record)

    @property
    def metrics(self) -> Any:
        """`history` as a table with a row per step: a pandas.DataFrame where pandas is installed, else lists by column.

        NaN where a step does not have a metric.
        """
        names = dict.fromkeys(name for record in self.history for name in record)
        columns = {name: [record.get(name, float("nan")) for record in self.history] for name in names}
        if find_spec("pandas") is None:
            return columns
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(columns)

    def trajectories(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """The recorded trajectories of a step, or of all steps in order, with the fields of docs/run-directory.md."""
        for number in range(self.steps + 1) if step is None else (step,):
            yield from read_trajectories(self.run_dir, number)

    @property
    def model(self) -> Path:
        """The model of the last checkpoint: `AutoModelForCausalLM.from_pretrained` opens it, with peft a LoRA adapter.

        CheckpointError when the run has no checkpoint.
        """
        return load_saved.model_directory(self._last_checkpoint())

    def load_model(self, **arguments: Any) -> Any:
        """The model as transformers loads it; `arguments` are those of `from_pretrained`."""
        return load_saved.load_model(self._last_checkpoint(), **arguments)

    def load_tokenizer(self) -> Any:
        """The tokenizer of the last checkpoint, as transformers loads it."""
        return load_saved.load_tokenizer(self._last_checkpoint())

    def _last_checkpoint(self) -> Path:
        if self.checkpoint is None:
            raise CheckpointError(f"'{self.run_dir}': the run has no checkpoint; set checkpoint.at_end=true")
        return self.checkpoint
