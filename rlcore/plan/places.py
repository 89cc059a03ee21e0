"""Where each rank goes on a cluster that places pools by bundles, and what such a cluster cannot place."""

from collections.abc import Sequence

from rlcore.config import RunConfig
from rlcore.errors import PlanError
from rlcore.plan.decided import PoolPlan, WorkerPlan

Place = tuple[WorkerPlan, str, int]
"""A rank's role, its leaf pool, and the bundle there."""


def places_of(pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]) -> dict[str, list[Place]]:
    """The place of each rank, by role that has processes of its own.

    A union's ranks go through the bundles of its members in order.
    """
    by_name = {pool.name: pool for pool in pools}
    members = {member for pool in pools for member in pool.union_of}
    sizes = {pool.name: _num_bundles(pool, workers, pool.name in members) for pool in pools if not pool.union_of}
    places: dict[str, list[Place]] = {}
    for plan in _own_processes(workers):
        pool = by_name[plan.request.pool]
        spots = [(leaf, bundle) for leaf in (pool.union_of or (pool.name,)) for bundle in range(sizes[leaf])]
        num = plan.request.replicas * plan.request.ranks
        places[plan.request.role.name] = [(plan, *spots[index % len(spots)]) for index in range(num)]
    return places


def meeting_in(places: dict[str, list[Place]]) -> dict[tuple[str, int], list[WorkerPlan]]:
    """Who shares each bundle."""
    meeting: dict[tuple[str, int], list[WorkerPlan]] = {}
    for ranks in places.values():
        for plan, leaf, bundle in ranks:
            meeting.setdefault((leaf, bundle), []).append(plan)
    return meeting


def check_places(
    config: RunConfig, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan], sleepers: Sequence[str]
) -> None:
    """PlanError when Ray cannot place the plan: of several devices in one process it gives away no parts."""
    if config.cluster.backend != "ray" or not sleepers:
        return
    for present in meeting_in(places_of(pools, workers)).values():
        trainers = [plan for plan in present if plan.request.gpus and plan.request.pool == config.cluster.train_pool]
        for plan in present:
            request = plan.request
            if trainers and request.gpus > 1:
                raise PlanError(
                    f"cluster.backend=ray: role '{request.role.name}' has {request.gpus:g} GPUs in one process, and "
                    f"Ray cannot share them with '{trainers[0].request.role.name}' of pool "
                    f"'{config.cluster.train_pool}'; give it one (rollout.vllm.tensor_parallel=1), or a pool outside "
                    "of the union, or set cluster.backend=local"
                )


def check_link(config: RunConfig, workers: Sequence[WorkerPlan]) -> None:
    """PlanError when weights are to travel over a link, and cannot."""
    if config.rollout.weights != "link":
        return
    rollout = next(plan.request for plan in workers if plan.request.role.name == "rollout")
    if rollout.inside is not None:
        raise PlanError(
            f"rollout.weights=link: the rollout is served inside '{rollout.inside.name}' and has no copy of the "
            "weights; leave it out, or choose a rollout.backend that has one, such as vllm"
        )
    if config.actor.lora.enabled and config.rollout.vllm.lora == "adapter":
        raise PlanError(
            "rollout.weights=link sends whole weights, and rollout.vllm.lora=adapter wants an adapter, which is "
            "handed over as files; choose weights=files, or lora=merged"
        )


def _own_processes(workers: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    return [plan for plan in workers if plan.request.inside is None]


def _num_bundles(pool: PoolPlan, workers: Sequence[WorkerPlan], in_union: bool) -> int:
    """As many as the largest role of the pool has ranks; a union also uses devices that nobody else does."""
    ranks = [
        plan.request.replicas * plan.request.ranks for plan in _own_processes(workers) if plan.request.pool == pool.name
    ]
    return max([*ranks, 1, pool.gpus_per_node * pool.nodes if in_union else 0])
