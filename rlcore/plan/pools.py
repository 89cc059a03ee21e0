"""Decides which pools exist, their sizes, and which roles share them and take turns on their devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil

from rlcore.config import RunConfig
from rlcore.contracts.clusters import ClusterAbilities, PoolPlan, WorkerPlan
from rlcore.contracts.offers import PoolSpec
from rlcore.contracts.pool_placement import placement_problem
from rlcore.contracts.requests import WorkerRequest
from rlcore.errors import ConfigError, PlanError, nearest
from rlcore.plan.catalog import remedy
from rlcore.plan.machine_facts import Facts
from rlcore.plan.planner_input import CORE, Offers, join_names, more_nodes

CONFIG = "config (cluster.pools)"
"""Provider of a pool that the user declared."""


class PoolSizeError(PlanError):
    """The pools of a run together need more devices than the machine has."""

    def __init__(self, found: str) -> None:
        """`found`: who needs what, and what the machine has."""
        self._found = found
        super().__init__(f"{found}; let roles share a pool, or set cluster.device=cpu")

    def advising(self, settings: str) -> PlanError:
        """The error with settings by which roles share a pool, and with which a plan is accepted."""
        return PlanError(f"{self._found}; let roles share a pool ({settings}), or set cluster.device=cpu")


@dataclass(frozen=True)
class _Declared:
    spec: PoolSpec
    by: str


def make_pools(
    config: RunConfig, offers: Offers, workers: Sequence[WorkerPlan], facts: Facts, abilities: ClusterAbilities
) -> tuple[PoolPlan, ...]:
    """The pools of the run by name, with their devices.

    The user's `cluster.pools` win over offers. PlanError for a pool that is missing, unused, declared twice or too
    small, and when the pools together need more devices than the machine has.
    """
    declared = _declared(config, offers, workers)
    for pool in declared.values():
        _check_nodes(config, pool, abilities)
    roles = _roles(declared, workers)
    _check_unions(declared)
    _check_used(declared, roles)
    sizes = {name: _gpus_per_node(pool, workers, declared) for name, pool in declared.items()}
    _check_total(config, declared, sizes, facts if facts.of_workers or not abilities.elsewhere else None)
    return tuple(_place(declared, roles, sizes))


def pool_notes(pools: Sequence[PoolPlan]) -> list[str]:
    """Notes on pools that `cluster.pools` does not declare and that may be misspelt: the name is close to another's."""
    notes = []
    for pool in pools:
        others = [other.name for other in pools if other.name != pool.name]
        near = get_close_matches(pool.name, others, n=1, cutoff=0.8)
        if near and pool.provided_by != CONFIG:
            notes.append(
                f"pool '{pool.name}' of {', '.join(pool.roles)} is not pool '{near[0]}'; "
                f"if it is meant to be, correct the name, else declare it: cluster.pools.{pool.name}"
            )
    return notes


def _declared(config: RunConfig, offers: Offers, workers: Sequence[WorkerPlan]) -> dict[str, _Declared]:
    requests = tuple(sorted((plan.request for plan in workers), key=lambda request: request.role.name))
    offered: dict[str, _Declared] = {}
    every_offer = offers.resource_pools(config, requests)
    of_plugins = {offer.value.name for offer in every_offer if offer.provider.plugin != CORE}
    for offer in every_offer:
        name = offer.value.name
        if offer.provider.plugin == CORE and name in of_plugins and name != WorkerRequest.pool:
            continue  # a plugin that offers the rollout's pool also defines it
        if name in offered and name not in config.cluster.pools:
            raise PlanError(
                f"pool '{name}' is offered twice, by {join_names([offered[name].by, str(offer.provider)])}; "
                f"one of them has to use another name, or cluster.pools.{name} decides"
            )
        offered[name] = _Declared(offer.value, str(offer.provider))
    for name, pool in config.cluster.pools.items():
        problem = placement_problem(pool.placement, pool.labels, pool.resources)
        if problem:
            raise ConfigError(f"cluster.pools.{name}: {problem}")
        before = offered[name].spec if name in offered else PoolSpec(name)
        spec = PoolSpec(
            name,
            pool.gpus_per_node,
            pool.nodes,
            pool.colocates or before.colocates,
            before.placement if pool.placement == "pack" and pool.nodes == 1 else pool.placement,
            pool.labels or before.labels,
            pool.resources or before.resources,
        )
        offered[name] = _Declared(spec, CONFIG)
    return dict(sorted(offered.items()))


