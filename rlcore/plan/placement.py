"""Where each rank goes on a cluster that places pools by bundles, and what such a cluster cannot place."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from rlcore.checks.interfaces import defines
from rlcore.config import RunConfig
from rlcore.errors import PlanError
from rlcore.plan.run_plan import PoolPlan, WeightsKind, WorkerPlan


class BundlePlace(NamedTuple):
    """Where a rank goes."""

    plan: WorkerPlan
    """Its role."""
    pool: str
    """A leaf pool."""
    spot: int
    """Ranks of different roles at one spot of a pool share its devices."""
    bundle: int
    """What is reserved on one node: of a pool that says how many nodes a node's part of it, else the spot."""


def places_of(pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> dict[str, list[BundlePlace]]:
    """The place of each rank, by role that has processes of its own.

    The ranks of a role are laid out evenly over the nodes of its pool, in order. A union's ranks go through the spots
    of its members in order.
    """
    by_name = {pool.name: pool for pool in pools}
    members = {member for pool in pools for member in pool.colocates}
    spots_a_node = {
        pool.name: ceil(_num_spots(pool, workers, pool.name in members) / pool.nodes)
        for pool in pools
        if not pool.colocates
    }
    places: dict[str, list[BundlePlace]] = {}
    for plan in _own_processes(workers):
        pool = by_name[plan.request.pool]
        num = plan.request.replicas * plan.request.ranks
        spots = _spots(pool, num, by_name, spots_a_node)
        places[plan.request.role.name] = [
            BundlePlace(plan, leaf, spot, spot // spots_a_node[leaf] if by_name[leaf].nodes > 1 else spot)
            for leaf, spot in (spots[index % len(spots)] for index in range(num))
        ]
    return places


def _spots(
    pool: PoolPlan, num: int, by_name: Mapping[str, PoolPlan], spots_a_node: Mapping[str, int]
) -> list[tuple[str, int]]:
    """(leaf pool, spot) of each of a role's `num` ranks; of a union all that there are."""
    if pool.colocates:
        return [(leaf, spot) for leaf in pool.colocates for spot in range(spots_a_node[leaf] * by_name[leaf].nodes)]
    on_a_node = ceil(num / pool.nodes)
    return [(pool.name, rank // on_a_node * spots_a_node[pool.name] + rank % on_a_node) for rank in range(num)]


def meeting_in(places: dict[str, list[BundlePlace]]) -> dict[tuple[str, int], list[WorkerPlan]]:
    """Who shares each spot, by leaf pool and spot."""
    meeting: dict[tuple[str, int], list[WorkerPlan]] = {}
    for ranks in places.values():
        for place in ranks:
            meeting.setdefault((place.pool, place.spot), []).append(place.plan)
    return meeting


def check_places(config: RunConfig, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> None:
    """PlanError when Ray cannot place the plan: of several devices in one process it gives away no parts."""
    if config.cluster.backend != "ray":
        return
    for (pool, _), present in meeting_in(places_of(pools, workers)).items():
        using = [plan for plan in present if plan.request.gpus]
        for plan in using:
            others = [each.request.role.name for each in using if each is not plan]
            if plan.request.gpus > 1 and others:
                raise PlanError(
                    f"cluster.backend=ray: role '{plan.request.role.name}' has {plan.request.gpus:g} GPUs in one "
                    f"process, and Ray cannot share them with '{others[0]}' in pool '{pool}'; give it one (its class "
                    f"is {plan.cls.__qualname__} of {plan.provided_by}), or a pool without the other, or set "
                    "cluster.backend=local"
                )


def plan_weights(config: RunConfig, workers: Sequence[WorkerPlan]) -> WeightsKind:
    """How the actor hands its weights to the rollout; '' when the rollout samples from the actor's own.

    PlanError when they are to travel in a way that the rollout cannot take.
    """
    rollout = next(plan for plan in workers if plan.request.role.name == "rollout")
    by, inside = config.rollout.weight_sync, rollout.request.embedded_in
    who = f"{rollout.cls.__qualname__} of {rollout.provided_by}"
    if inside is not None:
        if by == "tcp":
            raise PlanError(
                f"rollout.weight_sync=tcp: the rollout is served inside '{inside.name}' and has no copy of the "
                "weights; leave it out, or choose a rollout.backend that has one"
            )
        return ""
    actor = next(plan for plan in workers if plan.request.role.name == "actor")
    for plan, method in ((actor, "weights"), (rollout, "load_weights")):
        if not defines(plan.cls, plan.request.role.interface, method):
            raise PlanError(
                f"rollout.backend={rollout.request.backend}: the rollout has a copy of the weights, and "
                f"{plan.cls.__qualname__} of {plan.provided_by} defines no {method}(); needs one, or a rollout that is "
                "served inside the actor"
            )
    if by not in rollout.weight_sync:
        raise PlanError(
            f"rollout.weight_sync={by}: {who} does not take weights that way (its offer's weight_sync); choose from: "
            f"{', '.join(sorted(rollout.weight_sync)) or 'another rollout.backend'}"
        )
    if rollout.request.takes_adapter and by == "tcp":
        raise PlanError(
            f"rollout.weight_sync=tcp sends whole weights, and {who} takes an adapter alone, which is handed over as "
            "files; choose rollout.weight_sync=disk, or another rollout.backend"
        )
    if rollout.request.takes_adapter:
        return "adapter"
    return "tcp" if by == "tcp" else "directory"


def _own_processes(workers: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    return [plan for plan in workers if plan.request.embedded_in is None]


def _num_spots(pool: PoolPlan, workers: Sequence[WorkerPlan], in_union: bool) -> int:
    """As many as the largest role of the pool has ranks; a union also uses devices that nobody else does."""
    ranks = [
        plan.request.replicas * plan.request.ranks for plan in _own_processes(workers) if plan.request.pool == pool.name
    ]
    return max([*ranks, 1, pool.gpus_per_node * pool.nodes if in_union else 0])
