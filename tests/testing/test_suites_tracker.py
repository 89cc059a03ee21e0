"""The suite of trackers: green on the core's own, and red on trackers that break a promise."""

import csv
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.tracking import TrackContext, Tracker, TrackerOffer
from rlcore.report.core_trackers import TensorBoard
from rlcore.testing.suites.harness import checks, failures
from rlcore.testing.suites.tracker import TrackerSuite


def scalars(run_dir: Path) -> Mapping[int, Mapping[str, float]]:
    """The metrics in the event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
class TestTensorBoard(TrackerSuite):
    target = TensorBoard
    reads = staticmethod(scalars)

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        """Imported before threads are counted."""
        import accelerate.tracking  # type: ignore[import-untyped]  # noqa: F401
        import torch.utils.tensorboard  # noqa: F401


class Table(Tracker):
    """A tracker without fault."""

    def start(self, configuration):
        self.file = self.directory().joinpath("table.csv").open("a", newline="", encoding="utf-8")
        self.rows = csv.writer(self.file)

    def directory(self):
        return self.context.run_dir

    def log(self, step, metrics):
        self.rows.writerows((step, name, value) for name, value in metrics.items())

    def log_samples(self, step, samples):
        for sample in samples:
            self.file.write(f"# {sample.advantage or 0.0:g} {' '.join(sample.completion.split())}\n")

    def close(self):
        self.file.close()


def table(run_dir: Path) -> Mapping[int, Mapping[str, float]]:
    found: dict[int, dict[str, float]] = {}
    with (run_dir / "table.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            if len(row) == 3:
                found.setdefault(int(row[0]), {})[row[1]] = float(row[2])
    return found


class TestTable(TrackerSuite):
    target = TrackerOffer("table", Table)
    reads = staticmethod(table)


class Whole(Table):
    """Needs an argument more than the context."""

    def __init__(self, context: TrackContext, address: str) -> None:
        super().__init__(context)


class Eager(Table):
    def __init__(self, context):
        super().__init__(context)
        (context.run_dir / "eager").touch()


class Busy(Table):
    def __init__(self, context):
        super().__init__(context)
        threading.Thread(target=ENDED.wait, daemon=True).start()


class Open(Table):
    """Leaves its file open."""

    def start(self, configuration):
        super().start(configuration)
        KEPT.append(self.file)

    def close(self):
        self.file.flush()


class Late(Table):
    """Opens its file with the first step."""

    def start(self, configuration):
        """Nothing."""

    def log(self, step, metrics):
        if not hasattr(self, "file"):
            super().start({})
        super().log(step, metrics)

    def log_samples(self, step, samples):
        if not hasattr(self, "file"):
            super().start({})


class Finite(Table):
    def log(self, step, metrics):
        if not all(map(math.isfinite, metrics.values())):
            raise ValueError("NaN")
        super().log(step, metrics)


class Fixed(Table):
    """Has the columns of the first step."""

    def log(self, step, metrics):
        if any(" " in name for name in metrics):
            raise KeyError(*metrics)
        super().log(step, metrics)


class Plain(Table):
    def log_samples(self, step, samples):
        for sample in samples:
            self.file.write(f"# {sample.prompt.encode('ascii')!r}\n")


class Fresh(Table):
    def start(self, configuration):
        self.file = self.directory().joinpath("table.csv").open("w", newline="", encoding="utf-8")
        self.rows = csv.writer(self.file)


class Elsewhere(Table):
    def start(self, configuration):
        super().start(configuration)
        Path("elsewhere.txt").write_text("here")


class Rounded(Table):
    def log(self, step, metrics):
        super().log(step, {name: round(value) if math.isfinite(value) else value for name, value in metrics.items()})


ENDED = threading.Event()
KEPT: list[Any] = []

MUTANTS = {
    Whole: "test_it_is_a_tracker_of_a_context_alone",
    Eager: "test_the_constructor_starts_nothing_and_writes_nothing",
    Busy: "test_the_constructor_starts_nothing_and_writes_nothing",
    Open: "test_it_takes_a_run_from_its_start_to_its_end",
    Late: "test_it_takes_a_run_that_ends_before_its_first_step",
    Finite: "test_it_takes_numbers_that_are_not_finite",
    Fixed: "test_it_takes_every_name_of_a_metric",
    Plain: "test_it_takes_every_text_of_a_sample",
    Fresh: "test_it_continues_in_the_directory_of_a_resumed_run",
    Elsewhere: "test_it_writes_in_the_run_directory_only",
    Rounded: "test_what_was_logged_is_there_at_the_end",
}


@pytest.fixture(autouse=True)
def _ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rlcore.testing.leaks.PATIENCE_S", 0.05)
    ENDED.clear()
    yield
    ENDED.set()
    for file in KEPT:
        file.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_promise_is_noticed_by_its_check(mutant: type[Tracker]) -> None:
    suite = type("Tested", (TrackerSuite,), {"target": mutant, "reads": staticmethod(table)})
    due = MUTANTS[mutant]
    found = failures(suite, [due])
    assert list(found) == [due]
    assert mutant.__qualname__ in found[due]


@pytest.mark.parametrize(
    "mutant", [Late, Finite, Fixed, Plain, Fresh, Elsewhere, Rounded], ids=lambda cls: cls.__name__
)
def test_no_other_check_notices_it(mutant: type[Tracker]) -> None:
    suite = type("Tested", (TrackerSuite,), {"target": mutant, "reads": staticmethod(table)})
    assert list(failures(suite)) == [MUTANTS[mutant]]


def test_every_check_has_a_mutant() -> None:
    assert set(MUTANTS.values()) == set(checks(TestTable))


def test_claims_that_are_taken_back_are_not_checked() -> None:
    suite = type("Tested", (TrackerSuite,), {"target": Table, "stays_in_run_dir": False, "repeats": False})
    gone = set(checks(TestTable)) - set(checks(suite))
    assert gone == {
        "test_it_continues_in_the_directory_of_a_resumed_run",
        "test_it_writes_in_the_run_directory_only",
        "test_what_was_logged_is_there_at_the_end",
    }
