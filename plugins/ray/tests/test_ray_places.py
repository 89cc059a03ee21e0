"""Placement of ranks on Ray: the spot of a pool, and the bundle."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_ray.places import places_of

from rlcore.contracts.clusters import PoolPlan
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

RAY = ("plugins.ray.address=10.0.0.1:6379",)
ENGINES = ("rollout.backend=null_replica", "rollout.pool=engines")


def planned(*overrides: str) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, Facts(cpus=2))


def layout(*overrides: str) -> dict[str, list[tuple[str, int, int]]]:
    """(pool, spot, bundle) of each rank, by role."""
    plan = planned(*ENGINES, *RAY, *overrides)
    places = places_of(plan.pools, plan.workers)
    return {role: [(rank.pool, rank.spot, rank.bundle) for rank in ranks] for role, ranks in places.items()}


@pytest.mark.slow
def test_ranks_are_laid_out_evenly_over_the_nodes_of_their_pool_in_order() -> None:
    assert layout("rollout.replicas=3")["rollout"] == [("engines", index, index) for index in range(3)]
    two = layout("rollout.replicas=4", "cluster.pools.engines.nodes=2")["rollout"]
    assert [bundle for _, _, bundle in two] == [0, 0, 1, 1]
    uneven = layout("rollout.replicas=5", "cluster.pools.engines.nodes=2")["rollout"]
    assert [bundle for _, _, bundle in uneven] == [0, 0, 0, 1, 1]
    # Of two roles each is laid out over the nodes: ranks of both that are at one spot share its devices.
    both = layout("rollout.pool=main", "rollout.replicas=4", "actor.data_parallel=2", "cluster.pools.main.nodes=2")
    assert both["rollout"] == [("main", 0, 0), ("main", 1, 0), ("main", 2, 1), ("main", 3, 1)]
    assert both["actor"] == [("main", 0, 0), ("main", 2, 1)]
    union = ("cluster.train_pool=train", "cluster.pools.train.colocates=[engines]", "actor.data_parallel=3")
    lent = layout(*union, "rollout.replicas=4", "cluster.pools.engines.nodes=2")
    assert lent["actor"] == lent["rollout"][:3]


class Cluster:
    """The placement groups of a cluster with three CPUs, which it gives to groups in the order in which they wait."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}

    def placement_group(self, bundles: list[dict[str, float]], name: str, **more: Any) -> "Group":
        group = Group(self, sum(bundle["CPU"] for bundle in bundles), name)
        self.groups[group.key] = group
        self.give()
        return group

    def remove(self, group: "Group") -> None:
        del self.groups[group.key]
        self.give()

    def give(self) -> None:
        for group in self.groups.values():
            taken = sum(other.cpus for other in self.groups.values() if other.has)
            group.has = group.has or taken + group.cpus <= 3

    def table(self) -> dict[str, dict[str, str]]:
        return {
            key: {"state": "CREATED" if group.has else "PENDING", "name": group.name}
            for key, group in self.groups.items()
        }


class Group:
    """A placement group."""

    def __init__(self, cluster: Cluster, cpus: float, name: str) -> None:
        self.cpus, self.name, self.has = cpus, name, False
        self.key = f"{name} {id(self)}"
        self.id = SimpleNamespace(hex=lambda: self.key)

    async def ready(self) -> None:
        await asyncio.sleep(0.001)  # the other run reserves meanwhile
        while not self.has:
            await asyncio.sleep(0.001)


@pytest.mark.slow
def test_runs_that_each_hold_what_the_other_needs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from rlcore_ray import placement

    cluster = Cluster()
    monkeypatch.setattr(placement, "placement_group", cluster.placement_group)
    monkeypatch.setattr(placement, "placement_group_table", cluster.table)
    monkeypatch.setattr(placement, "remove_placement_group", cluster.remove)
    monkeypatch.setattr(placement, "HOLD_S", 0.05)
    monkeypatch.setattr(placement.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"CPU": 3.0})
    monkeypatch.setattr(placement.ray, "available_resources", dict)
    pools = [PoolPlan(name, 0, 1, (), "core") for name in ("main", "rollout")]

    async def run(name: str) -> None:
        placed = placement.Placement(name, pools)
        await placed.place({"main": [{"CPU": 1.0}], "rollout": [{"CPU": 1.0}] * 2}, 10)
        assert all(group.has for group in cluster.groups.values() if f" {name} " in group.name)
        await asyncio.sleep(0.05)
        placed.close()

    async def both() -> None:
        await asyncio.gather(run("first"), run("second"))

    asyncio.run(both())
    assert cluster.groups == {}
