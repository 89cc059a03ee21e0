"""Trackers: tensorboard for real, plugins' own, and trackers that fail or hang never hold up a run."""

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.tracking import Setting, TrackContext, TrackedSample, Tracker, TrackerOffer
from rlcore.errors import ConfigError
from rlcore.errors.redaction import remember_variable
from rlcore.plan import TrackerPlan
from rlcore.report import core_trackers
from rlcore.report.core_trackers import MLflow, WeightsAndBiases
from rlcore.report.trackers import MOST_WAITING, Trackers, require_installed

RUN_CONFIG = "actor: {lr: 1.0e-05, backend: hf}\nrollout: {stop: []}\nkey: ${oc.env:SECRET}\nnothing: null\n"


class FakeTracker(Tracker):
    """Records its calls; calls `trouble` with the name of each call first."""

    trouble: Callable[[str], None] = staticmethod(lambda call: None)

    def __init__(self, context: TrackContext) -> None:
        super().__init__(context)
        self.calls: list[tuple[str, Any]] = []
        made[context.name] = self

    def start(self, configuration: Mapping[str, Setting]) -> None:
        self._call("start", (threading.current_thread(), configuration))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log", (step, metrics))

    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        self._call("samples", (step, samples))

    def close(self) -> None:
        self._call("close", threading.current_thread())

    def _call(self, name: str, value: Any) -> None:
        self.trouble(name)
        self.calls.append((name, value))


made: dict[str, FakeTracker] = {}
"""The fakes of the last test, by name."""


def fake(trouble: Callable[[str], None] = lambda call: None) -> type[FakeTracker]:
    return type("Troubled", (FakeTracker,), {"trouble": staticmethod(trouble)})


def trackers_of(tmp_path: Path, warnings: list[str], **fakes: type[Tracker]) -> Trackers:
    made.clear()
    plans = [TrackerPlan(TrackerOffer(name, cls), "plugin 'x' (x 1.0)", "section") for name, cls in fakes.items()]
    trackers = Trackers(plans, "project", tmp_path, RUN_CONFIG, warn=warnings.append)
    asyncio.run(trackers.start())
    return trackers


def core(name: str) -> TrackerPlan:
    """The core's own tracker of that name, as it is planned."""
    return TrackerPlan(next(offer for offer in core_trackers.OFFERS if offer.name == name), "plugin 'core' (rlcore 1)")


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
    trackers = Trackers([core("tensorboard")], "rlcore", tmp_path, RUN_CONFIG, warn=pytest.fail)
    asyncio.run(trackers.start())
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