def _check_nodes(config: RunConfig, pool: _Declared, abilities: ClusterAbilities) -> None:
    """PlanError for nodes that the cluster does not have, and for placements that it does not support."""
    spec, backend = pool.spec, config.cluster.backend
    who = f"pool '{spec.name}' of {pool.by}"
    sizes = [f"gpus_per_node={spec.gpus_per_node}"] if spec.gpus_per_node else []
    sizes += [f"nodes={spec.nodes}"] if spec.nodes > 1 else []
    if spec.colocates and sizes:
        raise PlanError(
            f"{who}: {' and '.join(sizes)}, but a union has the devices of its members; leave it out, or set it of "
            f"{', '.join(spec.colocates)}"
        )
    more = f"set {abilities.more_with}" if abilities.more_with else remedy("cluster.backend")
    if spec.nodes > 1 and not abilities.several_nodes:
        raise PlanError(
            f"{who}: {spec.nodes} nodes; cluster.backend={backend} has one with these settings; needs nodes=1, or a "
            f"cluster of several nodes: {more}"
        )
    wishes = [name for name in ("labels", "resources") if getattr(spec, name)]
    refused = [name for name in wishes if not getattr(abilities, name)]
    strict = [f"placement={spec.placement}"] if spec.placement == "strict_spread" else []
    refused += [f"placement={spec.placement}"] if spec.placement not in abilities.placements else []
    if refused:
        raise PlanError(
            f"{who}: asks for {', '.join(refused)}, which cluster.backend={backend} does not obey with these settings; "
            f"needs a pool that asks for less, or a cluster that does: {more}"
        )
    wishes += strict
    wishes += [f"placement={spec.placement}"] if spec.placement not in ("pack", "strict_spread") else []
    if wishes and spec.colocates:
        raise PlanError(
            f"{who}: asks for {', '.join(wishes)}, but a union has the places of its members; say it of "
            f"{', '.join(spec.colocates)}"
        )
    if spec.nodes > 1 and spec.placement != "pack":
        raise PlanError(
            f"{who}: nodes={spec.nodes} says where its ranks go, and so does placement={spec.placement}; needs one of "
            "the two"
        )


def _roles(declared: Mapping[str, _Declared], workers: Sequence[WorkerPlan]) -> dict[str, tuple[str, ...]]:
    roles: dict[str, list[str]] = {name: [] for name in declared}
    for plan in workers:
        pool = plan.request.pool
        if pool not in roles:
            raise PlanError(
                f"role '{plan.request.role.name}' of {plan.asked_by} needs pool '{pool}', which is not declared; "
                f"{nearest(pool, list(declared))}; or declare it: cluster.pools.{pool}.gpus_per_node=N"
            )
        roles[pool].append(plan.request.role.name)
    return {name: tuple(found) for name, found in roles.items()}


def _check_unions(declared: Mapping[str, _Declared]) -> None:
    for name, pool in declared.items():
        for member in pool.spec.colocates:
            if member not in declared:
                raise PlanError(
                    f"pool '{name}' of {pool.by} is a union with '{member}', which is not declared; "
                    f"{nearest(member, [other for other in declared if other != name])}"
                )
            if declared[member].spec.colocates:
                raise PlanError(f"pool '{name}' of {pool.by} is a union with '{member}', which is itself a union")


def _check_used(declared: Mapping[str, _Declared], roles: Mapping[str, tuple[str, ...]]) -> None:
    in_unions = {member for name, pool in declared.items() if roles[name] for member in pool.spec.colocates}
    for name, entry in declared.items():
        if not roles[name] and name not in in_unions:
            used = ", ".join(sorted(pool for pool in roles if roles[pool]))
            raise PlanError(f"pool '{name}' of {entry.by} is unused: no role asks for it; pools in use: {used}")


