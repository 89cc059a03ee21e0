"""Chooses the trackers that `track.to` names."""

from rlcore.config import RunConfig
from rlcore.config.providers import Offer
from rlcore.contracts.tracking import Tracker, TrackerOffer
from rlcore.errors import CALLED, PluginError, boundary
from rlcore.errors.checks.interfaces import breaches, refuses
from rlcore.plan.components import only, section_of
from rlcore.plan.planner_input import Offers
from rlcore.plan.run_plan import TrackerPlan


def plan_trackers(config: RunConfig, offers: Offers) -> tuple[TrackerPlan, ...]:
    """The trackers of the run, in the order of `track.to`; a name that stands there twice counts once.

    ConfigError for a name that is not offered, PluginError for one that is offered twice and for a class that is not a
    tracker.
    """
    offered = [(offer.value.name, offer) for offer in offers.trackers()]
    chosen = [only("track.to", name, offered) for name in dict.fromkeys(config.track.to)]
    for offer in chosen:
        check_tracker_class(offer)
    return tuple(
        TrackerPlan(offer.value, str(offer.provider), section_of(config, offers, offer.provider)) for offer in chosen
    )


def check_tracker_class(offer: Offer[TrackerOffer]) -> None:
    """PluginError unless the class does what `Tracker` says, and is made of a context alone."""
    cls = offer.value.cls
    what = f"{cls.__module__}.{cls.__qualname__}"
    with boundary(f"{offer.provider}: looking at {what}", PluginError, CALLED):
        found = list(breaches(cls, Tracker))
        if not found and (problem := refuses(cls, ["context"])):
            found.append(f"__init__() {problem}")
    if found:
        raise PluginError(f"{offer.provider}: offers {what} as tracker '{offer.value.name}', but {'; '.join(found)}")
