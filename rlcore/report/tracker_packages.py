"""Checks that the packages are installed that a plan's trackers need."""

from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.report import open_telemetry, trackers


def require_trackers(plan: RunPlan) -> None:
    """ConfigError with the install line if a package is missing that a tracker or the export of spans needs."""
    trackers.require_installed(plan.trackers)
    if plan.config.track.open_telemetry:
        open_telemetry.require_installed()


def missing_trackers(plan: RunPlan) -> str:
    """The note of a plan on such a package; empty if everything is installed."""
    try:
        require_trackers(plan)
    except ConfigError as missing:
        return str(missing)
    return ""
