"""Weights over IPC: plans that accept them, and those that refuse them with what to choose."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from reading_rollout import MODEL, installed_reader

from rlcore import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.machine_cards import machine_of
from rlcore.plan.machine_plan import Lengths, host_memory, step_layout, step_size
from rlcore.plan.machine_times import estimate_step
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

IPC = "rollout.weight_sync=ipc"
COLOCATED = "cluster.layout=colocated"
GIB = 2**30


@pytest.fixture(autouse=True)
def site(tmp_path: Path) -> Iterator[Path]:
    with installed_reader(tmp_path / "site", "ipc_reader", "disk", "ipc") as place:
        yield place


def planned(*overrides: str, device: str = "cuda", per_node: int = 0, actor: str = "hf") -> RunPlan:
    """A run with 7B on eight GPUs, whose rollout has a copy of the weights."""
    chosen = ["rollout.backend=reader", f"actor.backend={actor}", f"cluster.device={device}"]
    hooks, loaded = configure([], [*SETTINGS, *chosen, *overrides], ["null", "ipc_reader"])
    facts = Facts(parameters=MODEL.parameters, shape=MODEL.shape)
    return make_plan(loaded, hooks, replace(facts, gpus=8, gpus_per_node=per_node, gpu_memory_bytes=200 * GIB))


def test_replicas_on_the_actors_devices_take_weights_over_ipc() -> None:
    plan = planned(IPC, COLOCATED)
    assert (plan.weights_kind, plan.weight_sync) == ("ipc", "ipc")
    several = planned(IPC, COLOCATED, "actor.data_parallel=8", "rollout.replicas=8", "train.prompts_per_step=8")
    assert several.weights_kind == "ipc"
    nodes = planned(
        IPC, COLOCATED, "actor.data_parallel=8", "rollout.replicas=8", "train.prompts_per_step=8", per_node=4
    )
    assert nodes.weights_kind == "ipc", "each replica is on the node of the rank that sends to it"
    union = ("cluster.train_pool=train", "cluster.pools.train.colocates=[main]", "rollout.pool=main")
    assert planned(IPC, *union, device="cpu").weights_kind == "ipc"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.pool=rollout",),
            "rollout.weight_sync=ipc is for replicas on the devices that the actor trains on, and the rollout is in "
            "pool 'rollout'; choose shm, tcp or disk, or cluster.layout=colocated",
        ),
        (
            (COLOCATED, "rollout.replicas=2"),
            "rollout.weight_sync=ipc: the rollout has devices 1, on which no rank of the actor is; choose shm, tcp or "
            "disk, or more ranks with actor.data_parallel",
        ),
        (
            (COLOCATED, "schedule.max_staleness=1"),
            "rollout.weight_sync=ipc: a restarted replica gets its version from the actor, whose weights would change "
            "meanwhile; needs schedule.max_staleness=0 and schedule.stream_minibatches=false (found 1 and false); or "
            "choose shm, tcp or disk",
        ),
        (
            (COLOCATED, "schedule.stream_minibatches=true"),
            "rollout.weight_sync=ipc: a restarted replica gets its version from the actor, whose weights would change "
            "meanwhile; needs schedule.max_staleness=0 and schedule.stream_minibatches=false (found 0 and true); or "
            "choose shm, tcp or disk",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(IPC, *overrides)
    assert str(caught.value) == message


def test_without_gpus_no_layout_is_advised_that_would_change_nothing() -> None:
    with pytest.raises(PlanError, match=r"the rollout is in pool 'main'; choose shm, tcp or disk$"):
        planned(IPC, device="cpu")


def test_an_actor_that_cannot_send_its_weights_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"NullActor of .* defines no send_weights\(\); needs one, or a rollout that is"
    ):
        planned(IPC, COLOCATED, actor="null")


def test_it_needs_a_bucket_on_the_device_and_no_copy_on_the_host() -> None:
    by_files = planned("rollout.weight_sync=disk", COLOCATED)
    over_ipc = planned(IPC, COLOCATED, "rollout.weights_bucket_mib=256")
    assert "hand-over" not in host_memory(over_ipc)["actor"]
    assert host_memory(by_files)["actor"]["hand-over"] > 0

    def held(plan: RunPlan) -> int:
        from rlcore.plan.device_memory import DeviceRoles, memory_by_phase

        roles = DeviceRoles(plan.config, plan.pools, plan.workers, plan.colocated_roles, plan.memory_bytes, plan.facts)
        return memory_by_phase(roles)["main"]["hand-over"]

    assert held(over_ipc) - held(by_files) == 256 * 2**20


def test_the_seconds_of_a_hand_over_are_those_of_gathering_and_of_the_devices_memory() -> None:
    plan, machine = planned(IPC, COLOCATED), machine_of("8xH100-80GB")
    size, layout = step_size(plan, Lengths()), step_layout(plan, Lengths())
    assert layout.weight_sync == "ipc"

    def seconds(**changes: object) -> float:
        return estimate_step(size, replace(layout, sleeps=False, **changes), machine).seconds["hand-over"]  # type: ignore[arg-type]

    weights = size.bytes_per_weight * size.parameters
    assert seconds(trainers=1, sharded=False) == pytest.approx(6 * weights / (0.7 * 3.35e12), rel=0.01)
    assert seconds(trainers=8, sharded=True) > 2 * seconds(trainers=8, sharded=False)
    assert seconds(trainers=8, sharded=True) < seconds(trainers=8, sharded=True, engines=8, weight_sync="shm")
