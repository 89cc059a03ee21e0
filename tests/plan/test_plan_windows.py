"""Plans of models with a sliding window: prompts shared where rows fit it, and memory of masks where they do not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_machines import GIB, QWEN, loaded, machine, planned

from rlcore.config import EngineConfig
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.model_files import model_shape
from rlcore.contracts.reference import ReferenceWorker
from rlcore.contracts.requests import ModelFacts, ModelShape, Role, WorkerRequest
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, WorkerPlan, make_plan
from rlcore.plan.activations import (
    MicroBatchSize,
    forward_bytes,
    largest_micro_batch,
    last_layer_bytes,
    longest_row,
    masked_row,
    sized,
    update_bytes,
)
from rlcore.plan.memory import working_bytes
from rlcore.plan.mesh import _needed_bytes
from rlcore.plan.prefixes import most_tokens, plan_shared_prefixes
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.types import SharedPrefix

MISTRAL = ModelShape(
    "mistral", 4, 8, 16, 4, 100, full_attention=False, window=1000, windowed_layers=4, full_in_window=True
)
LENGTHS = ("data.max_prompt_tokens=400", "rollout.max_tokens=600")
LARGE = replace(
    QWEN,
    layers=24,
    hidden_size=896,
    inner_size=4864,
    kv_size=128,
    full_attention=False,
    window=4096,
    windowed_layers=24,
    full_in_window=True,
)
LONG = ("data.max_prompt_tokens=1024", "actor.gradient_checkpointing=false", "actor.micro_batch_tokens=1024")


def plan(*overrides: str, shape: ModelShape = MISTRAL, **facts: Any) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, Facts(shape=shape, **facts))


def way_and_note(*overrides: str, shape: ModelShape = MISTRAL) -> tuple[SharedPrefix, str]:
    made = plan(*overrides, shape=shape)
    return made.workers[0].shared_prefix, next((note for note in made.notes if note.startswith("actor: prompts")), "")


def test_prompts_are_shared_where_the_longest_row_fits_the_window() -> None:
    assert way_and_note(*LENGTHS) == (SharedPrefix.TREE, "")
    way, note = way_and_note("data.max_prompt_tokens=400", "rollout.max_tokens=601")
    assert way is SharedPrefix.NONE
    assert note.endswith(
        "because not every layer of 'mistral' sees all tokens before: its sliding window has 1000 tokens, and a row "
        "has up to 1001 (data.max_prompt_tokens + rollout.max_tokens)"
    )
    assert way_and_note(*LENGTHS, "model.attention=eager")[0] is SharedPrefix.NONE
    assert way_and_note(*LENGTHS, shape=replace(MISTRAL, model_type="gpt_oss"))[0] is SharedPrefix.NONE
    assert way_and_note(*LENGTHS, shape=replace(MISTRAL, full_in_window=False))[0] is SharedPrefix.NONE, "capped scores"
    assert way_and_note(*LENGTHS, shape=replace(MISTRAL, model_type="gptj"))[0] is SharedPrefix.NONE, "no cache"


def test_a_named_tree_is_accepted_for_rows_that_fit_and_a_cache_never() -> None:
    tree, cache = "actor.shared_prefix=tree", "actor.shared_prefix=cache"
    assert way_and_note(*LENGTHS, tree)[0] is SharedPrefix.TREE
    longer = rf"^{tree}: not every layer .* up to 1056 .*choose actor\.shared_prefix=none or fewer tokens$"
    with pytest.raises(PlanError, match=longer):
        plan("data.max_prompt_tokens=456", "rollout.max_tokens=600", tree)
    with pytest.raises(PlanError, match=rf"^{cache}: not every layer .*choose actor\.shared_prefix=none$"):
        plan(*LENGTHS, cache)


def test_rows_of_other_agents_may_be_longer_so_they_share_no_prompts() -> None:
    shape = MISTRAL
    assert shape.sees_all(1000)
    assert not shape.sees_all(1001)
    assert not shape.sees_all(0)
    assert replace(shape, full_attention=True).sees_all(0)
    config = configure([], [*SETTINGS, *LENGTHS], ["null"])[1].config
    assert most_tokens(config) == 1000
    assert most_tokens(replace(config, rollout=replace(config.rollout, agent="other"))) == 0
    request = WorkerRequest(ACTOR, "hf", engine=EngineConfig(), shared_prefix="planned")
    for most, way in ((1000, SharedPrefix.TREE), (0, SharedPrefix.NONE)):
        [worker], _ = plan_shared_prefixes([WorkerPlan(request, ActorWorker, "", "")], Facts(shape=shape), "sdpa", most)
        assert worker.shared_prefix is way


def test_masks_are_made_for_rows_that_fill_the_window_and_are_computed_one_by_one() -> None:
    def masked(*overrides: str, shape: ModelShape = MISTRAL, way: SharedPrefix | None = SharedPrefix.NONE) -> int:
        config = configure([], [*SETTINGS, "data.max_prompt_tokens=400", *overrides], ["null"])[1].config
        return masked_row(config, shape, way)

    assert masked("rollout.max_tokens=599") == 0
    assert masked("rollout.max_tokens=600") == 1000
    assert masked("rollout.max_tokens=600", way=SharedPrefix.TREE) == 0
    assert masked("rollout.max_tokens=600", way=None) == 0, "a tree will be planned"
    assert masked("rollout.max_tokens=601", way=None) == 1001
    assert masked("rollout.max_tokens=700", shape=replace(MISTRAL, windowed_layers=0)) == 0
    flash = ("model.attention=flash_attention_2", "cluster.device=cuda", "actor.dtype=bfloat16")
    assert masked("rollout.max_tokens=700", *flash) == 0, "its kernel has windows"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_windowed_layer_keeps_a_mask_and_with_checkpointing_one_at_a_time(dtype: str) -> None:
    itemsize, size, masked = 4 if dtype == "float32" else 2, MicroBatchSize(3000, 10, alone=False), 1000
    shape = replace(MISTRAL, windowed_layers=3)
    for count, checkpointing in ((3, False), (1, True)):
        engine = EngineConfig(dtype=dtype, gradient_checkpointing=checkpointing)
        more = update_bytes(shape, engine, size, "cpu", masked) - update_bytes(shape, engine, size, "cpu")
        assert more == count * 3000 * masked * itemsize + masked**2
    end = last_layer_bytes(shape, engine, size, "cpu", masked) - last_layer_bytes(shape, engine, size, "cpu")
    assert end == 3000 * masked * itemsize + masked**2


@pytest.mark.parametrize(("tokens", "free"), [(15 * 1024, 40), (31 * 1024, 79)])
def test_masks_that_do_not_fit_at_16k_and_32k_tokens_are_refused_with_the_settings_that_help(
    tokens: int, free: int
) -> None:
    settings = (*LONG, f"rollout.max_tokens={tokens}", "actor.shared_prefix=none")
    windowed = machine(1, parameters=494_032_768, shape=LARGE, gpu_free_bytes=free * GIB, memory_bytes=256 * GIB)
    planned(*settings, facts=replace(windowed, shape=replace(LARGE, full_attention=True, windowed_layers=0)))
    with pytest.raises(PlanError) as caught:
        planned(*settings, facts=windowed)
    text = str(caught.value)
    assert text.startswith("role 'actor' needs about ")
    assert "rollout.max_tokens" in text
    assert "actor.gradient_checkpointing=true" in text
    assert "model.attention=flash_attention_2" in text
    planned(*settings, "actor.gradient_checkpointing=true", facts=windowed)
    planned(*settings, "model.attention=flash_attention_2", facts=windowed)


LLAMA4 = {"model_type": "llama4_text", "attention_chunk_size": 64}
QWEN2 = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("settings", "window", "layers", "only_windows"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64, 8, True),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0, False),
        (QWEN2 | {"max_window_layers": 3}, 64, 5, True),
        (QWEN2 | {"layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 2}, 64, 2, True),
        (QWEN2 | {"use_sliding_window": False}, 0, 0, False),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 4}, 64, 6, True),
        ({"model_type": "gemma2", "sliding_window": 64, "attn_logit_softcapping": 50.0}, 64, 8, False),
        (QWEN2 | {"layer_types": ["linear_attention"] * 6 + ["sliding_attention"] * 2}, 64, 2, False),
        (LLAMA4 | {"layer_types": ["chunked_attention"] * 5 + ["full_attention"] * 3}, 64, 5, False),
        (LLAMA4 | {"no_rope_layers": [1, 1, 0, 1, 1, 0, 1, 1]}, 64, 6, False),
        (LLAMA4 | {"no_rope_layers": [], "no_rope_layer_interval": 3}, 64, 6, False),
        (LLAMA4, 64, 6, False),
        (LLAMA4 | {"layer_types": ["full_attention"] * 8}, 0, 0, False),
    ],
)
def test_windows_are_read_from_config_json(
    tmp_path: Path, settings: dict[str, Any], window: int, layers: int, only_windows: bool
) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 8, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(sizes | settings))
    shape = model_shape(tmp_path)
    assert shape is not None
    assert (shape.window, shape.windowed_layers, shape.full_in_window) == (window, layers, only_windows)
    assert shape.full_attention is not bool(window)


@pytest.mark.usefixtures("vllm")
def test_the_defaults_of_a_gpu_leave_room_for_masks() -> None:
    def chosen(tokens: int, shape: ModelShape) -> tuple[str, int]:
        facts = machine(1, parameters=494_032_768, shape=shape, gpu_free_bytes=60 * GIB, memory_bytes=256 * GIB)
        settings = ("data.max_prompt_tokens=1024", "actor.gradient_checkpointing=false")
        config = loaded(*settings, f"rollout.max_tokens={tokens}", facts=facts).config
        return config.rollout.backend, config.actor.micro_batch_tokens

    full = replace(LARGE, full_attention=True, window=0, windowed_layers=0)
    assert chosen(15 * 1024, full) == ("vllm", 16384)
    backend, micro_batch_tokens = chosen(15 * 1024, LARGE)
    assert backend == "vllm"
    assert micro_batch_tokens < 12 * 1024
    assert chosen(31 * 1024, full)[0] == "vllm"
    assert chosen(31 * 1024, LARGE)[0] == "hf", "an update with masks does not fit next to sleeping replicas"
    assert chosen(2 * 1024, LARGE) == chosen(2 * 1024, full), "rows fit the window"


def test_a_copy_of_the_weights_for_each_node_has_room_for_masks() -> None:
    config = configure([], [*SETTINGS, "rollout.max_tokens=31744"], ["null"])[1].config
    full, masked = (
        _needed_bytes(config, Facts(parameters=10**6, shape=shape), 1)
        for shape in (replace(LARGE, full_attention=True, windowed_layers=0), LARGE)
    )
    assert full is not None
    assert masked is not None
    assert masked - full > longest_row(config) ** 2


def test_passes_without_gradients_have_the_masks_of_one_layer() -> None:
    settings = ("data.max_prompt_tokens=456", "rollout.max_tokens=600", "actor.micro_batch_tokens=4224")
    config = configure([], [*SETTINGS, *settings], ["null"])[1].config
    full = replace(MISTRAL, full_attention=True, windowed_layers=0)
    of_masks = 4224 * 1056 * 4 + 1056**2
    for way, more in ((SharedPrefix.NONE, of_masks), (SharedPrefix.TREE, 0)):
        needed = [forward_bytes(config, config.actor, way, shape) for shape in (full, MISTRAL)]
        assert needed[1] - needed[0] == more
    request = WorkerRequest(
        Role("judge", ReferenceWorker), "hf", engine=config.actor, trains=False, settings="plugins.judge"
    )
    worker = WorkerPlan(request, ReferenceWorker, "", "")
    scored = [working_bytes(config, worker, ModelFacts(1000, shape)) for shape in (full, MISTRAL)]
    assert scored[1] - scored[0] == of_masks


@pytest.mark.parametrize(("prompt", "more"), [(999, 0), (1000, 8192 * 1000 * 4 + 1000**2), (9000, 9000**2 * 5)])
def test_the_prompts_of_the_embedded_rollout_have_masks_if_they_fill_the_window(prompt: int, more: int) -> None:
    config = configure([], [*SETTINGS, f"data.max_prompt_tokens={prompt}"], ["null"])[1].config
    worker = WorkerPlan(WorkerRequest(ROLLOUT, "hf", embedded_in=ACTOR, cached_tokens=10_000), RolloutWorker, "", "")
    full = replace(MISTRAL, full_attention=True, windowed_layers=0)
    sampled = [working_bytes(config, worker, ModelFacts(0, shape)) for shape in (full, MISTRAL)]
    assert sampled[1] - sampled[0] == more


def test_models_with_chunks_share_no_prompts_and_make_masks() -> None:
    chunked = replace(MISTRAL, model_type="llama4_text", full_in_window=False)
    assert way_and_note(*LENGTHS, shape=chunked)[0] is SharedPrefix.NONE
    with pytest.raises(
        PlanError, match=r"^actor\.shared_prefix=tree: not every layer of 'llama4_text' sees all tokens"
    ):
        plan(*LENGTHS, "actor.shared_prefix=tree", shape=chunked)
    config = configure([], [*SETTINGS, *LENGTHS], ["null"])[1].config
    assert masked_row(config, chunked) == masked_row(config, chunked, SharedPrefix.NONE) == 1000


@pytest.mark.parametrize(("dtype", "kept", "passing"), [("float32", 4, 8), ("bfloat16", 6, 10)])
def test_eager_attention_keeps_scores_in_updates_and_has_those_of_one_layer_in_passes(
    dtype: Any, kept: int, passing: int
) -> None:
    settings = ("data.max_prompt_tokens=456", "rollout.max_tokens=600", "actor.micro_batch_tokens=4224")
    shape = replace(MISTRAL, full_attention=True, window=0, windowed_layers=0, full_in_window=False, heads=16)
    config, eager = (
        configure([], [*SETTINGS, *settings, f"model.attention={attention}"], ["null"])[1].config
        for attention in ("sdpa", "eager")
    )
    assert masked_row(eager, MISTRAL, SharedPrefix.NONE) == 0, "layers share masks"
    plain, size = (sized(found, 4224, 1056) for found in (config, eager))
    assert (plain.pairs, size.pairs) == (0, 4224 * 1056)
    layers = []
    for checkpointing in (False, True):
        engine = EngineConfig(dtype=dtype, gradient_checkpointing=checkpointing)
        more = update_bytes(shape, engine, size, "cpu") - update_bytes(shape, engine, plain, "cpu")
        layers.append((more / (16 * size.pairs) - 12) / kept)
        end = last_layer_bytes(shape, engine, size, "cpu") - last_layer_bytes(shape, engine, plain, "cpu")
        assert end == pytest.approx(12 * 16 * size.pairs, rel=0.05)
    assert layers[0] == pytest.approx(3, abs=0.2), "of the fourth layer the backward pass has all 12 bytes"
    assert layers[1] == pytest.approx(0, abs=0.2)
    one = EngineConfig(dtype=dtype, micro_batch_tokens=4224)
    scored = [forward_bytes(found, one, SharedPrefix.NONE, shape) for found in (config, eager)]
    assert scored[1] - scored[0] == pytest.approx(passing * 16 * size.pairs, rel=0.05)
    request = WorkerRequest(Role("judge", ReferenceWorker), "hf", engine=one, trains=False, settings="plugins.judge")
    worker = WorkerPlan(request, ReferenceWorker, "", "")
    judged = [working_bytes(found, worker, ModelFacts(1000, shape)) for found in (config, eager)]
    assert judged[1] - judged[0] == pytest.approx(passing * 16 * size.pairs, rel=0.05)


def test_the_prompts_of_the_embedded_rollout_have_scores_with_eager_attention() -> None:
    worker = WorkerPlan(WorkerRequest(ROLLOUT, "hf", embedded_in=ACTOR, cached_tokens=10_000), RolloutWorker, "", "")
    full = replace(MISTRAL, full_attention=True, window=0, windowed_layers=0, heads=16)
    sampled = [
        working_bytes(
            configure([], [*SETTINGS, "data.max_prompt_tokens=1000", f"model.attention={attention}"], ["null"])[
                1
            ].config,
            worker,
            ModelFacts(0, full),
        )
        for attention in ("sdpa", "eager")
    ]
    assert sampled[1] - sampled[0] == pytest.approx(8 * 16 * 8192 * 1000, rel=0.05)


def test_a_cache_has_the_pairs_of_rows_after_their_prompts_and_of_the_prompts() -> None:
    settings = (
        *("data.max_prompt_tokens=10", "rollout.max_tokens=6", "rollout.samples_per_prompt=4"),
        "model.attention=eager",
    )
    config = configure([], [*SETTINGS, *settings, "train.prompts_per_step=2"], ["null"])[1].config
    engine = EngineConfig(micro_batch_tokens=1000)
    assert largest_micro_batch(config, engine, SharedPrefix.CACHE).pairs == 8 * 5 * 15 + 2 * 10 * 10
    assert largest_micro_batch(config, engine, SharedPrefix.NONE).pairs == 8 * 16 * 16
