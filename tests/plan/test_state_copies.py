"""Copies for checkpoints: made if they fit the host's memory, counted, and noted otherwise."""

from dataclasses import replace

from rlcore.contracts.requests import ModelFacts
from rlcore.plan import RunPlan, make_plan
from rlcore.plan.machine_facts import Facts
from rlcore.plan.state_copies import copied_bytes
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

GIB = 2**30
PARAMETERS = 1_000_000_000
MODEL = ModelFacts(PARAMETERS, None)


def plan(memory_gib: float | None, *overrides: str) -> RunPlan:
    """A run on CPUs, whose actor has a billion parameters in float32."""
    settings = (*SETTINGS, "actor.backend=hf", "rollout.backend=hf", "cluster.device=cpu", *overrides)
    hooks, loaded = configure([], settings, ["null"])
    memory = None if memory_gib is None else int(memory_gib * GIB)
    return make_plan(loaded, hooks, Facts(cpus=8, memory_bytes=memory, parameters=MODEL.parameters))


def test_a_copy_is_weights_and_optimizer_state_of_what_is_trained() -> None:
    assert copied_bytes(plan(None)) == 12 * PARAMETERS
    assert copied_bytes(plan(None, "actor.dtype=bfloat16")) == 14 * PARAMETERS
    assert copied_bytes(plan(None, "actor.lora.enabled=true")) == 0


def test_training_waits_for_a_save_where_the_host_holds_no_copy_and_the_plan_says_so() -> None:
    run = plan(None).memory_bytes["actor"]
    needed = (run + 12 * PARAMETERS) / 0.9 / GIB
    assert plan(None).saves_copies
    assert plan(needed + 0.01).saves_copies
    small = plan(needed - 0.01)
    assert not small.saves_copies
    notes = [note for note in small.notes if note.startswith("checkpoints: training waits while they are written")]
    assert notes == [
        f"checkpoints: training waits while they are written: a copy of weights and optimizer state takes about 11.2 "
        f"GiB, the run {run / GIB:.1f} GiB of the host's {needed - 0.01:.1f} GiB"
    ]


def test_on_gpus_offloaded_state_counts_in_addition_to_the_copy() -> None:
    facts = Facts(gpus=1, gpu_memory_bytes=80 * GIB, parameters=PARAMETERS, memory_bytes=32 * GIB)
    settings = (*SETTINGS, "actor.backend=hf", "rollout.backend=hf", "cluster.device=cuda", "actor.dtype=float32")
    hooks, loaded = configure([], settings, ["null"])
    assert make_plan(loaded, hooks, facts).saves_copies
    offloaded = configure([], [*settings, "actor.offload=true"], ["null"])
    assert make_plan(offloaded[1], offloaded[0], facts).saves_copies, "12 GB rest there, 12 GB are copied"
    assert not make_plan(offloaded[1], offloaded[0], replace(facts, memory_bytes=24 * GIB)).saves_copies
