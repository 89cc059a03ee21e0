"""The result of a run, read from its directory when it is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError, ConfigError
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
    """Why the run ended before its last step; empty: it did not."""

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
        import pandas

        return pandas.DataFrame(columns)

    def trajectories(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """The recorded trajectories of a step, or of all steps, one after another; docs/run-directory.md has the fields."""
        for number in range(self.steps + 1) if step is None else (step,):
            yield from read_trajectories(self.run_dir, number)

    @property
    def model(self) -> Path:
        """The model of the last checkpoint: `AutoModelForCausalLM.from_pretrained` opens it, with peft a LoRA adapter.

        CheckpointError when the run has no checkpoint.
        """
        if self.checkpoint is None:
            raise CheckpointError(f"'{self.run_dir}': the run has no checkpoint; set checkpoint.at_end=true")
        adapter = self.checkpoint / "adapter"
        return adapter if adapter.is_dir() else self.checkpoint / "model"

    def load_model(self, **arguments: Any) -> Any:
        """The model as transformers loads it; `arguments` are those of `from_pretrained`."""
        from transformers import AutoModelForCausalLM

        if self.model.name == "adapter" and find_spec("peft") is None:
            raise ConfigError("load_model: the run trained an adapter, which needs peft; pip install 'rlcore[lora]'")
        return AutoModelForCausalLM.from_pretrained(self.model, **arguments)  # type: ignore[no-untyped-call]

    def load_tokenizer(self) -> Any:
        """The tokenizer of the last checkpoint, as transformers loads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model.parent / "model")  # type: ignore[no-untyped-call]
