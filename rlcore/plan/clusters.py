"""Chooses the cluster that starts the run's workers, asks for its abilities, and refuses plans it cannot start."""

from collections.abc import Sequence

from rlcore.config import RunConfig
from rlcore.config.providers import Offer
from rlcore.contracts.clusters import Cluster, ClusterAbilities, ClusterOffer, PoolPlan, ProcessUse, WorkerPlan
from rlcore.errors import CALLED, PlanError, PluginError, boundary, shown
from rlcore.errors.checks.data import listed
from rlcore.errors.checks.interfaces import breaches, refuses
from rlcore.plan.components import only, section_of
from rlcore.plan.planner_input import Offers
from rlcore.plan.run_plan import ClusterPlan
from rlcore.plan.time_limit import limited


def plan_cluster(config: RunConfig, offers: Offers) -> ClusterPlan:
    """The cluster that `cluster.backend` names.

    ConfigError for a name that is not offered, PluginError for one that is offered twice, for a class that is not a
    cluster, and for `abilities` that fail.
    """
    name = config.cluster.backend
    offer = only("cluster.backend", name, [(cluster.value.name, cluster) for cluster in offers.clusters()])
    check_cluster_class(offer)
    section = section_of(config, offers, offer.provider)
    who = f"{offer.provider}: abilities() of cluster '{name}'"
    with boundary(who, PluginError, CALLED), limited(who):
        abilities = offer.value.abilities(config, section)
    if not isinstance(abilities, ClusterAbilities):
        raise PluginError(f"{who}: returned {shown(abilities)}; needs ClusterAbilities")
    return ClusterPlan(offer.value, str(offer.provider), section, abilities)


def check_cluster_class(offer: Offer[ClusterOffer]) -> None:
    """PluginError unless the class does what `Cluster` says, and is made of a context alone."""
    cls = offer.value.cls
    what = f"{cls.__module__}.{cls.__qualname__}"
    with boundary(f"{offer.provider}: looking at {what}", PluginError, CALLED):
        found = list(breaches(cls, Cluster))
        if not found and (problem := refuses(cls, ["context"])):
            found.append(f"__init__() {problem}")
    if found:
        raise PluginError(f"{offer.provider}: offers {what} as cluster '{offer.value.name}', but {'; '.join(found)}")


def check_startable(
    config: RunConfig, cluster: ClusterPlan, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]
) -> None:
    """PlanError when the cluster cannot start the plan, PluginError when it cannot even say so."""
    key = f"cluster.backend={cluster.offer.name}"
    for plan in workers:
        if plan.request.ranks > 1 and cluster.abilities.processes is ProcessUse.NONE:
            raise PlanError(
                f"{key}: role '{plan.request.role.name}' of {plan.asked_by} has {plan.request.ranks} ranks, each a "
                "process, and this cluster starts threads only; needs one rank, or another cluster.backend"
            )
    who = f"{cluster.provided_by}: problems() of cluster '{cluster.offer.name}'"
    with boundary(who, PluginError, CALLED), limited(who):
        found = cluster.offer.problems(config, cluster.section, pools, workers)
    problems = listed(found, str, who)
    if problems:
        raise PlanError(f"{key}: {'; '.join(problems)}")
