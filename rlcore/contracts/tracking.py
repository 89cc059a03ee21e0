"""Trackers, which get a run's metrics in addition to its files. A plugin offers one with the hook `rlcore_trackers`.

`track.to` names the trackers of a run. The run creates each from a `TrackContext`. It passes the configuration to
`start()`, the metrics of every step to `log()`, and samples as text to `log_samples()`, and calls `close()` at the end.
A separate thread makes all calls, one after another, so a slow tracker does not delay a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlcore.contracts.plugin_settings import settings_as
from rlcore.errors.checks.data import check_is, check_names, check_subclass

S = TypeVar("S")

Setting = bool | int | float | str
"""The value of a configuration key, as trackers get it."""


@dataclass(frozen=True)
class TrackedSample:
    """A sample as text, without secrets; long texts are truncated."""

    prompt: str
    """The last message of the prompt."""
    completion: str
    reward: float
    advantage: float | None
    """None if the sample is not trained on."""


@dataclass(frozen=True, eq=False)
class TrackContext:
    """The input of a tracker's constructor."""

    name: str
    """The name in `track.to`."""
    project: str
    """`track.project`."""
    run_name: str
    run_dir: Path
    """The directory for a tracker's files. A resumed run has the same one."""
    section: object = None
    """The settings section of the plugin that offers the tracker, or None; `settings` reads it as its class."""

    def settings(self, cls: type[S]) -> S:
        """The plugin's settings section; PluginError where it is not a `cls`."""
        return settings_as(f"tracker {self.name}", self.section, cls)


class Tracker(ABC):
    """Receives the numbers of a run.

    If the constructor or `start` raises, the run is refused before its first step. After that a tracker cannot end a
    run: if it raises, a warning names it, and only `close` is still called.

    The class is a thin shell, like a worker class: planning imports its module, so `start` imports heavy libraries. The
    constructor starts nothing and writes nothing.
    """

    def __init__(self, context: TrackContext) -> None:
        self.context = context

    @abstractmethod
    def start(self, configuration: Mapping[str, Setting]) -> None:
        """Begin, with the run's configuration by dotted key. Values from the environment stay `${oc.env:NAME}`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step. A step may have several calls, such as one with the metrics of its evaluation.

        Values may be NaN or infinite. A resumed run continues after its checkpoint, so steps may come a second time.
        """

    # Not abstract: a tracker of metrics ignores samples, and one without a connection closes nothing.
    def log_samples(self, step: int, samples: Sequence[TrackedSample]) -> None:
        """Record some samples of a step, at least one; does nothing by default.

        After an exception the tracker gets only metrics.
        """

    def close(self) -> None:
        """Flush, and release files and connections. Called once, unless `start` has failed."""


@dataclass(frozen=True)
class TrackerOffer:
    """An offer of a tracker; `track.to` names it."""

    name: str
    cls: type[Tracker]
    """Checked against `Tracker` when planning; created as `cls(context)`."""
    package: str = ""
    """A required package. Without it, the run is refused with the command that installs it. Empty: none."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_subclass(self, "cls", Tracker)
        check_is(self, "package", str)
