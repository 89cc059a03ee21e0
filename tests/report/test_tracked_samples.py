"""Samples in trackers: what each of them is given, and one that fails."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from rlcore.config import TrackConfig
from rlcore.errors.redaction import remember_variable
from rlcore.report.tracked_samples import log_samples, sample_rows
from rlcore.report.trackers import Trackers
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Reward, ScoredTrajectory

ROWS = [["say |a|\n<b>", "a & b", 0.5, None], ["second", "c", 1.0, -0.25]]


class Recorder:
    """Keeps what a tracker is logged."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def finish(self) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", (step, values)))

    def log_table(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_shows_a_table_of_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(TrackConfig(to=("tensorboard",)), tmp_path, "run", "{}", warn=pytest.fail)
    trackers.start()
    trackers.log_samples(3, ROWS)
    trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3
    assert "| say &#124;a&#124;<br>&lt;b> | a &amp; b | 0.5 |  |" in text
    assert text.count("\n") == 3


def test_wandb_gets_a_table() -> None:
    tracker = Recorder()
    log_samples("wandb", tracker, 3, ROWS)
    columns = ["prompt", "completion", "reward", "advantage"]
    assert tracker.calls == [("samples", {"columns": columns, "data": ROWS, "step": 3})]


def test_mlflow_gets_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_table=lambda *arguments: logged.append(arguments)))
    log_samples("mlflow", Recorder(), 3, ROWS)
    ((columns, file),) = logged
    assert (columns["step"], columns["reward"], file) == ([3, 3], [0.5, 1.0], "samples.json")


def test_trackio_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Table=lambda dataframe: dataframe))
    tracker = Recorder()
    log_samples("trackio", tracker, 3, ROWS)
    (_, (step, values)) = tracker.calls[0]
    assert (step, list(values["samples"]["reward"])) == (3, [0.5, 1.0])
    assert isinstance(values["samples"], pandas.DataFrame)


def test_a_tracker_that_does_not_take_samples_keeps_getting_metrics(tmp_path: Path) -> None:
    tracker, warnings = Recorder(), list[str]()

    def refuse(name: str, **arguments: Any) -> None:
        raise RuntimeError("no tables here")

    tracker.log_table = refuse  # type: ignore[method-assign]
    config = TrackConfig(to=("wandb",))
    trackers = Trackers(
        config, tmp_path, "run", "{}", warn=warnings.append, make=lambda *arguments: tracker, find=lambda name: object()
    )
    trackers.start()
    trackers.log_samples(1, ROWS)
    trackers.log_samples(2, ROWS)
    trackers.log(2, {"a": 1.0})
    trackers.close()
    assert tracker.calls == [("log", (2, {"a": 1.0}))]
    assert len(warnings) == 1
    assert "RuntimeError: no tables here; it gets metrics alone" in warnings[0]


def test_rows_are_cut_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "sk-very-secret-1234")
    remember_variable("API_TOKEN")
    trajectory = make_trajectory(make_prompt(), text="sk-very-secret-1234 " + "x" * 5000)
    ((prompt, completion, reward, advantage),) = sample_rows([(ScoredTrajectory(trajectory, Reward(0.5)), None)])
    assert "secret" not in completion
    assert len(completion) < 4100
    assert (type(prompt), reward, advantage) == (str, 0.5, None)
