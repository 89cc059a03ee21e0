"""Ways of weight sync that the plan refuses where they cannot work."""

from dataclasses import replace

import pytest

from rlcore import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.weight_sync import plan_weights
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS


def planned() -> RunPlan:
    """A run whose rollout has a copy of the weights."""
    hooks, loaded = configure([], [*SETTINGS, "rollout.backend=null_replica", "rollout.replicas=2"], ["null"])
    return make_plan(loaded, hooks, Facts(cpus=8))


@pytest.mark.parametrize("by", ["tcp", "shm"])
def test_shared_memory_is_for_one_machine(by: str) -> None:
    made = planned()
    workers = [replace(worker, weight_sync=frozenset({"disk", "shm", "tcp"})) for worker in made.workers]
    config = replace(made.config, rollout=replace(made.config.rollout, weight_sync=by))  # type: ignore[arg-type]
    assert plan_weights(config, workers, made.pools, elsewhere=False) == by
    if by == "tcp":
        assert plan_weights(config, workers, made.pools, elsewhere=True) == by
        return
    with pytest.raises(PlanError) as caught:
        plan_weights(config, workers, made.pools, elsewhere=True)
    assert str(caught.value) == (
        "rollout.weight_sync=shm shares memory of one machine, and cluster.backend=local may put the actor and "
        "replicas of the rollout on several; choose tcp or disk"
    )
