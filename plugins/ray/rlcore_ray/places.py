"""Placement of ranks: spots of pools become bundles of Ray's placement groups, and impossible pools are refused."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from rlcore import RunConfig
from rlcore.contracts.clusters import PoolPlan, WorkerPlan


class BundlePlace(NamedTuple):
    """The spot and bundle of one rank."""

    plan: WorkerPlan
    """Its role."""
    pool: str
    """A leaf pool."""
    spot: int
    """The first one; ranks of different roles at the same spot of a pool share its devices."""
    bundle: int
    """The reservation on one node: a node's part of the pool if it has a number of nodes, else all spots of the
    widest rank."""
    num_spots: int = 1
    """Above 1 for a rank of several devices that it shares with as many ranks of another role."""

    @property
    def spots(self) -> range:
        """All spots of the rank."""
        return range(self.spot, self.spot + self.num_spots)


def places_of(pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> dict[str, list[BundlePlace]]:
    """The place of each rank, by role with separate processes.

    The ranks of a role are laid out evenly over the nodes of its pool, in order. A union's ranks take the spots of its
    members in order.
    """
    by_name = {pool.name: pool for pool in pools}
    members = {member for pool in pools for member in pool.colocates}
    widths = {pool.name: _width(pool, pools, workers) for pool in pools}
    spots_a_node = {
        pool.name: ceil(_num_spots(pool, workers, pool.name in members, widths[pool.name]) / pool.nodes)
        for pool in pools
        if not pool.colocates
    }
    places: dict[str, list[BundlePlace]] = {}
    for plan in _own_processes(workers):
        pool = by_name[plan.request.pool]
        num, wide = plan.request.replicas * plan.request.ranks, spots_of(plan, widths[pool.name])
        spots = _spots(pool, num * wide, by_name, spots_a_node)
        places[plan.request.role.name] = [
            BundlePlace(
                plan, leaf, spot, spot // (spots_a_node[leaf] if by_name[leaf].nodes > 1 else widths[leaf]), wide
            )
            for leaf, spot in (spots[index * wide % len(spots)] for index in range(num))
        ]
    return places


def spots_of(plan: WorkerPlan, width: int) -> int:
    """The spots of a rank in a pool whose widest rank shares `width` devices."""
    return int(plan.request.gpus) if width > 1 and plan.request.gpus > 1 else 1


def _width(pool: PoolPlan, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> int:
    """Devices of the widest rank of a pool that shares them with ranks of single devices; 1: there are no such ranks.

    Their spots are single devices, and those of the widest rank are one bundle.
    """
    unions = {other.name for other in pools if pool.name in other.colocates}
    here = [plan.request.gpus for plan in _own_processes(workers) if plan.request.pool in {pool.name, *unions}]
    return max([1, *(int(gpus) for gpus in here if gpus > 1)]) if any(0 < gpus <= 1 for gpus in here) else 1


def _spots(
    pool: PoolPlan, num: int, by_name: Mapping[str, PoolPlan], spots_a_node: Mapping[str, int]
) -> list[tuple[str, int]]:
    """(leaf pool, spot) of each of a role's `num` ranks; for a union, all spots."""
    if pool.colocates:
        return [(leaf, spot) for leaf in pool.colocates for spot in range(spots_a_node[leaf] * by_name[leaf].nodes)]
    on_a_node = ceil(num / pool.nodes)
    return [(pool.name, rank // on_a_node * spots_a_node[pool.name] + rank % on_a_node) for rank in range(num)]


def meeting_in(places: dict[str, list[BundlePlace]]) -> dict[tuple[str, int], list[WorkerPlan]]:
    """The workers that share each spot, by leaf pool and spot."""
    meeting: dict[tuple[str, int], list[WorkerPlan]] = {}
    for ranks in places.values():
        for place in ranks:
            for spot in place.spots:
                meeting.setdefault((place.pool, spot), []).append(place.plan)
    return meeting


def _own_processes(workers: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    return [plan for plan in workers if plan.request.embedded_in is None]


def _num_spots(pool: PoolPlan, workers: Sequence[WorkerPlan], in_union: bool, width: int) -> int:
    """The ranks, or devices, of the pool's largest role; a union also uses devices that no other role uses."""
    ranks = [
        plan.request.replicas * plan.request.ranks * spots_of(plan, width)
        for plan in _own_processes(workers)
        if plan.request.pool == pool.name
    ]
    return max([*ranks, 1, pool.gpus_per_node * pool.nodes if in_union else 0])


def problems(
    config: RunConfig, section: Any, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]
) -> Sequence[str]:
    """Roles that Ray cannot place: a process with several devices shares them only with one rank per device that is
    there before it."""
    places, found = places_of(pools, workers), []
    meeting = meeting_in(places)
    for place in (place for ranks in places.values() for place in ranks if place.plan.request.gpus > 1):
        plan, pool = place.plan, place.pool
        present = [[other for other in meeting[pool, spot] if other.request.gpus] for spot in place.spots]
        others = [other.request.role.name for using in present for other in using if other is not plan]
        alone = all(len(using) == 2 and using[0] is not plan and using[0].request.gpus == 1 for using in present)
        if others and not alone:
            found.append(
                f"role '{plan.request.role.name}' has {plan.request.gpus:g} GPUs in one process, and Ray cannot "
                f"share them with '{others[0]}' in pool '{pool}'; give it one (its class is "
                f"{plan.cls.__qualname__} of {plan.provided_by}), or a pool without the other, or set "
                "cluster.backend=local"
            )
    return found[:1]
