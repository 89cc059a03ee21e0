"""Memory of ranks that share a model out, compared with docs/results/sharding.md."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.config import EngineConfig
from rlcore.config.engines import LoraConfig
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.plan import Facts, RunPlan, make_plan
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
}


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
    assert found["update"] < 80
    assert max(found.values()) < measured()[row]["plan"], "which has the whole weights once more"


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


def plan(*overrides: str) -> RunPlan:
    settings = ("actor.backend=hf", "cluster.device=cuda", "rollout.backend=null_replica", "actor.dtype=bfloat16")
    hooks, loaded = configure([], [*SETTINGS, *settings, *overrides], ["null"])
    model = MODELS["7B"]
    facts = Facts(parameters=model.parameters, shape=model.shape, gpus=4, gpu_memory_bytes=200 * GIB)
    return make_plan(loaded, hooks, facts)


def test_host_memory_is_counted_for_what_rests_there_is_handed_over_and_is_saved() -> None:
    parameters = 7_615_616_512
    alone = host_memory(plan())["actor"]
    assert alone == {"hand-over": 2 * parameters, "save": 14 * parameters}
    assert host_memory(plan("actor.offload=true"))["actor"] == {"offload": 14 * parameters, **alone}
    copied = plan(*SHARDED)
    assert host_memory(copied)["actor"] == alone, "all ranks together copy everything"
    assert host_memory(plan(*SHARDED, "actor.offload=true"))["actor"]["offload"] == 14 * parameters, "each its part"
    sharded = host_memory(replace(copied, saves_copies=False))["actor"]
    assert sharded["hand-over"] == 2 * parameters
    assert 12 * parameters < sharded["save"] < 14 * parameters, "each rank copies a unit at a time"


def test_a_device_of_a_sharded_rank_is_planned_with_its_part_and_what_it_gathers() -> None:
    engine = EngineConfig(dtype="bfloat16", data_parallel=4, sharding="fsdp2")
    parts = sharded_bytes(engine, MODELS["7B"])
    planned = memory_of_phases(plan(*SHARDED, "cluster.pools.main.gpus_per_node=4"))["main"]
    contexts = 2 * CONTEXT_BYTES  # the fullest device has a replica of the rollout, too
    assert planned["save"] == contexts + parts["save"]
    assert planned["sample"] == contexts + parts["sample"]
    assert planned["update"] > contexts + parts["update"], "activations come on top"
