"""Chooses the cluster that starts the run's workers, reads its abilities, and rejects plans that it cannot start."""

from collections.abc import Sequence

from rlcore.config import RunConfig
from rlcore.contracts.clusters import Cluster, ClusterAbilities, PoolPlan, ProcessUse, WorkerPlan
from rlcore.errors import CALLED, PlanError, PluginError, boundary, shown
from rlcore.errors.checks.data import listed
from rlcore.plan.components import check_context_class, only, section_of
from rlcore.plan.planner_input import Offers
from rlcore.plan.run_plan import ClusterPlan
from rlcore.plan.time_limit import limited


def plan_cluster(config: RunConfig, offers: Offers) -> ClusterPlan:
    """The cluster that `cluster.backend` names.

    ConfigError for a name that is not offered, PluginError for one that is offered twice, for a class that is not a
    cluster, and for `abilities` that fail.
    """
    name = config.cluster.backend
    offered = [(cluster.value.name, cluster) for cluster in offers.clusters()]
    offer = only("cluster.backend", name, "cluster", offered, offers)
    check_context_class(offer, Cluster, "cluster")
    section = section_of(config, offers, offer.provider)
    who = f"{offer.provider}: abilities() of cluster '{name}'"
    with boundary(who, PluginError, CALLED), limited(who):
        abilities = offer.value.abilities(config, section)
    if not isinstance(abilities, ClusterAbilities):
        raise PluginError(f"{who}: returned {shown(abilities)}; needs ClusterAbilities")
    return ClusterPlan(offer.value, str(offer.provider), section, abilities)


def check_startable(
    config: RunConfig, cluster: ClusterPlan, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]
) -> None:
    """PlanError when the cluster cannot start the plan, PluginError when its check fails."""
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
