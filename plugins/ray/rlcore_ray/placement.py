"""Pools as placement groups: assigns each rank of each role to a bundle."""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from rlcore import ACTOR, WorkerError
from rlcore.contracts.clusters import ClusterContext, PoolPlan, WorkerPlan
from rlcore_ray.places import BundlePlace, meeting_in, places_of

NAME = "rlcore"
"""Placement groups are named 'rlcore RUN POOL', so that another run can name the holders of the cluster."""
ASK_AGAIN_S = 0.2
HOLD_S = 5.0
"""Seconds for which pools are held while another one is waited for, if other runs wait, too: each may hold what the
other one needs."""


@dataclass(frozen=True)
class BundleSlot:
    """The share of a bundle that one rank takes."""

    pool: str
    """A leaf pool."""
    bundle: int
    cpus: float
    gpus: float
    """Devices that it reserves; none if it borrows those of ranks that are there before it."""
    spots: range = range(0)
    """The spots of its devices in the pool, if the bundle has several devices."""
    borrows: bool = False
    """It computes on the devices that the ranks at its spots have reserved."""


def slots_of(run: ClusterContext) -> dict[str, list[BundleSlot]]:
    """For each role with separate processes, the slot of each rank, replica by replica.

    Roles of a pool take turns on its devices: the ranks in a bundle share its devices, and each has its own CPUs. Ray
    would give halves of a device to any two ranks of a bundle with several. There the rank that starts first reserves
    the device of its spot, and the others borrow it. A union's ranks share the CPUs of its members' bundles with the
    servers that sleep while they train. Ray does not know turns, so each side reserves its part of the larger need.
    """
    places = places_of(run.pools, run.workers)
    meeting = meeting_in(places)
    spots = {role: ranks[0].num_spots for role, ranks in places.items()}
    several = {(place.pool, place.bundle): set[int]() for ranks in places.values() for place in ranks}
    for place in (place for ranks in places.values() for place in ranks):
        several[place.pool, place.bundle] |= set(place.spots)

    def slot(place: BundlePlace) -> BundleSlot:
        present = meeting[place.pool, place.spot]
        cpus = _cpus(place.plan, present, run, spots)
        if not place.plan.request.gpus or len(several[place.pool, place.bundle]) == 1:
            return BundleSlot(place.pool, place.bundle, cpus, _gpus(place.plan, present))
        borrows = next(worker for worker in present if worker.request.gpus) is not place.plan
        gpus = 0.0 if borrows else float(ceil(place.plan.request.gpus))
        return BundleSlot(place.pool, place.bundle, cpus, gpus, place.spots, borrows)

    return {role: [slot(place) for place in ranks] for role, ranks in places.items()}


def _cpus(plan: WorkerPlan, present: Sequence[WorkerPlan], run: ClusterContext, spots: Mapping[str, int]) -> float:
    """The CPUs that a rank reserves at a spot that these workers share; `spots` of a rank by role."""
    pool = next(worker.request.pool for worker in run.workers if worker.request.role == ACTOR)
    cpus = {worker.request.role.name: worker.request.cpus / spots[worker.request.role.name] for worker in present}
    servers = [cpus[worker.request.role.name] for worker in present if worker.request.role.name in run.colocated_roles]
    trainers = [
        cpus[worker.request.role.name]
        for worker in present
        if worker.request.pool == pool and worker.request.role.name not in run.colocated_roles
    ]
    training, serving = sum(trainers), sum(servers)
    takes_turns = plan.request.pool == pool or plan.request.role.name in run.colocated_roles
    if not (takes_turns and training and serving):
        return plan.request.cpus
    return floor(plan.request.cpus * max(training, serving) / (training + serving) * 1000) / 1000


def _gpus(plan: WorkerPlan, present: Sequence[WorkerPlan]) -> float:
    """Ray divides only single devices; several devices go to one role as a whole."""
    gpus = plan.request.gpus
    sharing = sum(1 for worker in present if worker.request.gpus)
    return gpus if gpus > 1 else floor(gpus / max(sharing, 1) * 1000) / 1000


def bundles_of(
    slots: Mapping[str, Sequence[BundleSlot]], pools: Sequence[PoolPlan] = ()
) -> dict[str, list[dict[str, float]]]:
    """The bundles of each leaf pool: the sum of their slots, devices rounded up, plus its custom resources.

    A pool with a number of nodes has one bundle per node, with all of the pool's devices there.
    """
    sums: dict[str, dict[int, list[float]]] = {}
    for ranks in slots.values():
        for slot in ranks:
            both = sums.setdefault(slot.pool, {}).setdefault(slot.bundle, [0.0, 0.0])
            both[0] += slot.cpus
            both[1] += slot.gpus
    by_name = {pool.name: pool for pool in pools}
    return {name: _bundles(taken, by_name.get(name)) for name, taken in sums.items()}


def _bundles(taken: Mapping[int, Sequence[float]], pool: PoolPlan | None) -> list[dict[str, float]]:
    nodes = pool.nodes if pool is not None and pool.nodes > 1 else 0
    of_a_node = pool.gpus_per_node if pool is not None and nodes else 0
    resources = dict(pool.resources) if pool is not None else {}
    bundles = [taken.get(index, (0.0, 0.0)) for index in range(max(nodes, max(taken) + 1))]
    return [_bundle(cpus, max(gpus, of_a_node)) | resources for cpus, gpus in bundles]


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    # A bundle must not be empty; a hundredth of a CPU is the placeholder.
    return {"CPU": ceil(cpus * 100 - 1e-6) / 100 or 0.01} | ({"GPU": float(ceil(gpus - 1e-6))} if gpus else {})


STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict_spread": "STRICT_SPREAD", "one_node": "STRICT_PACK"}
"""Ray's strategy for each value of `placement`."""


