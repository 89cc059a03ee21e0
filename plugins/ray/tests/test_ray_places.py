"""Placement of ranks on Ray: the spot of a pool, and the bundle."""

import pytest
from rlcore_ray.places import places_of

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
