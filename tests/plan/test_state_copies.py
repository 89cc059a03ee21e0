"""Copies for checkpoints: made if they fit the host's memory, counted, and noted otherwise."""

from dataclasses import replace

import pytest

from rlcore.contracts.requests import ModelFacts
from rlcore.errors import PlanError
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


@pytest.mark.parametrize(
    ("ranks", "gib", "message"),
    [
        (
            1,
            10,
            "14.9 GiB of host memory (actor 13.0 for offload, actor 1.9 for hand-over), the machine has 10.0",
        ),
        (
            4,
            40,
            "54.0 GiB of host memory (actor 52.2 for offload, actor 1.9 for hand-over), the machine has 40.0",
        ),
    ],
)
def test_offloaded_state_that_the_host_does_not_hold_is_refused_in_a_line(ranks: int, gib: int, message: str) -> None:
    facts = Facts(gpus=2 * ranks, gpu_memory_bytes=80 * GIB, parameters=PARAMETERS, memory_bytes=gib * GIB)

    def made(*overrides: str) -> RunPlan:
        settings = (*SETTINGS, "actor.backend=hf", "rollout.backend=null_replica", "rollout.pool=rollout")
        counts = (f"actor.data_parallel={ranks}", "train.prompts_per_step=4", "cluster.device=cuda")
        hooks, loaded = configure([], [*settings, *counts, "actor.dtype=bfloat16", *overrides], ["null"])
        return make_plan(loaded, hooks, facts)

    with pytest.raises(PlanError) as caught:
        made("actor.offload=true")
    line, ways = str(caught.value), ["actor.offload=false", *(["actor.sharding=fsdp2"] if ranks > 1 else [])]
    assert line == f"memory: the run needs about {message}; set {' or '.join(ways)}, or take a smaller model"
    assert made().saves_copies is (ranks > 1)
    if ranks > 1:
        assert made("actor.offload=true", "actor.sharding=fsdp2").saves_copies
