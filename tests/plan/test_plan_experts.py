"""Plans of mixtures of experts: experts in config.json, the weights that a token uses, and the seconds of a step."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_machines import planned

from rlcore.contracts.model_files import model_shape, num_parameters
from rlcore.contracts.requests import Experts, ModelShape
from rlcore.plan.experts import expert_parameters, layer_values, used_parameters
from rlcore.plan.machine_cards import machine_of
from rlcore.plan.machine_plan import Lengths, step_size
from rlcore.plan.machine_times import StepLayout, StepSize, estimate_step
from rlcore.plan.step_time import expected_step_time

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 300,
}  # fmt: skip
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
FINE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
NONE: dict[str, Any] = {}


def shape_of(directory: Path, kind: str, **settings: Any) -> ModelShape:
    (directory / "config.json").write_text(json.dumps({**COMMON, "model_type": kind, **settings}), "utf-8")
    shape = model_shape(directory)
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("qwen3_moe", EIGHT | FINE, Experts(8, 2, 32, 6)),
        ("qwen3_moe", {**FINE, "num_local_experts": 8}, Experts(8, 2, 32, 6)),
        ("qwen3_moe", EIGHT | FINE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, Experts(8, 2, 32, 2)),
        ("qwen2_moe", EIGHT | FINE | {"shared_expert_intermediate_size": 48}, Experts(8, 2, 32, 6, 48)),
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, Experts(8, 2, 96, 6)),
        (
            "deepseek_v3",
            {**FINE, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 4},
            Experts(8, 2, 32, 2, 64),
        ),
        (
            "glm4_moe_lite",
            {**FINE, "n_routed_experts": 8, "mlp_layer_types": ["dense", *["sparse"] * 5]},
            Experts(8, 2, 32, 5),
        ),
        (
            "llama4_text",
            {"num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            Experts(8, 1, 96, 3, 96, 8),
        ),
        (
            "llama4_text",
            {"num_local_experts": 8, "num_experts_per_tok": 1, "moe_layers": [1, 7]},
            Experts(8, 1, 96, 1, 96, 8),
        ),
        ("llama4_text", {"num_local_experts": 8, "num_experts_per_tok": 1, "moe_layers": []}, None),
        ("llama", NONE, None),
        ("doge", EIGHT, None),
        ("qwen3_moe", EIGHT | {"num_experts_per_tok": 9}, None),
        ("qwen3_moe", EIGHT | {"moe_intermediate_size": "large"}, None),
        ("qwen3_moe", EIGHT | {"mlp_only_layers": 3}, None),
        ("qwen3_moe", EIGHT | {"moe_intermediate_size": -1}, None),
        ("qwen2_moe", EIGHT | {"shared_expert_intermediate_size": -1}, None),
        ("qwen3_moe", EIGHT | {"num_experts": 1 << 60}, None),
        ("qwen3_moe", EIGHT | {"num_hidden_layers": 1 << 20}, None),
        ("deepseek_v3", {**FINE, "n_routed_experts": 8}, Experts(8, 2, 32, 3)),
        ("deepseek_v3", {**FINE, "n_routed_experts": 8, "first_k_dense_replace": 0}, Experts(8, 2, 32, 6)),
        ("glm4_moe", {**FINE, "n_routed_experts": 8}, Experts(8, 2, 32, 5)),
    ],
)
def test_experts_are_read_from_the_configuration_and_unknown_ones_are_none(
    tmp_path: Path, kind: str, settings: dict[str, Any], expected: Experts | None
) -> None:
    assert shape_of(tmp_path, kind, **settings).experts == expected


def test_layers_without_experts_have_the_size_that_llama_4_states_for_them(tmp_path: Path) -> None:
    assert shape_of(tmp_path, "llama4_text", intermediate_size_mlp=80).inner_size == 80
    assert shape_of(tmp_path, "llama", intermediate_size_mlp=80).inner_size == 96


def test_the_estimate_of_parameters_counts_all_experts_and_routers(tmp_path: Path) -> None:
    shape_of(tmp_path, "llama")
    dense = num_parameters(tmp_path)
    shape_of(tmp_path, "qwen2_moe", **EIGHT | FINE | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0]})
    mixture = num_parameters(tmp_path)
    assert mixture is not None
    assert dense is not None
    assert mixture - dense == 5 * 64 * (3 * (8 * 32 + 48 - 96) + 8)


MIXTURE = Experts(number=8, per_token=2, inner_size=10, layers=4, shared_size=5)
ROUTED = 4 * 8 * 3 * 16 * 10


def test_a_token_uses_its_experts_and_many_tokens_use_all() -> None:
    assert used_parameters(100_000, 16, None) == used_parameters(100_000, 16, None, 64) == 100_000
    assert used_parameters(100_000, 16, MIXTURE) == pytest.approx(100_000 - ROUTED * 3 / 4)
    assert used_parameters(100_000, 16, MIXTURE, 2) == pytest.approx(100_000 - ROUTED * 9 / 16)
    assert used_parameters(100_000, 16, MIXTURE, 500) == pytest.approx(100_000)
    assert expert_parameters(100_000, 16, MIXTURE) == ROUTED
    assert expert_parameters(ROUTED, 16, MIXTURE) == 0, "files with packed weights"
    assert used_parameters(ROUTED, 16, MIXTURE) == ROUTED


def test_values_of_a_layer_are_those_of_the_experts_that_compute_a_token() -> None:
    assert layer_values(6, 16, 40, None) == 4 * 40
    chosen = 2 * (4 * 10 + 2 * 16) + 4 * 5
    assert layer_values(6, 16, 40, MIXTURE) == pytest.approx((4 * chosen + 2 * 4 * 40) / 6)
    every = 8 * (4 * 10 + 2 * 16) + 4 * 5
    assert layer_values(4, 16, 40, replace(MIXTURE, computed=8)) == every


DENSE = StepSize(30 * 10**9, 48, 2048, 4096, 512, 64, 16, 200, 1000, 4000, 6144, 151936)
A3B = replace(DENSE, experts=Experts(number=128, per_token=8, inner_size=768, layers=48))
CARD = machine_of("8xH100-80GB")
USED = 30e9 - 48 * 120 * 3 * 2048 * 768


def test_operations_count_what_a_token_uses_and_state_counts_everything() -> None:
    """The seconds of an update that products take, and those that the optimizer and summed gradients take."""
    one, two = StepLayout(8), StepLayout(8, updates=2)
    steps = [estimate_step(size, two, CARD).seconds["update"] - estimate_step(size, one, CARD).seconds["update"]
             for size in (DENSE, A3B)]  # fmt: skip
    assert steps[0] == pytest.approx(steps[1])
    assert estimate_step(DENSE, one, CARD).seconds["hand-over"] == estimate_step(A3B, one, CARD).seconds["hand-over"]
    tokens = 64 * 200 + 64 * 16 * 1000
    few = replace(A3B, experts=Experts(128, 8, 768, 48, shared_size=1536))
    assert pytest.approx(A3B.used()) == USED
    saved = 2 * (30e9 - USED) * tokens / (0.5 * 989e12) / 8
    moved = 2 * 2 * 48 * tokens * (layer_values(48, 2048, 6144, A3B.experts) - 4 * 6144) / (0.7 * 3350e9) / 8
    scores = [estimate_step(size, StepLayout(8, scoring_passes=1), CARD).seconds["score"] for size in (DENSE, A3B, few)]
    assert scores[0] - scores[1] == pytest.approx(saved - moved)
    assert scores[2] > scores[1], "shared experts write values, too"


def test_updates_count_every_expert_that_transformers_computes() -> None:
    every = replace(A3B, experts=replace(A3B.experts, computed=128))
    assert every.used() == A3B.used()
    tokens = 64 * 200 + 64 * 16 * 1000
    values = layer_values(48, 2048, 6144, every.experts) - layer_values(48, 2048, 6144, A3B.experts)
    scores = [estimate_step(size, StepLayout(8, scoring_passes=1), CARD).seconds["score"] for size in (A3B, every)]
    more = 2 * (30e9 - USED) * tokens / (0.5 * 989e12) / 8 + 2 * 2 * 48 * tokens * values / (0.7 * 3350e9) / 8
    assert scores[1] - scores[0] == pytest.approx(more)


def test_decoding_reads_the_experts_of_its_rows_and_all_of_them_for_many_rows() -> None:
    single, many = (replace(DENSE, groups=groups, samples=1, prompt=1, longest=1000) for groups in (1, 64))
    mixed_one, mixed_many = (replace(size, experts=A3B.experts) for size in (single, many))
    seconds = [estimate_step(size, StepLayout(), CARD).seconds["sample"]
               for size in (single, mixed_one, many, mixed_many)]  # fmt: skip
    per_token = 1000 * 2 * (30e9 - USED) / (0.7 * 3350e9)
    prefill = 2 * (30e9 - USED) / (0.5 * 989e12)
    assert seconds[0] - seconds[1] == pytest.approx(per_token + prefill)
    rest = (1 - 8 / 128) ** 64
    unread = 1000 * 2 * (30e9 - USED) / (1 - 8 / 128) * rest / (0.7 * 3350e9)
    assert seconds[2] - seconds[3] == pytest.approx(unread + 64 * prefill)


def test_decoding_of_so_many_rows_that_products_bound_it_counts_what_a_token_uses() -> None:
    rows = replace(A3B, groups=4096, samples=1, prompt=1, response=1, longest=1, kv_size=1, vocabulary=1)
    layout = StepLayout(max_rows=4096)
    found = [estimate_step(size, layout, CARD) for size in (replace(rows, experts=None), rows)]
    assert [step.bound["sample"] for step in found] == ["operations", "operations"]
    saved = found[0].seconds["sample"] - found[1].seconds["sample"]
    assert saved == pytest.approx(2 * 2 * 4096 * (30e9 - USED) / (0.5 * 989e12)), "of a prefill and of a decoding step"


MIXED = StepSize(
    # 3800 in each of two dense layers, 2000 in two others without their experts, 9600 in experts, and two tables.
    parameters=2 * 3800 + 2 * 2000 + 9600 + 2 * 5000,
    layers=4,
    hidden_size=10,
    query_size=30,
    kv_size=10,
    inner_size=100,
    vocabulary=500,
    experts=Experts(number=8, per_token=2, inner_size=20, layers=2, shared_size=40),
    groups=1,
    samples=1,
    prompt=1,
    response=1,
    longest=1,
)


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        (StepLayout(2), 15600),
        # The largest shares of a dense layer, of one with experts, and of the tables; half of the experts.
        (StepLayout(2, sharded=True), 2 * 2000 + 2 * 1000 + 5000 + 9600 / 2),
        (StepLayout(4, sharded=True), 2 * 1000 + 2 * 600 + 5000 + 9600 / 4),
    ],
)
def test_ranks_share_the_experts_of_a_layer_equally(layout: StepLayout, copied: float) -> None:
    seconds = estimate_step(MIXED, replace(layout, weight_sync="shm"), CARD).seconds["hand-over"]
    assert seconds == pytest.approx((copied + MIXED.parameters) * 2 / 8e9, rel=1e-9)


def test_a_plan_knows_the_experts_of_its_model_in_both_of_its_estimates() -> None:
    plan = planned("cluster.device=cuda")
    shape = plan.facts.shape
    assert shape is not None
    experts = Experts(8, 2, 1024, 28)
    mixed = replace(plan, facts=replace(plan.facts, shape=replace(shape, experts=experts)))
    assert (step_size(plan, Lengths()).experts, step_size(mixed, Lengths()).experts) == (None, experts)
    on_cpu = planned("cluster.device=cpu")
    other = replace(on_cpu, facts=replace(on_cpu.facts, shape=replace(shape, experts=experts)))
    times = [expected_step_time(made, 30) for made in (on_cpu, other)]
    assert times[0] is not None
    assert times[1] is not None
    used = used_parameters(1_540_000_000, 1536, experts) / 1_540_000_000
    assert times[1].sampling_s == pytest.approx(used * times[0].sampling_s)
    assert times[1].updates_s == pytest.approx(used * times[0].updates_s)
    every = replace(on_cpu, facts=replace(on_cpu.facts, shape=replace(shape, experts=replace(experts, computed=8))))
    all_computed = expected_step_time(every, 30)
    assert all_computed is not None
    assert all_computed.updates_s == pytest.approx(times[0].updates_s)
    assert all_computed.sampling_s == times[1].sampling_s
    assert "1540 M parameters," in times[0].assumed
    assert f"{used * 1540:.0f} M parameters per token," in times[1].assumed
