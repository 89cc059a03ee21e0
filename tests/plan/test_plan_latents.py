"""Plans of models whose attention caches latents: sizes in config.json, memory of updates and of caches, seconds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_machines import planned
from test_plan_experts import CARD, DENSE
from test_plan_experts import COMMON as SIZES

from rlcore.config import EngineConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.model_files import model_shape, num_parameters
from rlcore.contracts.requests import Latents, ModelFacts, ModelShape, WorkerRequest
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.plan import WorkerPlan
from rlcore.plan.activations import MicroBatchSize, layer_states_bytes, update_bytes
from rlcore.plan.machine_plan import Lengths, step_size
from rlcore.plan.machine_times import StepLayout, estimate_step
from rlcore.plan.memory import cached_bytes_per_token, working_bytes
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

DEEPSEEK = {
    "model_type": "deepseek_v3", "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
LATENTS = Latents(query_rank=20, key_rank=24, rotated=8, head_size=24, value_size=12)


def write(directory: Path, **settings: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**SIZES, **DEEPSEEK, **settings}), "utf-8")
    return directory


def test_latents_are_read_from_the_configuration(tmp_path: Path) -> None:
    shape = model_shape(write(tmp_path, head_dim=8, num_key_value_heads=2))
    assert shape is not None
    assert shape.latents == LATENTS
    assert (shape.query_size, shape.kv_size, shape.cached_size) == (4 * 24, 4 * 24, 24 + 8)
    direct = model_shape(write(tmp_path, q_lora_rank=None))
    assert direct is not None
    assert direct.latents == replace(LATENTS, query_rank=0)
    plain = model_shape(write(tmp_path, kv_lora_rank=None))
    assert plain is not None
    assert (plain.latents, plain.kv_size, plain.cached_size) == (None, 64, 128)


@pytest.mark.parametrize("name", ["kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
@pytest.mark.parametrize("size", ["large", -1, 1 << 60])
def test_an_odd_size_leaves_the_architecture_unknown(tmp_path: Path, name: str, size: Any) -> None:
    assert model_shape(write(tmp_path, **{name: size})) is None


def test_parameters_are_those_of_the_matrices_between_latents(tmp_path: Path) -> None:
    others = 2 * 300 * 64 + 6 * 3 * 64 * 96
    attention = 64 * 20 + 20 * 4 * 24 + 64 * (24 + 8) + 24 * 4 * (16 + 12) + 4 * 12 * 64
    assert num_parameters(write(tmp_path)) == others + 6 * attention
    queries = 64 * 4 * 24 - 64 * 20 - 20 * 4 * 24
    assert num_parameters(write(tmp_path, q_lora_rank=None)) == others + 6 * (attention + queries)


@pytest.mark.parametrize(
    ("dtype", "of_norms", "itemsize", "expanded"), [("float32", 3, 4, 0), ("bfloat16", 4, 2, 4 * (16 + 12))]
)
def test_an_update_keeps_the_norms_of_latents_and_an_output_without_padding(
    tmp_path: Path, dtype: Any, of_norms: int, itemsize: int, expanded: int
) -> None:
    """In half precision the most is held in the backward pass of attention: with gradients of keys and values
    together."""
    shape = model_shape(write(tmp_path))
    assert shape is not None
    engine, size = EngineConfig(dtype=dtype), MicroBatchSize(1000, 1, alone=False)
    found = [update_bytes(kind, engine, size, "cpu") for kind in (replace(shape, latents=None), shape)]
    kept = 6 * (of_norms * (20 + 24) + 4 + 4 * 12)
    assert found[1] - found[0] == itemsize * 1000 * (kept + expanded)


def shapes(directory: Path) -> tuple[ModelShape, ModelShape]:
    shape = model_shape(write(directory))
    assert shape is not None
    return replace(shape, latents=None), shape


@pytest.mark.parametrize(("rows", "computed"), [(1, 1000 * (2 * 64 + 5 * 96 + 112)), (64, 64 * 150 * (32 + 112 + 96))])
def test_the_embedded_rollout_holds_the_latents_of_rows_and_expands_those_of_a_layer(
    tmp_path: Path, rows: int, computed: int
) -> None:
    """In a pass over prompts of 1000 tokens, or in a step of 64 rows of 150 tokens."""
    settings = ("data.max_prompt_tokens=100", "rollout.max_tokens=50", f"rollout.max_rows={rows}")
    config = configure([], [*SETTINGS, *settings], ["null"])[1].config
    worker = WorkerPlan(WorkerRequest(ROLLOUT, "hf", embedded_in=ACTOR, cached_tokens=1000), RolloutWorker, "", "")
    held = [working_bytes(config, worker, ModelFacts(0, shape)) for shape in shapes(tmp_path)]
    feed_forward = 3 * 96 * 1000
    prefilled = 4 * 64 * 1000 + feed_forward
    more = max(computed + feed_forward * (rows == 1), prefilled) - prefilled
    assert held[1] - held[0] == 4 * (more - 1000 * 6 * (192 - 32))


def test_a_pass_without_gradients_holds_the_queries_keys_and_values_of_a_layer(tmp_path: Path) -> None:
    size = MicroBatchSize(1000, 1, alone=False)
    held = [layer_states_bytes(shape, EngineConfig(dtype="float32"), size) for shape in shapes(tmp_path)]
    assert held[1] - held[0] == 4 * 1000 * (2 * 64 + 5 * 96 + 4 * (16 + 12) - 8 * 64)


def test_caches_hold_latents_in_memory_and_in_the_time_to_read_them(tmp_path: Path) -> None:
    plain, latent = shapes(tmp_path)
    assert cached_bytes_per_token(plain, "bfloat16") - cached_bytes_per_token(latent, "bfloat16") == 6 * 2 * (192 - 32)
    row = replace(DENSE, groups=1, samples=1, prompt=1, longest=1000)
    seconds = [
        estimate_step(size, StepLayout(), CARD).seconds["sample"] for size in (row, replace(row, cached_size=576))
    ]
    read = 48 * 2 * (2 * 512 - 576) * (1 + 1000 / 2)
    assert seconds[0] - seconds[1] == pytest.approx(1000 * read / (0.7 * 3350e9))


def test_a_plan_knows_the_cache_of_its_model_in_its_estimate(tmp_path: Path) -> None:
    plan, (_, latent) = planned("cluster.device=cuda"), shapes(tmp_path)
    assert plan.facts.shape is not None
    other = replace(plan, facts=replace(plan.facts, shape=replace(plan.facts.shape, latents=latent.latents)))
    assert [step_size(made, Lengths()).cached_size for made in (plan, other)] == [2 * 256, 32]