def _gpus_per_node(pool: _Declared, workers: Sequence[WorkerPlan], declared: Mapping[str, _Declared]) -> int:
    """Devices per node: as declared if that is enough, otherwise as many as the largest of the pool's roles needs."""
    spec = pool.spec
    if spec.colocates:
        members = [declared[member] for member in spec.colocates]
        sizes = [_gpus_per_node(member, workers, declared) * member.spec.nodes for member in members]
        spec = PoolSpec(spec.name, sum(sizes))
    num_gpus = spec.gpus_per_node
    needed = 0
    for plan in workers:
        request = plan.request
        if request.pool != spec.name or request.embedded_in is not None:
            continue
        wanted = ceil(request.replicas * request.ranks * request.gpus)
        on_a_node = ceil(ceil(request.replicas * request.ranks / spec.nodes) * request.gpus)
        if spec.nodes > 1 and 0 < num_gpus < request.gpus:
            raise PlanError(
                f"pool '{spec.name}' of {pool.by} has {num_gpus} GPUs on each of its {spec.nodes} nodes, and a rank of "
                f"role '{request.role.name}' needs {request.gpus:g}: a rank is on one node; choose at most {num_gpus} "
                f"devices for each, and more replicas or ranks{more_nodes(request)}; its "
                f"class is {plan.offered_by}"
            )
        if 0 < num_gpus < on_a_node:
            total = num_gpus * spec.nodes
            has = f"{total}" if spec.nodes == 1 else f"{total} on {spec.nodes} nodes, each of which needs {on_a_node}"
            raise PlanError(
                f"pool '{spec.name}' of {pool.by} is too small: role '{request.role.name}' of {plan.asked_by} needs "
                f"{wanted} GPUs ({request.replicas} replicas x {request.ranks} ranks x {request.gpus:g}), "
                f"the pool has {has}; its class is {plan.offered_by}"
            )
        needed = max(needed, on_a_node)
    return num_gpus or needed


def _check_total(
    config: RunConfig, declared: Mapping[str, _Declared], sizes: Mapping[str, int], facts: Facts | None
) -> None:
    """`facts` of this machine; None for other machines, which are checked when the pools are placed on them."""
    leaves = {name: sizes[name] * pool.spec.nodes for name, pool in declared.items() if not pool.spec.colocates}
    total = sum(leaves.values())
    if total and config.cluster.device != "cuda":
        names = join_names([f"'{name}'" for name, size in leaves.items() if size])
        stated = [f"cluster.pools.{name}.gpus_per_node=0" for name in leaves if declared[name].spec.gpus_per_node]
        lacks = facts is not None and total > facts.gpus
        way_out = f"the machine has {facts.gpus}, so" if facts and lacks else "set cluster.device=cuda or"
        settings = f": {', '.join(stated)}" if stated else ""
        raise PlanError(f"cluster.device=cpu, but pool {names} has GPUs; {way_out} take them out{settings}")
    if facts is not None and total > facts.gpus:
        each_pool = ", ".join(f"'{name}' {size}" for name, size in leaves.items() if size)
        raise PoolSizeError(f"cluster: the pools need {total} GPUs ({each_pool}), the machine has {facts.gpus}")


def _place(
    declared: Mapping[str, _Declared], roles: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
) -> list[PoolPlan]:
    devices: dict[str, tuple[int, ...]] = {}
    first = 0
    for name, pool in declared.items():
        if not pool.spec.colocates:
            size = sizes[name] * pool.spec.nodes
            devices[name] = tuple(range(first, first + size))
            first += size
    plans = []
    for name, pool in declared.items():
        spec = pool.spec
        gpus = devices.get(name) or tuple(gpu for member in spec.colocates for gpu in devices[member])
        where = (spec.placement, dict(spec.labels), dict(spec.resources))
        plans.append(PoolPlan(name, sizes[name], spec.nodes, roles[name], pool.by, spec.colocates, gpus, *where))
    return plans
