"""Chooses the order of prompts that `data.order` names."""

from rlcore.config import RunConfig
from rlcore.contracts.prompt_orders import PromptOrder
from rlcore.plan.components import check_context_class, only, section_of
from rlcore.plan.planner_input import Offers
from rlcore.plan.run_plan import PromptOrderPlan


def plan_prompt_order(config: RunConfig, offers: Offers) -> PromptOrderPlan:
    """The order of the run's prompts.

    ConfigError for a name that is not offered, PluginError for one that is offered twice or whose class is not an
    order.
    """
    offered = [(offer.value.name, offer) for offer in offers.prompt_orders()]
    offer = only("data.order", config.data.order, "prompt order", offered, offers)
    check_context_class(offer, PromptOrder, "prompt order")
    return PromptOrderPlan(offer.value, str(offer.provider), section_of(config, offers, offer.provider))
