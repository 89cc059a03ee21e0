"""Samples in the core's trackers: what each of them is given."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from rlcore.contracts.tracking import TrackContext, TrackedSample
from rlcore.errors.redaction import remember_variable
from rlcore.report.core_trackers import AccelerateShell, MLflow, TensorBoard, Trackio, WeightsAndBiases
from rlcore.report.tracked_samples import tracked_samples
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.types import Reward, ScoredTrajectory, frozen_messages

SAMPLES = (TrackedSample("say |a|\n<b>", "a & b", 0.5, None), TrackedSample("second", "c", 1.0, -0.25))
ROWS = [["say |a|\n<b>", "a & b", 0.5, None], ["second", "c", 1.0, -0.25]]


class Recorder:
    """Keeps what accelerate's tracker is logged."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("log", (step, values)))

    def log_table(self, name: str, **arguments: Any) -> None:
        self.calls.append((name, arguments))


def served(cls: type[AccelerateShell]) -> tuple[AccelerateShell, Recorder]:
    """A tracker that stands before a recorder."""
    tracker, recorder = cls(TrackContext("x", "p", "r", Path())), Recorder()
    tracker.served_by = recorder  # type: ignore[assignment]
    return tracker, recorder


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_shows_a_table_of_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoard(TrackContext("tensorboard", "p", "r", tmp_path))
    tracker.start({})
    tracker.log_samples(3, SAMPLES)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3
    assert "| say &#124;a&#124;<br>&lt;b> | a &amp; b | 0.5 |  |" in text
    assert text.count("\n") == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
@pytest.mark.parametrize("is_evaluated_again", [False, True])
def test_tensorboard_shows_the_newest_values_of_repeated_steps(tmp_path: Path, is_evaluated_again: bool) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    for start, steps in enumerate([(1, 2, 3, 4), (3, 4, 5)]):
        tracker = TensorBoard(TrackContext("tensorboard", "p", "r", tmp_path))
        tracker.start({})
        if start and is_evaluated_again:
            tracker.log(2, {"eval/heldout/mean": 1.0})
        for step in steps:
            tracker.log(step, {"reward/mean": 10.0 * start + step})
            tracker.log_samples(step, SAMPLES)
        tracker.close()
        for file in (tmp_path / "tensorboard").glob("events.out.tfevents.1*"):  # its name begins with the second
            file.rename(file.with_name(file.name.replace("tfevents.1", f"tfevents.0{start}", 1)))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("reward/mean")]
    assert found == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert [event.step for event in events.Tensors("samples/text_summary")] == [1, 2, 3, 4, 5]


def test_wandb_gets_a_table() -> None:
    tracker, recorder = served(WeightsAndBiases)
    tracker.log_samples(3, SAMPLES)
    columns = ["prompt", "completion", "reward", "advantage"]
    assert recorder.calls == [("samples", {"columns": columns, "data": ROWS, "step": 3})]


def test_mlflow_gets_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(log_table=lambda *arguments: logged.append(arguments)))
    served(MLflow)[0].log_samples(3, SAMPLES)
    ((columns, file),) = logged
    assert (columns["step"], columns["reward"], file) == ([3, 3], [0.5, 1.0], "samples.json")


def test_trackio_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Table=lambda dataframe: dataframe))
    tracker, recorder = served(Trackio)
    tracker.log_samples(3, SAMPLES)
    (_, (step, values)) = recorder.calls[0]
    assert (step, list(values["samples"]["reward"])) == (3, [0.5, 1.0])
    assert isinstance(values["samples"], pandas.DataFrame)


def test_samples_are_cut_and_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "sk-very-secret-1234")
    remember_variable("API_TOKEN")
    trajectory = make_trajectory(make_prompt(), text="sk-very-secret-1234 " + "x" * 5000)
    (sample,) = tracked_samples([(ScoredTrajectory(trajectory, Reward(0.5)), None)])
    assert "secret" not in sample.completion
    assert len(sample.completion) < 4100
    assert (type(sample.prompt), sample.reward, sample.advantage) == (str, 0.5, None)


def test_the_prompt_of_a_sample_is_what_its_environment_opened_with() -> None:
    opening = frozen_messages([{"role": "user", "content": "guess my number"}])
    trajectory = replace(make_trajectory(make_prompt()), opening=opening)
    (sample,) = tracked_samples([(ScoredTrajectory(trajectory, Reward(0.5)), None)])
    assert sample.prompt == "guess my number"
