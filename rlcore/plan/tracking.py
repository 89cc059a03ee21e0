"""Chooses the trackers that `track.to` names."""

from rlcore.config import RunConfig
from rlcore.contracts.tracking import Tracker
from rlcore.plan.components import check_context_class, only, section_of
from rlcore.plan.planner_input import Offers
from rlcore.plan.run_plan import TrackerPlan


def plan_trackers(config: RunConfig, offers: Offers) -> tuple[TrackerPlan, ...]:
    """The trackers of the run, in the order of `track.to`; repeated names count once.

    ConfigError for a name that is not offered, PluginError for one that is offered twice or whose class is not a
    tracker.
    """
    offered = [(offer.value.name, offer) for offer in offers.trackers()]
    chosen = [only("track.to", name, "tracker", offered, offers) for name in dict.fromkeys(config.track.to)]
    for offer in chosen:
        check_context_class(offer, Tracker, "tracker")
    return tuple(
        TrackerPlan(offer.value, str(offer.provider), section_of(config, offers, offer.provider)) for offer in chosen
    )
