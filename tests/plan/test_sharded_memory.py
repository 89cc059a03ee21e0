"""Memory of ranks that share a model out, compared with docs/results/sharding.md."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.config import EngineConfig
from rlcore.config.engines import LoraConfig
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.activations import MicroBatchSize, update_bytes
from rlcore.plan.gathered import gathered_bytes
from rlcore.plan.machine_plan import host_memory, memory_of_phases
from rlcore.plan.memory import CONTEXT_BYTES
from rlcore.plan.sharded_memory import sharded_bytes
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

GIB = 2**30
SHARDED = ("actor.data_parallel=4", "actor.sharding=fsdp2")
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "sharding.md"
MODELS = {
    "7B": ModelFacts(7_615_616_512, ModelShape("qwen2", 28, 3584, 18944, 512, 152064, True)),
    "14B": ModelFacts(14_770_033_664, ModelShape("qwen2", 48, 5120, 13824, 1024, 152064, True)),
    "32B": ModelFacts(32_763_876_352, ModelShape("qwen2", 64, 5120, 27648, 1024, 152064, True)),
}
H100_BYTES = 80 * GIB
ONE_MICRO_BATCH = ("data.max_prompt_tokens=8", "rollout.max_tokens=8", "rollout.samples_per_prompt=2")
"""With as many prompts as ranks: the conditions of the measurements."""


def measured() -> dict[tuple[str, int], Mapping[str, float]]:
    """GiB by model and ranks: columns of the page's table."""
    table = [line for line in RESULTS.read_text().splitlines() if line.startswith("|")]
    lines = [re.split(r" *\| *", line.strip("| ")) for line in table]
    names = lines[0]
    return {
        (row[0], int(row[1])): {name: float(cell) for name, cell in zip(names[2:8], row[2:8], strict=True)}
        for row in lines[2:]
    }


@pytest.mark.parametrize("row", measured())
def test_no_phase_takes_more_than_is_planned_and_little_less(row: tuple[str, int]) -> None:
    """Measurements have one decimal; what is there at a time in an update depends on the order of its layers."""
    name, ranks = row
    engine = EngineConfig(dtype="bfloat16", data_parallel=ranks, sharding="fsdp2")
    found = {phase: size / GIB for phase, size in sharded_bytes(engine, MODELS[name]).items()}
    for phase, column, over in (
        ("sample", "held", 1.05), ("score", "score", 1.2), ("update", "update", 1.25), ("hand-over", "hand-over", 1.05),
        ("save", "hand-over", 1.05), ("start", "start", 1.8),
    ):  # fmt: skip
        assert measured()[row][column] - 0.1 <= found[phase] <= over * measured()[row][column] + 0.1, phase
    assert max(found.values()) == pytest.approx(measured()[row]["plan"], abs=0.06)


@pytest.mark.parametrize("row", measured())
def test_a_run_is_checked_with_the_numbers_of_the_table(row: tuple[str, int]) -> None:
    """The estimate that refuses a run is above what was measured, and what was measured to fit is not refused."""
    name, ranks = row
    model, sizes = MODELS[name], measured()[row]
    made = plan(
        f"actor.data_parallel={ranks}", "actor.sharding=fsdp2", f"train.prompts_per_step={ranks}", *ONE_MICRO_BATCH,
        model=model, gpus=ranks, size=H100_BYTES,
    )  # fmt: skip
    most = max(sizes[column] for column in ("start", "update", "score", "hand-over"))
    assert most - 0.1 < made.memory_bytes["actor"] / GIB <= sizes["plan"] + 9, "logits and the head's gradient on top"
    assert memory_of_phases(made)["main"]["update"] >= made.memory_bytes["actor"]


def test_several_micro_batches_hold_gradient_sums_and_gathered_layers_at_the_same_time() -> None:
    several = ("actor.micro_batch_tokens=16", "actor.data_parallel=8", "actor.sharding=fsdp2", *ONE_MICRO_BATCH)
    one, more = (
        plan(*several, f"train.prompts_per_step={prompts}", *tokens, gpus=8).memory_bytes["actor"]
        for prompts, tokens in ((8, ("actor.micro_batch_tokens=176",)), (64, ()))
    )
    sums = 4 * 7_615_616_512 / 8
    assert 0.75 * sums < more - one <= sums, "less the head, which `one` holds in addition to few gradients"
    with pytest.raises(PlanError, match=r"role 'actor' needs about 8\d\.\d GiB a rank, a device has 80\.0"):
        plan(*several, "train.prompts_per_step=64", model=MODELS["32B"], gpus=8, size=H100_BYTES)


