"""The suite of trackers."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from rlcore.contracts.tracking import Setting, TrackContext, TrackedSample, Tracker, TrackerOffer
from rlcore.errors import PluginError, RlcoreError, boundary
from rlcore.errors.checks.interfaces import breaches, refuses
from rlcore.plugins.enabled import name_of
from rlcore.testing.leaks import Leaked, leaks
from rlcore.testing.rewards import WAIT_S
from rlcore.testing.suites.harness import Breach, Suite, extra, scratch

CONFIGURATION: Mapping[str, Setting] = {
    "actor.lr": 1e-5,
    "train.max_steps": 2,
    "train.shuffle": True,
    "rollout.stop": "[]",
    "model.path": "",
    "plugins.mine.key": "${oc.env:SECRET}",
    "data.system_prompt": "Say: é\n" * 500,
}
ODD_NAMES = ("eval/two words/pass@8", "reward/функция", "policy/kl")
SAMPLES = (
    TrackedSample("1 + 1 =", "2", 1.0, 0.5),
    TrackedSample("", "", 0.0, None),
    TrackedSample("a|b\n<script>", "x" * 4000 + " ...", -1.5, -0.5),
    TrackedSample("é 🙂 \x1b[31m \x00", "</td>\r\n", 0.25, math.nan),
)

Records = Mapping[int, Mapping[str, float]]


class TrackerSuite(Suite):
    """A tracker; `target` is its `TrackerOffer`, or the class."""

    reads: Callable[[Path], Records] | None = None
    """A function (a staticmethod) that reads the metrics by step from the run directory, after `close`."""
    stays_in_run_dir: bool = True
    """Claim: the tracker writes only below the run directory. Set it to False if a setting names another place."""
    repeats: bool = True
    """Claim: a tracker continues in the run directory of an earlier one. False: it needs a fresh directory."""

    @contextmanager
    def tracker(self, run_dir: Path, started: bool = True) -> Iterator[Tracker]:
        """The tracker of a run in that directory; it is closed afterwards."""
        cls, config = self.cls, self.config()
        name = name_of(self.plugins[0]) if self.plugins else "tracker"
        tracker = cls(TrackContext(name, config.track.project, run_dir.name, run_dir, self.section(config)))
        if started:
            tracker.start(dict(CONFIGURATION))
        try:
            yield tracker
        finally:
            if started:
                tracker.close()

    @property
    def cls(self) -> type[Tracker]:
        """The class of the tracker."""
        found = self.load()
        cls: type[Tracker] = found.cls if isinstance(found, TrackerOffer) else found
        return cls

    def use(self, work: Callable[[Path], None]) -> None:
        """Run a check in a thread, as a run does, in a run directory whose parent is otherwise empty."""
        problems: list[BaseException] = []

        def main() -> None:
            try:
                with boundary(self.who, PluginError):
                    work(directory / "run")
            except RlcoreError as error:
                problems.append(error.__cause__ if isinstance(error.__cause__, Breach) else error)

        with scratch() as directory, chdir(directory), self._clean():
            (directory / "run").mkdir()
            thread = threading.Thread(target=main, name="trackers", daemon=True)
            thread.start()
            thread.join(WAIT_S)
            self.need(not thread.is_alive(), f"took longer than {WAIT_S:g} s")
            if problems:
                raise problems[0]

    @contextmanager
    def _clean(self) -> Iterator[None]:
        try:
            with leaks():
                yield
        except Leaked as leaked:
            raise Breach(f"{self.who}: {leaked}") from leaked

    def test_it_is_a_tracker_of_a_context_alone(self) -> None:
        """It is a subclass with the methods of `Tracker`, built as `cls(context)`."""
        found = [*breaches(self.cls, Tracker)] or [refuses(self.cls, ["context"])]
        self.need(not any(found), "; ".join(found))

    def test_the_constructor_starts_nothing_and_writes_nothing(self) -> None:
        """A run builds it before it is sure to start."""

        def work(run_dir: Path) -> None:
            before = threading.active_count()
            with self.tracker(run_dir, started=False):
                self.need(threading.active_count() <= before, "its constructor starts a thread; needs `start`")
            left = sorted(str(path.relative_to(run_dir.parent)) for path in run_dir.parent.rglob("*"))
            self.need(left == ["run"], f"its constructor writes {', '.join(left)}; needs `start`")

        self.use(work)

    def test_it_takes_a_run_from_its_start_to_its_end(self) -> None:
        """The run has a configuration, metrics of several steps, two calls for one step, and samples. Nothing keeps
        running."""

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir) as tracker:
                for step in (1, 2, 3):
                    tracker.log(step, {"reward/mean": 0.25 * step, "actor/loss": -1.5})
                    tracker.log_samples(step, SAMPLES[:1])
                tracker.log(3, {"eval/heldout/mean": 0.5})

        self.use(work)

    def test_it_takes_a_run_that_ends_before_its_first_step(self) -> None:
        """`close` follows `start` immediately."""

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir):
                """Nothing is logged."""

        self.use(work)

    def test_it_takes_numbers_that_are_not_finite(self) -> None:
        """NaN and infinities are legal in metrics."""

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir) as tracker:
                tracker.log(1, {"actor/loss": math.nan, "actor/grad_norm": math.inf, "policy/kl": -math.inf})

        self.use(work)

    def test_it_takes_every_name_of_a_metric(self) -> None:
        """Names have slashes. Those of users' sources and rewards may have any text."""

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir) as tracker:
                tracker.log(1, {name: float(index) for index, name in enumerate(ODD_NAMES)})
                tracker.log(2, {"one/new": 1.0})

        self.use(work)

    def test_it_takes_every_text_of_a_sample(self) -> None:
        """Texts are empty, long and in any alphabet, with control characters. A sample may have no advantage."""

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir) as tracker:
                for sample in SAMPLES:
                    tracker.log_samples(1, [sample])
                tracker.log_samples(2, SAMPLES)

        self.use(work)

    @extra("repeats")
    def test_it_continues_in_the_directory_of_a_resumed_run(self) -> None:
        """A second tracker gets the same directory, and one step a second time."""

        def work(run_dir: Path) -> None:
            for steps in ((1, 2), (2, 3)):
                with self.tracker(run_dir) as tracker:
                    for step in steps:
                        tracker.log(step, {"reward/mean": float(step)})
            if read := type(self).reads:
                found = read(run_dir)
                self.need(set(found) == {1, 2, 3}, f"has steps {sorted(found)} of a resumed run; needs 1, 2 and 3")

        self.use(work)

    @extra("stays_in_run_dir")
    def test_it_writes_in_the_run_directory_only(self) -> None:
        """It writes nothing in the working directory of the command."""

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir) as tracker:
                tracker.log(1, {"reward/mean": 0.25})
                tracker.log_samples(1, SAMPLES[:1])
            left = sorted(path.name for path in run_dir.parent.iterdir() if path != run_dir)
            self.need(not left, f"writes {', '.join(left)} outside of the run directory; needs context.run_dir")

        self.use(work)

    @extra("reads")
    def test_what_was_logged_is_there_at_the_end(self) -> None:
        """`reads` returns every value by its step and name."""
        logged = {1: {"reward/mean": 0.25, "actor/loss": -1.5}, 2: {"reward/mean": 0.5}}

        def work(run_dir: Path) -> None:
            with self.tracker(run_dir) as tracker:
                for step, metrics in logged.items():
                    tracker.log(step, dict(metrics))
            read: Any = type(self).reads
            found = {step: dict(metrics) for step, metrics in read(run_dir).items()}
            self.need(found == logged, f"has {found} after close(); needs {logged}")

        self.use(work)
