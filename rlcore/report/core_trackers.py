"""The core's trackers: tensorboard, wandb, mlflow and trackio, through accelerate's tracker classes."""

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, Protocol

from rlcore.contracts.tracking import Setting, TrackContext, TrackedSample, Tracker, TrackerOffer

COLUMNS = ("prompt", "completion", "reward", "advantage")
SAMPLES = "samples"


class AccelerateTracker(Protocol):
    """The part of accelerate's GeneralTracker that is used here."""

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None: ...

    def log_table(
        self, table_name: str, columns: list[str] | None = None, data: list[Any] | None = None, step: int | None = None
    ) -> None: ...

    def finish(self) -> None: ...


class AccelerateShell(Tracker):
    """A tracker that one of accelerate's serves."""

    def __init__(self, context: TrackContext) -> None:
        super().__init__(context)
        self.served_by: AccelerateTracker | None = None

    @abstractmethod
    def make(self) -> AccelerateTracker:
        """Accelerate's tracker, not started; what it writes locally is in the run directory."""

    def named(self, name: str) -> str:
        """A metric's name, or a key, as the tracker takes it."""
        return name

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        """Give it the samples, a row of `COLUMNS` for each."""
        tracker.log_table(SAMPLES, columns=list(COLUMNS), data=rows, step=step)

    def start(self, configuration: Mapping[str, Setting]) -> None:
        with accelerate_state():
            self.served_by = self.make()
            self.served_by.start()
            self.served_by.store_init_configuration(self._renamed(configuration))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with accelerate_state():
            self._started().log(self._renamed(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        with accelerate_state():
            self.show(self._started(), step, [list(astuple(sample)) for sample in samples])

    def close(self) -> None:
        with accelerate_state():
            self._started().finish()

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {self.named(name): value for name, value in values.items()}

    def _started(self) -> AccelerateTracker:
        if self.served_by is None:
            raise RuntimeError(f"tracker {self.context.name} was not started")
        return self.served_by


class TensorBoard(AccelerateShell):
    """Writes `tensorboard/` in the run directory; samples are a table of text."""

    def make(self) -> AccelerateTracker:
        from accelerate import tracking  # type: ignore[import-untyped]

        tracker: AccelerateTracker = tracking.TensorBoardTracker("tensorboard", self.context.run_dir)
        return tracker

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        tracker.log({SAMPLES: _markdown(rows)}, step=step)


class WeightsAndBiases(AccelerateShell):
    """One id for the life of the run directory: a resumed run continues the same wandb run."""

    def make(self) -> AccelerateTracker:
        from accelerate import tracking

        directory = self.context.run_dir
        id_file = directory / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        run_id, name = id_file.read_text().strip(), self.context.run_name
        tracker: AccelerateTracker = tracking.WandBTracker(
            self.context.project, name=name, id=run_id, resume="allow", dir=str(directory)
        )
        return tracker


class MLflow(AccelerateShell):
    """Refuses the @ of pass@8 in names, so it gets others."""

    def make(self) -> AccelerateTracker:
        from accelerate import tracking

        tracker: AccelerateTracker = tracking.MLflowTracker(
            experiment_name=self.context.project, run_name=self.context.run_name
        )
        return tracker

    def named(self, name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name)

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        import mlflow  # type: ignore[import-not-found]

        columns = {column: list(values) for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
        mlflow.log_table({"step": [step] * len(rows), **columns}, f"{SAMPLES}.json")


class Trackio(AccelerateShell):
    """Samples are a data frame."""

    def make(self) -> AccelerateTracker:
        from accelerate import tracking

        tracker: AccelerateTracker = tracking.TrackioTracker(
            self.context.project, name=self.context.run_name, resume="allow"
        )
        return tracker

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        import pandas  # type: ignore[import-untyped]
        import trackio  # type: ignore[import-not-found]

        tracker.log({SAMPLES: trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))}, step=step)


OFFERS: tuple[TrackerOffer, ...] = (
    TrackerOffer("tensorboard", TensorBoard, "tensorboard"),
    TrackerOffer("wandb", WeightsAndBiases, "wandb"),
    TrackerOffer("mlflow", MLflow, "mlflow"),
    TrackerOffer("trackio", Trackio, "trackio"),
)


@contextmanager
def accelerate_state() -> Iterator[None]:
    """The process state that accelerate's trackers ask for; when it does not exist, only while they run.

    Left behind, it would decide the device of an Accelerator that a plugin or a reward function makes later.
    """
    from accelerate import PartialState

    if PartialState._shared_state:
        yield
        return
    PartialState(cpu=True)
    try:
        yield
    finally:
        PartialState._reset_state()


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table; what would end a cell or begin HTML is escaped."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else str(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return "<br>".join(text.splitlines())