def test_an_embedded_sampler_and_a_reference_add_their_weights_to_the_actors_shard() -> None:
    sizes = (*ONE_MICRO_BATCH, *SHARDED, "train.prompts_per_step=4")
    apart = plan(*sizes).memory_bytes["actor"]
    weights = 2 * 7_615_616_512
    embedded = plan(*sizes, "rollout.backend=hf").memory_bytes["actor"]
    assert embedded - apart > 0
    assert embedded > CONTEXT_BYTES + 14 * 7_615_616_512 / 4 + weights, "all of them, where gradients are otherwise"
    reference = plan(*sizes, "algo.kl.placement=loss", "reference.backend=hf").memory_bytes["reference"]
    gathered = gathered_bytes(EngineConfig(dtype="bfloat16", data_parallel=4), MODELS["7B"], backward=False)
    assert 0 < reference - (CONTEXT_BYTES + weights // 4 + gathered) < 0.2 * GIB, "its part, and a pass over few tokens"
    alone = plan(
        *ONE_MICRO_BATCH, "train.prompts_per_step=4", "algo.kl.placement=loss", "reference.backend=hf"
    ).memory_bytes["reference"]
    assert 0 < alone - (CONTEXT_BYTES + weights) < 0.2 * GIB


def test_of_an_adapter_the_frozen_weights_are_shared_out() -> None:
    engine = EngineConfig(dtype="bfloat16", data_parallel=8, sharding="fsdp2", lora=LoraConfig(enabled=True))
    found = sharded_bytes(engine, MODELS["7B"])
    assert found["sample"] == 2 * 7_615_616_512 // 8
    assert found["update"] - found["sample"] < 6 * GIB


def test_a_sharded_rank_that_rests_on_the_host_holds_nothing_while_others_sample() -> None:
    resting, plain = (
        sharded_bytes(EngineConfig(dtype="bfloat16", data_parallel=8, sharding="fsdp2", offload=offload), MODELS["7B"])
        for offload in (True, False)
    )
    share = 7_615_616_512 / 8
    assert resting["sample"] == 0
    assert plain["score"] - resting["score"] == pytest.approx(12 * share, abs=2)
    assert resting["start"] == plain["start"]
    gathered = plain["update"] - 20 * share
    assert resting["update"] == pytest.approx(8 * share + max(gathered, 12 * share), abs=2), "one of the two at a time"


def plan(*overrides: str, model: ModelFacts = MODELS["7B"], gpus: int = 4, size: int = 200 * GIB) -> RunPlan:
    settings = ("actor.backend=hf", "cluster.device=cuda", "rollout.backend=null_replica", "actor.dtype=bfloat16")
    hooks, loaded = configure([], [*SETTINGS, *settings, *overrides], ["null"])
    facts = Facts(parameters=model.parameters, shape=model.shape, gpus=gpus, gpu_memory_bytes=size)
    return make_plan(loaded, hooks, facts)


def test_host_memory_is_counted_for_what_rests_there_is_handed_over_and_is_saved() -> None:
    parameters = 7_615_616_512
    alone = host_memory(plan())["actor"]
    assert alone == {"hand-over": 2 * parameters, "save": 14 * parameters}
    assert host_memory(plan("actor.offload=true"))["actor"] == {"offload": 14 * parameters, **alone}
    copied = host_memory(plan(*SHARDED))["actor"]
    assert copied["hand-over"] == 2 * 2 * 152064 * 3584, "embeddings and head, the largest unit that is written"
    assert copied["save"] == 14 * parameters, "all ranks together copy everything"
    assert host_memory(plan(*SHARDED, "actor.offload=true"))["actor"]["offload"] == 14 * parameters, "each its part"
    sent = host_memory(replace(plan(*SHARDED), weights_kind="tcp"))["actor"]
    assert sent["hand-over"] == 2 * parameters, "which is kept for replicas that come back"
    sharded = host_memory(replace(plan(*SHARDED), saves_copies=False))["actor"]
    assert 12 * parameters < sharded["save"] < 14 * parameters, "each rank copies a unit at a time"


def test_a_device_of_a_sharded_rank_is_planned_with_its_part_and_what_it_gathers() -> None:
    engine = EngineConfig(dtype="bfloat16", data_parallel=4, sharding="fsdp2")
    parts = sharded_bytes(engine, MODELS["7B"])
    planned = memory_of_phases(plan(*SHARDED, "cluster.pools.main.gpus_per_node=4"))["main"]
    contexts = 2 * CONTEXT_BYTES  # the fullest device has a replica of the rollout, too
    assert planned["save"] == contexts + parts["save"]
    assert planned["sample"] == contexts + parts["sample"]
    assert planned["update"] > contexts + parts["update"], "activations come on top"
    assert contexts + parts["score"] < planned["score"] < planned["update"], "a layer and a chunk of logits on top"
    assert planned["score"] < contexts + parts["score"] + 8 * GIB


def test_a_chosen_micro_batch_leaves_room_for_gathered_weights() -> None:
    overrides = (
        "actor.data_parallel=8",
        "actor.sharding=fsdp2",
        "rollout.max_tokens=2048",
        "data.max_prompt_tokens=512",
    )
    engine = EngineConfig(dtype="bfloat16", data_parallel=8, sharding="fsdp2", gradient_checkpointing=True)
    model, size = MODELS["14B"], 60 * GIB
    facts = Facts(parameters=model.parameters, shape=model.shape, gpus=8, gpu_memory_bytes=size)
    settings = [*SETTINGS, "cluster.device=cuda", "actor.backend=hf", "actor.dtype=bfloat16", *overrides]
    chosen = configure([], settings, ["null"], facts)[1].config.actor.micro_batch_tokens
    room = 0.5 * (size - CONTEXT_BYTES - sharded_bytes(engine, model)["update"])

    def needs(tokens: int) -> int:
        assert model.shape is not None
        return update_bytes(model.shape, engine, MicroBatchSize(tokens, tokens, alone=False), "cuda")

    assert needs(chosen) <= room < needs(chosen + 1024)