def strategy_of(pool: PoolPlan) -> str:
    """Ray's strategy for a leaf pool: each bundle on a separate node if the pool has a number of nodes."""
    return "STRICT_SPREAD" if pool.nodes > 1 else STRATEGIES[pool.placement]


class Placement:
    """The placement groups of a run."""

    def __init__(self, run_name: str, pools: Sequence[PoolPlan]) -> None:
        self._run_name = run_name
        self._pools = {pool.name: pool for pool in pools}
        self._groups: dict[str, PlacementGroup] = {}
        self._wanted: dict[str, list[dict[str, float]]] = {}

    def group(self, pool: str) -> PlacementGroup:
        """The group of a leaf pool."""
        return self._groups[pool]

    async def place(self, bundles: Mapping[str, list[dict[str, float]]], deadline_s: float) -> None:
        """Reserve every pool; WorkerError naming what was requested, what exists and who has it."""
        ends_at = asyncio.get_running_loop().time() + deadline_s
        while not await self._place(bundles, ends_at, deadline_s):
            self.close()
            await asyncio.sleep(random.uniform(0, HOLD_S))

    async def _place(self, bundles: Mapping[str, list[dict[str, float]]], ends_at: float, deadline_s: float) -> bool:
        """Reserve one pool after the other; False to release them, because another run may wait for them."""
        for pool, wanted in sorted(bundles.items()):
            spec = self._pools[pool]
            group = placement_group(
                wanted,
                strategy=strategy_of(spec),
                name=f"{NAME} {self._run_name} {pool}",
                bundle_label_selector=[dict(spec.labels)] * len(wanted) if spec.labels else None,
            )
            holds = bool(self._groups)
            self._groups[pool], self._wanted[pool] = group, wanted
            try:
                while not await _is_ready(group, ends_at, holds):
                    if asyncio.get_running_loop().time() >= ends_at:
                        raise WorkerError(await asyncio.to_thread(self._too_small, pool, deadline_s))
                    if await asyncio.to_thread(_others_wait, self._groups.values()):
                        return False
            except RayError as error:
                raise WorkerError(f"cluster: pool '{pool}' cannot be placed: {error}") from error
        return True

    async def stand(self, pool: str, deadline_s: float) -> None:
        """Return when every bundle of the pool is on a node. If a node has left, Ray looks for a new place.

        WorkerError as from `place`.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while await asyncio.to_thread(_state, self._groups[pool]) != "CREATED":
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise WorkerError(await asyncio.to_thread(self._too_small, pool, deadline_s)) from None

    def _too_small(self, pool: str, deadline_s: float) -> str:
        wanted = self._wanted[pool]
        has, free = ray.cluster_resources(), ray.available_resources()
        kinds = sorted(
            {kind for bundle in wanted for kind in bundle}, key=lambda kind: (kind not in ("CPU", "GPU"), kind)
        )
        total = {kind: sum(bundle.get(kind, 0.0) for bundle in wanted) for kind in kinds}
        parts = [f"{kind} {has.get(kind, 0.0):g}, free {free.get(kind, 0.0):g}" for kind in kinds if total[kind]]
        needs = " and ".join(f"{amount:g} {kind}" for kind, amount in total.items() if amount)
        holders = _holders(self._groups.values())
        return (
            f"cluster: pool '{pool}' wants {needs} in {len(wanted)} bundles ({_worded(wanted)}"
            f"{_where(self._pools[pool])}), which were not free within plugins.ray.placement_s={deadline_s:g}; the "
            f"cluster has {'; '.join(parts)}"
            + (f"; held by: {', '.join(holders)}" if holders else "")
            + "; wait, add nodes, or ask for less (replicas, ranks, cluster.pools)"
        )

    def close(self) -> None:
        """Release everything."""
        groups = list(self._groups.values()) if ray.is_initialized() else []
        self._groups.clear()
        for group in groups:
            remove_placement_group(group)


def _where(pool: PoolPlan) -> str:
    """The pool's node requirements, as part of an error text."""
    ways = {
        "STRICT_SPREAD": [f"on as many nodes (nodes={pool.nodes})" if pool.nodes > 1 else "each on a separate node"],
        "STRICT_PACK": ["all on one node"],
    }.get(strategy_of(pool), [])
    ways += [f"on nodes with {key}={value}" for key, value in pool.labels.items()]
    return "".join(f", {way}" for way in ways)


async def _is_ready(group: PlacementGroup, ends_at: float, holds: bool) -> bool:
    """True when the group is placed; False at the deadline, or after HOLD_S if the run `holds` others meanwhile."""
    until = min(ends_at, asyncio.get_running_loop().time() + HOLD_S) if holds else ends_at
    try:
        async with asyncio.timeout_at(until):
            await group.ready()
    except TimeoutError:
        return False
    return True


def _others_wait(ours: Iterable[PlacementGroup]) -> bool:
    """True if a group of another run is not placed."""
    mine = {group.id.hex() for group in ours}
    table = placement_group_table()
    return any(share["state"] == "PENDING" and key not in mine for key, share in table.items())


def _state(group: PlacementGroup) -> str:
    return str(placement_group_table(group)["state"])


def _worded(wanted: Sequence[Mapping[str, float]]) -> str:
    largest = max(wanted, key=lambda bundle: (bundle.get("GPU", 0.0), bundle["CPU"]))
    return "largest: " + ", ".join(f"{kind} {amount:g}" for kind, amount in largest.items())


def _holders(ours: Any) -> list[str]:
    """Names of other placement groups with resources."""
    mine = {group.id.hex() for group in ours}
    table = placement_group_table()
    return sorted(
        share["name"] or "a group without a name"
        for key, share in table.items()
        if share["state"] == "CREATED" and key not in mine
    )
