"""The reference in the plan: the actor's base under LoRA, else a second model with the actor's ranks and sharding."""

from pathlib import Path

import pytest

from rlcore.contracts.actor import ACTOR
from rlcore.contracts.model_files import num_parameters
from rlcore.contracts.requests import ModelShape
from rlcore.plan import Facts, RunPlan, WorkerPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import SharedPrefix

HF = ("actor.backend=hf", "rollout.backend=hf", "algo.kl.placement=loss", "actor.shared_prefix=none")
LORA = "actor.lora.enabled=true"
FACTS = Facts(cpus=2, parameters=10**6)
PROCESS = 500 * 2**20


def planned(*overrides: str, facts: Facts = FACTS) -> tuple[RunPlan, WorkerPlan]:
    """The plan, and the reference in it."""
    hooks, loaded = configure([], [*SETTINGS, *HF, *overrides], ["null"])
    plan = make_plan(loaded, hooks, facts)
    return plan, next(worker for worker in plan.workers if worker.request.role.name == "reference")


def test_with_lora_the_reference_is_the_actor_and_no_second_model_is_counted() -> None:
    plan, reference = planned(LORA)
    assert reference.request.embedded_in == ACTOR
    assert plan.memory_bytes.keys() == {"actor"}
    [note] = [
        note for note in plan.notes if note.startswith("reference: the actor's weights with the LoRA adapter off")
    ]
    assert note.endswith("no second model is loaded")
    assert plan_to_json(plan)["workers"]["reference"]["embedded_in"] == "actor"
    without = planned()[0].memory_bytes
    assert without["reference"] == PROCESS + 4 * 10**6
    assert not [note for note in planned()[0].notes if note.startswith("reference: the actor's")]


def test_with_lora_and_several_ranks_the_reference_is_in_each_of_them() -> None:
    for more in ((), ("actor.sharding=fsdp2",)):
        _, reference = planned(LORA, "actor.data_parallel=2", *more)
        assert (reference.request.embedded_in, reference.request.ranks) == (ACTOR, 2)


def test_with_lora_prompts_are_shared_as_by_the_actor() -> None:
    """transformers drops the cache under gradient checkpointing, and the actor's model is what computes."""
    facts = Facts(cpus=2, parameters=10**6, shape=ModelShape("gptj", 2, 8, 16, 4, 100, full_attention=True))
    settings = ("actor.gradient_checkpointing=true", "actor.shared_prefix=planned")
    assert planned(LORA, *settings, facts=facts)[1].shared_prefix is SharedPrefix.NONE
    assert planned(*settings, facts=facts)[1].shared_prefix is SharedPrefix.CACHE, "a second model only scores"


@pytest.mark.slow
def test_a_path_asks_for_a_second_model_also_with_lora(tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other")
    plan, reference = planned(LORA, f"reference.path={other}")
    assert reference.request.embedded_in is None
    parameters = num_parameters(other)
    assert parameters
    passes = plan.memory_bytes["reference"] - (PROCESS + 4 * parameters)
    assert 0 < passes < 30 * 2**20, "states of a layer and logits of a forward pass"
    same, reference = planned(LORA, "reference.path=none")
    assert reference.request.embedded_in is None
    assert same.memory_bytes["reference"] == PROCESS + 4 * 10**6


def test_the_memory_of_a_missing_reference_is_reported_as_unknown() -> None:
    plan, _ = planned("reference.path=nowhere/at-all")
    assert "reference" not in plan.memory_bytes
    assert "unknown: the memory of reference" in plan.notes


def test_a_second_model_has_the_actors_ranks_sharding_and_pool() -> None:
    plan, reference = planned("actor.data_parallel=4")
    assert (reference.request.ranks, reference.request.pool) == (4, "main")
    assert plan.memory_bytes["reference"] == PROCESS + 4 * 10**6, "each rank has the whole model"
    sharded, reference = planned("actor.data_parallel=4", "actor.sharding=fsdp2")
    assert reference.request.ranks == 4
    assert sharded.memory_bytes["reference"] == PROCESS + (1 + 4) * 10**6, "its part, and while it scores all of it"


def test_ranks_of_actor_and_reference_share_devices_pairwise() -> None:
    from rlcore.cluster.worker_context import devices_of

    plan, reference = planned(
        "actor.data_parallel=2", "cluster.device=cuda", facts=Facts(cpus=2, gpus=2, parameters=10**6)
    )
    actor = next(worker for worker in plan.workers if worker.request.role == ACTOR)
    assert [devices_of(actor, plan.pools, 0, rank) for rank in range(2)] == [(0,), (1,)]
    assert [devices_of(reference, plan.pools, 0, rank) for rank in range(2)] == [(0,), (1,)]


def test_ranks_know_whether_another_process_has_their_device(tmp_path: Path) -> None:
    from rlcore.cluster.worker_context import cluster_context, context_of
    from rlcore.contracts.clusters import Deadlines

    shares = {}
    for placement in ("loss", "none", "server"):
        changes = ["cluster.device=cuda", "actor.data_parallel=2", f"algo.kl.placement={placement}"]
        if placement == "server":
            changes[2:] = ["algo.kl.placement=none", "rollout.backend=null_replica", "rollout.replicas=2"]
        hooks, loaded = configure([], [*SETTINGS, *HF, *changes], ["null"])
        plan = make_plan(loaded, hooks, Facts(cpus=2, gpus=2, parameters=10**6))
        cluster = cluster_context(plan, tmp_path, Deadlines())
        actor = next(worker for worker in plan.workers if worker.request.role == ACTOR)
        contexts = [context_of(cluster, actor, 0, device=f"cuda:{rank}", rank=rank) for rank in range(2)]
        shares[placement] = [context.shares_device for context in contexts]
    assert shares == {"loss": [True, True], "none": [False, False], "server": [False, False]}


def test_the_reference_of_another_backend_says_itself_what_it_is() -> None:
    hooks, loaded = configure([], [*SETTINGS, "algo.kl.placement=loss", "reference.backend=null", LORA], ["null"])
    plan = make_plan(loaded, hooks, FACTS)
    reference = next(worker for worker in plan.workers if worker.request.role.name == "reference")
    assert reference.request.embedded_in is None
    assert reference.request.ranks == 1
