"""Broadcasts of weights that the planner accepts, and those that it refuses with what to choose."""

from dataclasses import replace

import pytest

from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.weight_sync import plan_weights
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

ENGINES = ("rollout.backend=null_replica", "rollout.pool=engines", "cluster.pools.engines.gpus_per_node=0")


@pytest.fixture
def made() -> RunPlan:
    """A plan with replicas in a separate pool."""
    found, loaded = configure([], [*SETTINGS, *ENGINES], ["null"])
    return make_plan(loaded, found, Facts(cpus=2, gpus=2))


def kind(made: RunPlan, device: str, pool: str, transport: str = "nccl") -> str:
    """The kind of weight sync, where roles have a GPU each and the rollout is in that pool."""
    config = replace(
        made.config,
        rollout=replace(made.config.rollout, weight_sync="nccl", weights_transport=transport),  # type: ignore[arg-type]
        cluster=replace(made.config.cluster, device=device),  # type: ignore[arg-type]
    )
    placed = []
    for worker in made.workers:
        request = replace(worker.request, gpus=1.0)
        if request.role.name == "rollout":
            request = replace(request, pool=pool)
        placed.append(replace(worker, request=request, weight_sync=frozenset({"nccl"})))
    return plan_weights(config, placed, made.pools, elsewhere=False)


@pytest.mark.parametrize(
    ("device", "pool", "transport"), [("cuda", "engines", "nccl"), ("cpu", "engines", "gloo"), ("cuda", "main", "gloo")]
)
def test_a_broadcast_has_separate_cuda_devices_or_goes_between_hosts(
    made: RunPlan, device: str, pool: str, transport: str
) -> None:
    assert kind(made, device, pool, transport) == "nccl"


def test_nccl_without_cuda_is_refused(made: RunPlan) -> None:
    with pytest.raises(PlanError) as caught:
        kind(made, "cpu", "engines")
    assert str(caught.value) == (
        "rollout.weight_sync=nccl broadcasts between CUDA devices, and cluster.device=cpu; choose tcp, shm or disk, or "
        "rollout.weights_transport=gloo, which broadcasts between hosts"
    )


def test_nccl_on_shared_devices_is_refused(made: RunPlan) -> None:
    with pytest.raises(PlanError) as caught:
        kind(made, "cuda", "main")
    assert str(caught.value) == (
        "rollout.weight_sync=nccl cannot connect two processes on one device, and the rollout is on devices that the "
        "actor trains on; choose shm, tcp or disk, or cluster.layout=split"
    )
