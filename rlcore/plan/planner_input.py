"""Collects the planner's input: every offer of the core and of the enabled plugins."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from rlcore.config import RunConfig
from rlcore.config.providers import ConfigSection, Offer, Provider
from rlcore.contracts.clusters import ClusterOffer
from rlcore.contracts.components import Component
from rlcore.contracts.offers import Algorithm, PoolSpec, RewardFunction, WorkerClass
from rlcore.contracts.prompt_orders import PromptOrderOffer
from rlcore.contracts.requests import WorkerRequest
from rlcore.contracts.tracking import TrackerOffer

T = TypeVar("T")

CORE = "core"
"""The plugin name under which the core makes its own offers."""


class Offers(Protocol):
    """The offers of one run, in any order; `rlcore.plugins.Hooks` is the implementation that reads plugins."""

    def config_sections(self) -> tuple[Offer[ConfigSection], ...]: ...

    def reward_functions(self) -> tuple[Offer[RewardFunction], ...]: ...

    def reward_managers(self) -> tuple[Offer[Component[Any]], ...]: ...

    def critic_engines(self) -> tuple[Offer[Component[Any]], ...]: ...

    def agent_loops(self) -> tuple[Offer[Component[Any]], ...]: ...

    def algorithms(self) -> tuple[Offer[Algorithm], ...]: ...

    def resource_pools(self, config: RunConfig, requests: tuple[WorkerRequest, ...]) -> tuple[Offer[PoolSpec], ...]: ...

    def worker_classes(self) -> tuple[Offer[WorkerClass], ...]: ...

    def clusters(self) -> tuple[Offer[ClusterOffer], ...]: ...

    def trackers(self) -> tuple[Offer[TrackerOffer], ...]: ...

    def prompt_orders(self) -> tuple[Offer[PromptOrderOffer], ...]: ...

    def entry_point_rewards(self) -> tuple[Offer[RewardFunction], ...]:
        """Entry points of the group `rlcore.rewards`, without loading them."""
        ...

    def core_requests(self, config: RunConfig, references: Mapping[str, str]) -> Sequence[WorkerRequest]:
        """The core's requests for workers; `references` are the functions of `algo`, by purpose."""
        ...

    def not_enabled(self, offer: str) -> tuple[Provider, ...]:
        """Installed plugins that are not enabled and may have an offer, such as 'reward function mine'."""
        ...

    def providers(self) -> tuple[Provider, ...]:
        """The enabled plugins, without the core."""
        ...


def by_provider(offer: Offer[Any]) -> tuple[str, str]:
    """A sort key that makes the order of plugins irrelevant."""
    return (offer.provider.plugin, offer.provider.distribution)


def join_names(parties: Sequence[str]) -> str:
    """Parties of an error, sorted: 'a and b'."""
    return " and ".join(sorted(parties))


def more_nodes(request: WorkerRequest) -> str:
    """The setting that spreads a replica over nodes, as a part of advice; '' for a role that has none."""
    return f", or {request.nodes_key} above 1" if request.nodes_key else ""
