"""Ways of weight sync: the one that the plan chooses, and those that it refuses where they cannot work."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from reading_rollout import MODEL, installed_reader

from rlcore import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.machine_plan import Lengths, host_memory, step_layout
from rlcore.plan.state_copies import plan_saving
from rlcore.plan.weight_sync import plan_weights, with_choice
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


GIB = 2**30


@pytest.fixture(autouse=True)
def site(tmp_path: Path) -> Iterator[Path]:
    with installed_reader(tmp_path / "site", "written_reader", "disk", "shm") as place:
        yield place


def chosen(*overrides: str, memory_gib: int | None = None, reader: bool = True, per_node: int = 0) -> RunPlan:
    """A run on a GPU whose rollout takes whole weights from files, and from shared memory if it is a `reader`."""
    settings = ["actor.backend=hf", f"rollout.backend={'reader' if reader else 'null_replica'}", "cluster.device=cuda"]
    plugins = ["null", *(["written_reader"] if reader else [])]
    hooks, loaded = configure([], [*SETTINGS, *settings, *overrides], plugins)
    memory = None if memory_gib is None else memory_gib * GIB
    model = Facts(parameters=MODEL.parameters, shape=MODEL.shape)
    facts = replace(model, gpus=8, gpus_per_node=per_node, gpu_memory_bytes=200 * GIB, memory_bytes=memory)
    return make_plan(loaded, hooks, facts)


def reasons(plan: RunPlan) -> list[tuple[str, str]]:
    return [(choice.value, choice.reason) for choice in plan.choices if choice.key == "rollout.weight_sync"]


def test_weights_go_through_shared_memory_where_that_is_possible() -> None:
    plan = chosen()
    assert (plan.weights_kind, plan.weight_sync) == ("shm", "shm")
    reason = "actor and replicas are on one machine, and all of them read one copy in its memory"
    assert reasons(plan) == [("shm", reason)]
    for way, kind in (("disk", "directory"), ("shm", "shm")):
        plan = chosen(f"rollout.weight_sync={way}")
        assert (plan.weights_kind, plan.weight_sync, reasons(plan)) == (kind, way, [])
    hooks, loaded = configure([], SETTINGS, ["null"])
    embedded = make_plan(loaded, hooks, Facts(cpus=2))
    assert (embedded.weights_kind, embedded.weight_sync, reasons(embedded)) == ("", "disk", [])


def test_weights_go_through_files_otherwise_and_the_plan_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("rollout.weights_dir=/x").weights_kind == "directory"
    assert reasons(chosen("rollout.weights_dir=/x")) == [("disk", "rollout.weights_dir is set")]
    (other,) = reasons(chosen(reader=False))
    assert other[0] == "disk"
    assert other[1].startswith("NullReplica of plugin 'null'")
    assert other[1].endswith("does not take weights from shared memory here")
    made = chosen()
    elsewhere = replace(made.cluster, abilities=replace(made.cluster.abilities, elsewhere=True))
    kind = plan_weights(made.config, made.workers, made.pools, elsewhere=True)
    found = with_choice(replace(made, cluster=elsewhere, weights_kind=kind, choices=()))
    reason = "actor and replicas may be on several machines"
    assert reasons(found) == [("disk", reason)]
    assert reasons(chosen(per_node=4)) == [("disk", reason)], "--on 2x4xH100"
    assert chosen(per_node=8).weights_kind == "shm"
    with pytest.raises(PlanError, match="shm shares memory of one machine"):
        chosen("rollout.weight_sync=shm", per_node=4)
    monkeypatch.delattr(os, "memfd_create")  # on other systems than Linux
    assert chosen().weights_kind == "directory"


def test_weights_go_through_files_where_the_host_has_no_memory_for_a_copy() -> None:
    sharded = ("actor.data_parallel=4", "actor.sharding=fsdp2", "actor.offload=true", "actor.dtype=bfloat16")
    counts = ("train.prompts_per_step=4", "rollout.pool=rollout")
    made = chosen(*sharded, *counts, memory_gib=400)
    assert made.weights_kind == "shm"
    resting, weights = 14 * (made.facts.parameters or 0), 2 * (made.facts.parameters or 0)
    small = replace(made, facts=replace(made.facts, memory_bytes=resting + weights - 1))
    assert plan_saving(small).weights_kind == "directory"
    assert plan_saving(replace(small, facts=replace(made.facts, memory_bytes=resting + weights))).weights_kind == "shm"
    assert reasons(with_choice(replace(plan_saving(small), choices=()))) == [
        ("disk", "the host has no memory for another copy of the weights")
    ]
    explicit = replace(small, loaded=chosen(*sharded, *counts, "rollout.weight_sync=shm", memory_gib=400).loaded)
    with pytest.raises(PlanError, match="memory: the run needs about"):
        plan_saving(explicit)


def test_weights_go_the_way_that_the_rollout_takes_where_it_reads_no_files() -> None:
    made = chosen()
    for ways, way in (({"tcp"}, "tcp"), ({"nccl", "tcp"}, "tcp"), ({"disk", "tcp"}, "disk")):
        workers = [replace(worker, weight_sync=frozenset(ways)) for worker in made.workers]
        kind = plan_weights(made.config, workers, made.pools, elsewhere=False)
        found = with_choice(replace(made, workers=tuple(workers), weights_kind=kind, choices=()))
        [(value, reason)] = reasons(found)
        assert value == way
        assert reason.endswith(" does not take weights from shared memory here")
    workers = [replace(worker, weight_sync=frozenset({"shm"})) for worker in made.workers]
    with pytest.raises(PlanError, match=r"^rollout\.weight_sync=auto: Reader .*; choose from: shm$"):
        plan_weights(made.config, workers, made.pools, elsewhere=True)
    sharded = chosen(
        "actor.data_parallel=4", "actor.sharding=fsdp2", "train.prompts_per_step=4", "rollout.pool=rollout"
    )
    poor = replace(sharded, facts=replace(sharded.facts, memory_bytes=10 * GIB))
    assert plan_saving(poor).weights_kind == "directory"
    workers = [replace(worker, weight_sync=frozenset({"shm"})) for worker in sharded.workers]
    with pytest.raises(PlanError, match=r"\(actor 14\.2 for hand-over\), the machine has 10\.0; take a smaller model$"):
        plan_saving(replace(poor, workers=tuple(workers)))


def test_weights_go_through_files_where_a_copy_for_checkpoints_then_fits() -> None:
    """Training goes on while a checkpoint is written, which is worth more than the seconds of the hand-over."""
    made = chosen("actor.data_parallel=4", "actor.sharding=fsdp2", "train.prompts_per_step=4", "rollout.pool=rollout")
    parameters, unit = made.facts.parameters or 0, 2 * 2 * 152064 * 3584
    copies, weights = 14 * parameters, 2 * parameters

    def saving(of_host: int) -> tuple[str, bool]:
        found = plan_saving(replace(made, facts=replace(made.facts, memory_bytes=int(of_host / 0.9) + 1)))
        return found.weights_kind, found.saves_copies

    assert saving(copies + weights) == ("shm", True)
    assert saving(copies + weights - 1000) == ("directory", True)
    assert saving(copies + unit) == ("directory", True)
    assert saving(copies + unit - 1000) == ("shm", False)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("adapter", [False, True])
def test_the_copy_of_the_weights_counts_also_of_adapters_and_without_gpus(device: str, adapter: bool) -> None:
    more = (f"cluster.device={device}", f"actor.lora.enabled={adapter}", "actor.dtype=bfloat16")
    made = chosen(*more, "rollout.weight_sync=shm")
    copy = 2 * (made.facts.parameters or 0)
    assert host_memory(made)["actor"]["hand-over"] == copy
    needed = copy + (made.memory_bytes["actor"] if device == "cpu" else 0)
    plan_saving(replace(made, facts=replace(made.facts, memory_bytes=needed)))
    with pytest.raises(PlanError, match="memory: the run needs about") as caught:
        plan_saving(replace(made, facts=replace(made.facts, memory_bytes=needed - 1)))
    fewer = device == "cpu" or adapter
    assert str(caught.value).endswith("; set rollout.weight_sync=disk, or take a smaller model") is fewer
    held = f"(actor {made.memory_bytes['actor'] / GIB:.1f}, actor 14.2 for hand-over)"
    assert (held in str(caught.value)) is (device == "cpu")
    if device == "cuda":
        assert step_layout(made, Lengths()).merges is adapter
