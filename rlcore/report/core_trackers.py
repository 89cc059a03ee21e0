"""The core's trackers: tensorboard, wandb, mlflow and trackio, through accelerate's tracker classes."""

import re
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

from rlcore.contracts.tracking import Setting, TrackContext, TrackedSample, Tracker, TrackerOffer
from rlcore.report.files import write_atomically

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
    """A tracker that passes its calls to one of accelerate's trackers."""

    def __init__(self, context: TrackContext) -> None:
        super().__init__(context)
        self.served_by: AccelerateTracker | None = None

    @abstractmethod
    def make(self) -> AccelerateTracker:
        """Accelerate's tracker, not started; it writes its local files to the run directory."""

    def named(self, name: str) -> str:
        """The name of a metric or key in the form that the tracker accepts."""
        return name

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        """Log the samples, each as a row of `COLUMNS`."""
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
    """Writes `tensorboard/` in the run directory, with samples as a table of text.

    A resumed run purges what an earlier start wrote for the steps that it takes again.
    """

    _has_purged = False

    def start(self, configuration: Mapping[str, Setting]) -> None:
        # TensorBoard writes in a thread, which prints the traceback of a directory that cannot be written.
        directory = self.context.run_dir / "tensorboard"
        directory.mkdir(exist_ok=True)
        TemporaryFile(dir=directory).close()
        super().start(configuration)

    def make(self) -> AccelerateTracker:
        from accelerate import tracking  # type: ignore[import-untyped]

        tracker: AccelerateTracker = tracking.TensorBoardTracker("tensorboard", self.context.run_dir)
        return tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        is_evaluation = all(name.startswith("eval/") for name in metrics)
        # A resume may evaluate the checkpoint's step again, and the metrics of that step's training stay.
        self._purge(step + 1 if is_evaluation and step > 0 else step)
        super().log(step, metrics)

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        self._purge(step)
        tracker.log({SAMPLES: _markdown(rows)}, step=step)

    def _purge(self, step: int) -> None:
        """With the first values of this start: readers discard what earlier files have from `step` on."""
        if not self._has_purged:
            self._has_purged = True
            tracker: Any = self._started()
            tracker.writer.close()
            tracker.writer = type(tracker.writer)(tracker.logging_dir, purge_step=step)


class WeightsAndBiases(AccelerateShell):
    """Keeps one id in the run directory, so that a resumed run continues the same wandb run."""

    def make(self) -> AccelerateTracker:
        from accelerate import tracking

        directory, name = self.context.run_dir, self.context.run_name
        id_file = directory / "wandb_id.txt"
        if not (run_id := _kept_id(id_file)):
            run_id = secrets.token_hex(8)
            write_atomically(id_file, run_id.encode())
        tracker: AccelerateTracker = tracking.WandBTracker(
            self.context.project, name=name, id=run_id, resume="allow", dir=str(directory)
        )
        return tracker


class MLflow(AccelerateShell):
    """Logs under names without characters that MLflow refuses, such as the @ of pass@8.

    Keeps the id of its run in the run directory, so that a resumed run continues the same run of MLflow, if the server
    has it. MLflow refuses to change a parameter, so there each keeps the value with which the run began.
    """

    def make(self) -> AccelerateTracker:
        from accelerate import tracking

        tracker: AccelerateTracker = tracking.MLflowTracker(
            experiment_name=self.context.project, run_name=self.context.run_name, run_id=self._run_to_continue()
        )
        return tracker

    def start(self, configuration: Mapping[str, Setting]) -> None:
        import mlflow  # type: ignore[import-not-found]

        with accelerate_state():
            self.served_by = self.make()
            self.served_by.start()
            run = mlflow.active_run()
            write_atomically(self._id_file, run.info.run_id.encode())
            renamed = self._renamed(configuration)
            self.served_by.store_init_configuration(
                {name: value for name, value in renamed.items() if name not in run.data.params}
            )

    @property
    def _id_file(self) -> Path:
        return self.context.run_dir / "mlflow_id.txt"

    def _run_to_continue(self) -> str | None:
        """The id that is kept; None without one, and where the server has no such run or has deleted it."""
        import mlflow

        if not (run_id := _kept_id(self._id_file)):
            return None
        try:
            run = mlflow.get_run(run_id)
        except mlflow.exceptions.MlflowException:
            return None
        return run_id if run.info.lifecycle_stage == "active" else None

    def named(self, name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name)

    def show(self, tracker: AccelerateTracker, step: int, rows: list[list[Any]]) -> None:
        import mlflow

        columns = {column: list(values) for column, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
        mlflow.log_table({"step": [step] * len(rows), **columns}, f"{SAMPLES}.json")


class Trackio(AccelerateShell):
    """Logs samples as a data frame."""

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
    """Create the process state that accelerate's trackers need if it does not exist, and remove it again.

    A state that stays would decide the device of an Accelerator that a plugin or reward function makes later.
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


def _kept_id(file: Path) -> str:
    """The id in a file of the run directory; empty if there is none."""
    return file.read_text("utf-8").strip() if file.exists() else ""


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """The rows as a table; escapes text that would end a cell or begin HTML."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else str(value)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return "<br>".join(text.splitlines())