def test_a_directory_that_tensorboard_cannot_write_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").symlink_to("/proc/self/task")  # root cannot write there either
    trackers = Trackers([core("tensorboard")], "rlcore", tmp_path, RUN_CONFIG, warn=pytest.fail)
    with pytest.raises(ConfigError, match=r"^track\.to: tracker tensorboard did not start: \w+Error: .*tensorboard"):
        asyncio.run(trackers.start())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_without_trackers_nothing_is_imported_and_no_thread_runs(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, threading\nfrom pathlib import Path\nfrom rlcore.report.trackers import Trackers\n"
        "trackers = Trackers((), 'x', Path(), '')\nasyncio.run(trackers.start())\n"
        "trackers.log(1, {'a': 1.0})\ntrackers.close()\n"
        "sys.exit(str([m for m in ('torch', 'accelerate') if m in sys.modules] + threading.enumerate()[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"


def test_every_tracker_gets_configuration_metrics_and_samples_in_one_thread(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers = trackers_of(tmp_path, warnings, first=fake(), second=fake())
    metrics, samples = {"a": 1.0}, [TrackedSample("p", "c", 0.5, None)]
    trackers.log(1, metrics)
    metrics["a"] = 2.0
    trackers.log(2, metrics)
    trackers.log_samples(2, samples)
    trackers.log_samples(3, [])
    trackers.close()
    one, two = made["first"], made["second"]
    assert [name for name, _ in one.calls] == ["start", "log", "log", "samples", "close"]
    thread, configuration = one.calls[0][1]
    assert configuration == {
        "actor.lr": 1e-5,
        "actor.backend": "hf",
        "rollout.stop": "[]",
        "key": "${oc.env:SECRET}",
        "nothing": "None",
    }
    assert one.calls[1:4] == [("log", (1, {"a": 1.0})), ("log", (2, {"a": 2.0})), ("samples", (2, samples))]
    assert two.calls == one.calls
    assert thread == one.calls[-1][1] != threading.current_thread()
    context = one.context
    assert (context.name, context.project, context.run_name) == ("first", "project", tmp_path.name)
    assert (context.run_dir, context.section) == (tmp_path, "section")
    assert warnings == []


def test_a_metric_that_a_service_named_after_a_secret_is_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_TEST_TOKEN", "tok-0123456789")
    remember_variable("RLCORE_TEST_TOKEN")
    trackers = trackers_of(tmp_path, [], only=fake())
    trackers.log(1, {"reward/judge/tok-0123456789/mean": 1.0})
    trackers.close()
    [(_, logged)] = [call for call in made["only"].calls if call[0] == "log"]
    assert logged == (1, {"reward/judge/${oc.env:RLCORE_TEST_TOKEN}/mean": 1.0})


def test_a_tracker_that_changes_its_metrics_changes_no_other(tmp_path: Path) -> None:
    class Greedy(FakeTracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            metrics.clear()  # type: ignore[attr-defined]

    trackers = trackers_of(tmp_path, [], greedy=Greedy, other=fake())
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert ("log", (1, {"a": 1.0})) in made["other"].calls


def test_mlflow_gets_names_that_it_takes(tmp_path: Path) -> None:
    names = MLflow(TrackContext("mlflow", "p", "r", tmp_path)).named
    assert [names(name) for name in ("eval/two words/pass@8", "a-b.c:d_e")] == ["eval/two words/pass_8", "a-b.c:d_e"]


def test_a_tracker_that_fails_later_is_named_and_disabled_and_others_continue(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers = trackers_of(tmp_path, warnings, bad=fake(failing("log")), good=fake())
    for step in (1, 2, 3):
        trackers.log(step, {"a": 1.0})
    trackers.close()
    assert warnings == [
        "tracker bad of plugin 'x' (x 1.0): RuntimeError: no route; it is switched off, metrics.jsonl has everything"
    ]
    assert [name for name, _ in made["good"].calls].count("log") == 3
    assert [name for name, _ in made["bad"].calls] == ["start", "close"]


def test_a_tracker_that_exits_ends_nothing(tmp_path: Path) -> None:
    def leave(call: str) -> None:
        if call in ("log", "close"):
            raise SystemExit(call) if call == "log" else GeneratorExit(call)

    warnings: list[str] = []
    trackers = trackers_of(tmp_path, warnings, bad=fake(leave), good=fake())
    trackers.log(1, {"a": 1.0})
    trackers.log(2, {"a": 1.0})
    trackers.close()
    assert [warning.split(": ", 1)[1] for warning in warnings] == [
        "it called sys.exit('log'); it is switched off, metrics.jsonl has everything",
        "GeneratorExit: close",
    ]
    assert [name for name, _ in made["good"].calls] == ["start", "log", "log", "close"]


def test_a_tracker_that_does_not_take_samples_keeps_getting_metrics(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers = trackers_of(tmp_path, warnings, bad=fake(failing("samples")))
    samples = [TrackedSample("p", "c", 0.5, None)]
    trackers.log_samples(1, samples)
    trackers.log_samples(2, samples)
    trackers.log(2, {"a": 1.0})
    trackers.close()
    assert [name for name, _ in made["bad"].calls] == ["start", "log", "close"]
    assert len(warnings) == 1
    assert "samples: RuntimeError: no route; it gets only metrics" in warnings[0]


def test_a_tracker_that_fails_at_the_end_is_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers_of(tmp_path, warnings, bad=fake(failing("close"))).close()
    assert warnings == ["tracker bad of plugin 'x' (x 1.0) at the end: RuntimeError: no route"]


def test_a_tracker_that_does_not_start_is_a_configuration_error_and_the_others_are_closed(tmp_path: Path) -> None:
    words = r"^track\.to: tracker bad of plugin 'x' \(x 1\.0\) did not start: RuntimeError: no route$"
    with pytest.raises(ConfigError, match=words):
        trackers_of(tmp_path, [], good=fake(), bad=fake(failing("start")))
    assert [name for name, _ in made["good"].calls] == ["start", "close"]


def test_a_signal_ends_the_wait_for_a_tracker_that_does_not_start(tmp_path: Path) -> None:
    release, warnings, began = threading.Event(), list[str](), threading.Event()

    def hang(call: str) -> None:
        if call == "start":
            began.set()
            release.wait(5)

    def warn(text: str) -> None:
        warnings.append(text)
        release.set()

    plan = TrackerPlan(TrackerOffer("slow", fake(hang)), "plugin 'x' (x 1.0)", "section")
    trackers = Trackers([plan], "project", tmp_path, RUN_CONFIG, warn=warn)

    async def main() -> None:
        starting = asyncio.create_task(trackers.start())
        await asyncio.to_thread(began.wait, 5)
        starting.cancel()  # as a signal does
        with pytest.raises(asyncio.CancelledError):
            await starting
        trackers.close(limit_s=0.0)

    asyncio.run(main())
    assert warnings == ["trackers: not finished within 0 s; left behind"]


@pytest.mark.slow
def test_a_tracker_that_hangs_holds_up_no_step(tmp_path: Path) -> None:
    release, warnings = threading.Event(), list[str]()

    def hang(call: str) -> None:
        if call == "log":
            release.wait(60)

    trackers = trackers_of(tmp_path, warnings, slow=fake(hang))
    began = time.monotonic()
    for step in range(100):
        trackers.log(step, {"a": 1.0})
    trackers.close(limit_s=0.2)
    assert time.monotonic() - began < 20
    assert warnings == ["tracker slow of plugin 'x' (x 1.0): not finished within 0.2 s; left behind"]
    release.set()


def test_what_waits_for_a_tracker_that_hangs_is_bounded(tmp_path: Path) -> None:
    release, hangs, warnings = threading.Event(), threading.Event(), list[str]()

    def hang(call: str) -> None:
        if call == "log":
            hangs.set()
            release.wait(60)

    trackers = trackers_of(tmp_path, warnings, slow=fake(hang))
    trackers.log(0, {"a": 1.0})
    assert hangs.wait(60), "a call that is taken later would make room for another, and so for a second warning"
    for step in range(1, 3 * MOST_WAITING):
        trackers.log(step, {"a": 1.0})
        trackers.log_samples(step, [TrackedSample("question", "answer", 1.0, None)])
    assert trackers._thread is not None
    assert trackers._thread.num_waiting == MOST_WAITING
    [warning] = warnings
    assert warning.startswith(f"tracker slow of plugin 'x' (x 1.0): {MOST_WAITING} calls behind; from step 5")
    release.set()
    trackers.close(limit_s=60)
    assert len(warnings) == 1
    assert [name for name, _ in made["slow"].calls].count("log") > MOST_WAITING / 3


def test_a_missing_package_is_named_with_its_install_line() -> None:
    words = r"^track\.to: tracker wandb needs wandb, which is not installed; install it with: pip install wandb$"
    with pytest.raises(ConfigError, match=words):
        require_installed([core("tensorboard"), core("wandb")], {"tensorboard": object()}.get)


@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_continues_its_run_of_wandb_unless_its_id_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    from accelerate import tracking  # type: ignore[import-untyped]

    ids: list[str] = []
    monkeypatch.setattr(tracking, "WandBTracker", lambda *arguments, **settings: ids.append(settings["id"]))
    tracker = WeightsAndBiases(TrackContext("wandb", "p", "r", tmp_path))
    tracker.make()
    if not kept:
        (tmp_path / "wandb_id.txt").write_text("")  # the disk was full
    tracker.make()
    assert all(ids)
    assert (ids[0] == ids[1]) is kept
