"""Places serving roles on the actor's devices or on separate ones; `cluster.layout` is the one setting.

Pools that the user declares (`cluster.pools`, `rollout.pool`, `cluster.train_pool`) stay as they are: `planned` follows
them, and a different layout is an error.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from rlcore.config import RunConfig
from rlcore.contracts.clusters import ClusterAbilities, PoolPlan, WorkerPlan
from rlcore.contracts.requests import WorkerRequest
from rlcore.errors import PlanError
from rlcore.plan.colocation import ACTOR, ROLLOUT, actor_pool, can_sleep
from rlcore.plan.device_memory import serves
from rlcore.plan.machine_facts import Facts
from rlcore.plan.planner_input import join_names, more_nodes
from rlcore.plan.run_plan import LayoutPlan


def lay_out(
    config: RunConfig, workers: Sequence[WorkerPlan], facts: Facts, abilities: ClusterAbilities
) -> tuple[tuple[WorkerPlan, ...], str]:
    """The workers, with those that share the actor's devices in its pool, and the reason for the layout.

    `planned`: separate pools if the machine has devices for all of them, else the actor's pool if every serving role
    can sleep. The numbers of replicas and ranks are never changed. The reason is empty if there is nothing to decide.
    """
    layout, serving = config.cluster.layout, _serving(workers)
    if not serving:
        return tuple(workers), ""
    stated = _stated(config)
    if layout == "split":
        return tuple(workers), "as cluster.layout says"
    if layout == "colocated":
        return _moved(config, workers, serving), "as cluster.layout says"
    if stated:
        return tuple(workers), f"as {join_names(stated)} {'say' if len(stated) > 1 else 'says'}"
    if abilities.elsewhere:
        return tuple(workers), "the devices of other machines are not known yet"
    needed, moved = _num_devices(workers), _moved(config, workers, serving)
    reason = f"with separate pools the run needs {needed} GPUs, the machine has {facts.gpus}"
    if needed > facts.gpus >= _num_devices(moved) and all(can_sleep(plan) for plan in serving):
        return moved, reason
    there = sorted(plan.request.role.name for plan in serving if plan.request.pool == config.cluster.train_pool)
    return tuple(workers), f"as the pool of {join_names(there)} says" if there else reason


def plan_layout(config: RunConfig, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan], reason: str) -> LayoutPlan:
    """The layout that results from the pools; PlanError if `cluster.layout` names another one."""
    layout, serving = config.cluster.layout, _serving(workers)
    if not serving:
        return LayoutPlan("", (), reason)
    pool = actor_pool(pools, workers)
    shared = {pool.name, *pool.colocates}
    inside = [plan for plan in serving if plan.request.pool in shared]
    outside = [plan for plan in serving if plan.request.pool not in shared]
    if layout == "split" and inside:
        where = f"union '{pool.name}'" if pool.colocates else f"pool '{pool.name}'"
        raise PlanError(
            f"cluster.layout=split: {_who(inside[0])} is in pool '{inside[0].request.pool}', and the actor trains on "
            f"its devices ({where} of {pool.provided_by}); give the role another pool, or set cluster.layout=colocated"
        )
    if layout == "colocated" and outside:
        name = outside[0].request.pool
        provider = next(plan.provided_by for plan in pools if plan.name == name)
        raise PlanError(
            f"cluster.layout=colocated: {_who(outside[0])} is in pool '{name}' of {provider}, not on the devices that "
            f"the actor trains on (pool '{pool.name}'); leave that pool out, make '{pool.name}' a union with it, or "
            "set cluster.layout=split"
        )
    roles = tuple(sorted(plan.request.role.name for plan in inside))
    return LayoutPlan("colocated" if inside else "split", roles, reason)


def check_one_node(workers: Sequence[WorkerPlan], pools: Sequence[PoolPlan], facts: Facts) -> None:
    """PlanError for a rank whose devices would be on several nodes.

    Ranks get neighbouring devices in order. Where the devices of a node are known, and where other roles share those of
    a pool of several nodes, the devices of a rank divide them.
    """
    by_name = {pool.name: pool for pool in pools}
    for plan in workers:
        request, pool = plan.request, by_name[plan.request.pool]
        shared = any(other.request.gpus and other.request.pool == pool.name for other in workers if other is not plan)
        on_node = (pool.gpus_per_node if shared else 0) if pool.nodes > 1 else facts.gpus_per_node
        if request.gpus > 1 and on_node and on_node % int(request.gpus):
            raise PlanError(
                f"{_who(plan)}: a rank has {request.gpus:g} devices, and a node {on_node}; a rank is on one node: "
                f"needs a number that divides {on_node}, and more replicas or ranks"
                f"{more_nodes(request)}; its class is {plan.offered_by}"
            )


def layout_notes(config: RunConfig, layout: LayoutPlan, sleeping: Sequence[str]) -> list[str]:
    """Notes on a layout that decides nothing, and on roles that share the actor's devices awake."""
    if not layout.name:
        unused = f"cluster.layout={config.cluster.layout} is unused: no role that serves has a GPU"
        return [unused] if config.cluster.layout != "planned" else []
    awake = sorted(set(layout.roles) - set(sleeping))
    if not awake:
        return []
    return [f"on the actor's devices, awake while it trains: {', '.join(awake)}; the plan has room for both"]


def _serving(workers: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    """The roles that serve on devices; none if the actor has no devices."""
    if not any(plan.request.gpus for plan in workers if plan.request.role.name == ACTOR):
        return []
    return [plan for plan in workers if plan.request.gpus and serves(plan)]


def _stated(config: RunConfig) -> list[str]:
    """The settings by which the user assigned devices to roles."""
    cluster = config.cluster
    is_set = {
        "rollout.pool": bool(config.rollout.pool),
        "cluster.pools": bool(cluster.pools),
        "cluster.train_pool": cluster.train_pool != WorkerRequest.pool,
    }
    return [key for key, value in is_set.items() if value]


def _moved(config: RunConfig, workers: Sequence[WorkerPlan], serving: Sequence[WorkerPlan]) -> tuple[WorkerPlan, ...]:
    """The workers, with serving roles whose pool the user did not choose in the actor's pool."""
    train_pool, declared = config.cluster.train_pool, config.cluster.pools
    if train_pool != WorkerRequest.pool and train_pool not in declared:
        return tuple(workers)  # a plugin's, perhaps a union
    if train_pool in declared and declared[train_pool].colocates:
        return tuple(workers)
    names = {
        plan.request.role.name
        for plan in serving
        if plan.request.pool not in declared and not (plan.request.role.name == ROLLOUT and config.rollout.pool)
    }
    return tuple(
        replace(plan, request=replace(plan.request, pool=train_pool)) if plan.request.role.name in names else plan
        for plan in workers
    )


def _num_devices(workers: Sequence[WorkerPlan]) -> int:
    """Total devices of all pools, each as large as its largest role."""
    sizes: dict[str, int] = {}
    for request in (plan.request for plan in workers if plan.request.embedded_in is None):
        size = ceil(request.replicas * request.ranks * request.gpus)
        sizes[request.pool] = max(size, sizes.get(request.pool, 0))
    return sum(sizes.values())


def _who(plan: WorkerPlan) -> str:
    return f"role '{plan.request.role.name}' of {plan.asked_by}"
