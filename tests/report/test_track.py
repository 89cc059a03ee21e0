"""Trackers: tensorboard for real, and trackers that fail or hang never hold up a run."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import TrackConfig
from rlcore.errors import ConfigError
from rlcore.report.trackers import Tracker, Trackers, require_installed

RUN_CONFIG = "actor: {lr: 1.0e-05, backend: hf}\nrollout: {stop: []}\nkey: ${oc.env:SECRET}\nnothing: null\n"


class FakeTracker:
    """Keeps what it is told; calls `trouble` with the name of each call first."""

    def __init__(self, trouble: Callable[[str], None] = lambda call: None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._trouble = trouble

    def start(self) -> None:
        self._call("start", threading.current_thread())

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call("configuration", values)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self._call("log", (step, values))

    def finish(self) -> None:
        self._call("finish", threading.current_thread())

    def _call(self, name: str, value: Any) -> None:
        self._trouble(name)
        self.calls.append((name, value))


def trackers_of(tmp_path: Path, warnings: list[str], **fakes: FakeTracker) -> Trackers:
    def make(name: str, project: str, run_dir: Path, run_name: str) -> Tracker:
        assert (project, run_dir, run_name) == ("rlcore", tmp_path, "my-run")
        return fakes[name]

    config = TrackConfig(to=tuple(fakes))  # type: ignore[arg-type]
    found = {name: object() for name in fakes}
    trackers = Trackers(config, tmp_path, "my-run", RUN_CONFIG, warn=warnings.append, make=make, find=found.get)
    trackers.start()
    return trackers


def failing(when: str) -> Callable[[str], None]:
    def trouble(call: str) -> None:
        if call == when:
            raise RuntimeError(f"no route\nto {when}")

    return trouble


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_has_every_metric_under_its_step(tmp_path: Path) -> None:
    from accelerate import PartialState
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state_before = dict(PartialState._shared_state)
    trackers = Trackers(TrackConfig(to=("tensorboard",)), tmp_path, "my-run", RUN_CONFIG, warn=pytest.fail)
    trackers.start()
    trackers.log(1, {"reward/mean": 0.25, "actor/loss": -1.5})
    trackers.log(2, {"reward/mean": 0.5, "actor/loss": math.nan})
    trackers.close()
    trackers.close()
    trackers.log(3, {"reward/mean": 0.75})

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert events.Scalars("actor/loss")[0].value == -1.5
    (settings,) = (tmp_path / "tensorboard").glob("*/hparams.yml")
    assert "actor.lr: 1.0e-05" in settings.read_text()
    assert PartialState._shared_state == state_before, "accelerate's process state is given back"


def test_without_trackers_nothing_is_imported_and_no_thread_runs(tmp_path: Path) -> None:
    program = (
        "import sys, threading\nfrom pathlib import Path\nfrom rlcore.config import TrackConfig\n"
        "from rlcore.report.trackers import Trackers\n"
        "trackers = Trackers(TrackConfig(), Path(), 'x', '')\ntrackers.start()\n"
        "trackers.log(1, {'a': 1.0})\ntrackers.close()\n"
        "sys.exit(str([m for m in ('torch', 'accelerate') if m in sys.modules] + threading.enumerate()[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


def test_every_tracker_gets_configuration_and_metrics_in_one_thread(tmp_path: Path) -> None:
    one, two, warnings = FakeTracker(), FakeTracker(), list[str]()
    trackers = trackers_of(tmp_path, warnings, wandb=one, mlflow=two)
    metrics = {"a": 1.0}
    trackers.log(1, metrics)
    metrics["a"] = 2.0
    trackers.log(2, metrics)
    trackers.close()
    assert [name for name, _ in one.calls] == ["start", "configuration", "log", "log", "finish"]
    assert one.calls[1:4] == [
        (
            "configuration",
            {
                "actor.lr": 1e-5,
                "actor.backend": "hf",
                "rollout.stop": "[]",
                "key": "${oc.env:SECRET}",
                "nothing": "None",
            },
        ),
        ("log", (1, {"a": 1.0})),
        ("log", (2, {"a": 2.0})),
    ]
    assert two.calls == one.calls
    assert one.calls[0][1] == one.calls[-1][1] != threading.current_thread()
    assert warnings == []


def test_mlflow_gets_names_that_it_takes(tmp_path: Path) -> None:
    mlflow, wandb = FakeTracker(), FakeTracker()
    trackers = trackers_of(tmp_path, [], mlflow=mlflow, wandb=wandb)
    trackers.log(1, {"eval/two words/pass@8": 1.0, "a-b.c:d_e": 2.0})
    trackers.close()
    assert ("log", (1, {"eval/two words/pass_8": 1.0, "a-b.c:d_e": 2.0})) in mlflow.calls
    assert ("log", (1, {"eval/two words/pass@8": 1.0, "a-b.c:d_e": 2.0})) in wandb.calls


def test_a_tracker_that_fails_later_is_named_and_switched_off_and_others_go_on(tmp_path: Path) -> None:
    bad, good, warnings = FakeTracker(failing("log")), FakeTracker(), list[str]()
    trackers = trackers_of(tmp_path, warnings, wandb=bad, mlflow=good)
    for step in (1, 2, 3):
        trackers.log(step, {"a": 1.0})
    trackers.close()
    assert warnings == ["tracker wandb: RuntimeError: no route; it is switched off, metrics.jsonl has everything"]
    assert [name for name, _ in good.calls].count("log") == 3
    assert "finish" not in [name for name, _ in bad.calls]


def test_a_tracker_that_fails_at_the_end_is_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers_of(tmp_path, warnings, wandb=FakeTracker(failing("finish"))).close()
    assert warnings == ["tracker wandb at the end: RuntimeError: no route"]


def test_a_tracker_that_does_not_start_is_a_configuration_error_and_the_others_are_finished(tmp_path: Path) -> None:
    good = FakeTracker()
    with pytest.raises(ConfigError, match=r"^track\.to: wandb did not start: RuntimeError: no route$"):
        trackers_of(tmp_path, [], mlflow=good, wandb=FakeTracker(failing("start")))
    assert [name for name, _ in good.calls] == ["start", "configuration", "finish"]


def test_a_tracker_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    release, warnings = threading.Event(), list[str]()

    def hang(call: str) -> None:
        if call == "log":
            release.wait(60)

    trackers = trackers_of(tmp_path, warnings, wandb=FakeTracker(hang))
    began = time.monotonic()
    for step in range(100):
        trackers.log(step, {"a": 1.0})
    trackers.close(limit_s=0.2)
    assert time.monotonic() - began < 20
    assert warnings == ["trackers wandb: not finished within 0.2 s; left behind"]
    release.set()


def test_a_missing_package_is_named_with_its_install_line() -> None:
    with pytest.raises(ConfigError, match=r"^track\.to: wandb is not installed; install it with: pip install wandb$"):
        require_installed(("tensorboard", "wandb"), {"tensorboard": object()}.get)
