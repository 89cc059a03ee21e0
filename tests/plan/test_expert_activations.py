"""The numbers that layers with experts keep, by hand, and the gradients that exist until a micro-batch ends.

`tests/engines/test_planned_memory.py` compares plans with the tensors of real updates.
"""

from dataclasses import replace
from typing import Any

import pytest

from rlcore.config import EngineConfig, LoraConfig
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.requests import Experts, ModelFacts, ModelShape, WorkerRequest
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.plan import WorkerPlan
from rlcore.plan.activations import (
    MicroBatchSize,
    largest_micro_batch,
    last_layer_bytes,
    layer_states_bytes,
    update_bytes,
)
from rlcore.plan.experts import ROUTED, FeedForward, feed_forwards
from rlcore.plan.memory import working_bytes
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

DENSE = ModelShape("mixtral", 6, 16, 40, 16, 100, full_attention=True, heads=2)
EXPERTS = Experts(number=8, per_token=2, inner_size=10, layers=6)
MIXTURE = replace(DENSE, experts=EXPERTS)
TOKENS = 1000
ROUTER = TOKENS * (8 + ROUTED * 2)
INPUTS, INNER = TOKENS * 2 * 16, TOKENS * 2 * 10


def mixture(
    shape: ModelShape = MIXTURE, itemsize: int = 4, *, trained: bool = True, tokens: int = TOKENS
) -> FeedForward:
    return feed_forwards(shape, tokens, itemsize, trained=trained)[-1]


def with_experts(model_type: str = "mixtral", **changes: Any) -> ModelShape:
    return replace(MIXTURE, model_type=model_type, experts=replace(EXPERTS, **changes))


def test_a_dense_model_has_one_kind_of_layers_and_a_mixed_one_two() -> None:
    [dense] = feed_forwards(DENSE, TOKENS, 4, trained=True)
    assert dense == FeedForward(6, 4 * TOKENS * 40, 2 * TOKENS * 40, 3 * TOKENS * 40)
    assert [kind.layers for kind in feed_forwards(MIXTURE, TOKENS, 4, trained=True)] == [6]
    first, second = feed_forwards(with_experts(layers=4), TOKENS, 4, trained=True)
    assert (first, second) == (replace(dense, layers=2), replace(mixture(), layers=4))


def test_an_expert_keeps_its_inputs_its_outputs_and_four_numbers_per_inner_unit() -> None:
    assert mixture().kept == 4 * INNER + 2 * INPUTS + ROUTER
    assert mixture(itemsize=2).kept - mixture().kept == ROUTER, "routers compute in float32"
    every = mixture(with_experts(computed=8))
    assert every.kept == TOKENS * 8 * (4 * 10 + 2 * 16) + TOKENS * (8 + ROUTED * 8)
    assert mixture(with_experts(shared_size=5)).kept - mixture().kept == TOKENS * (4 * 5 + 16)
    assert mixture(with_experts("gpt_oss")).kept - mixture().kept == 3 * INNER


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite"])
def test_routers_of_deepseek_keep_their_input_in_float32_in_half_precision_only(model_type: str) -> None:
    other = with_experts(model_type)
    assert mixture(other).kept == mixture().kept
    assert mixture(other, 2).kept - mixture(itemsize=2).kept == 2 * TOKENS * 16


def test_temporaries_are_gradients_of_values_or_of_trained_experts() -> None:
    assert mixture().backward == 3 * INPUTS
    assert mixture(with_experts(inner_size=100)).backward == 4 * 10 * INNER - INPUTS, "gate and up"
    assert mixture(with_experts(shared_size=100)).backward == 2 * 100 * TOKENS, "shared experts"
    matrix = 8 * 16 * 10
    assert mixture(tokens=1).backward == 2 * matrix - 2 * 2 * 10, "gate and up together"
    assert mixture(tokens=1, trained=False).backward == 3 * 2 * 16
    middle = 48
    assert mixture(tokens=middle).backward == 3 * middle * 2 * 16
    single = with_experts(per_token=1, inner_size=20)
    assert mixture(single, tokens=43).backward == 43 * 20 + 2 * matrix, "the last matrix"


def test_a_pass_without_gradients_holds_the_inputs_of_experts_and_the_larger_of_two_moments() -> None:
    assert mixture().forward == INPUTS + 3 * INPUTS
    assert mixture(with_experts(inner_size=100)).forward == INPUTS + 4 * 10 * INNER
    assert mixture(with_experts(shared_size=5)).forward == 4 * INPUTS + 5 * TOKENS


SIZE = MicroBatchSize(TOKENS, 1, alone=False)


def test_an_update_adds_up_the_layers_of_both_kinds_and_recomputes_the_larger() -> None:
    mixed = with_experts(layers=4)
    plain, checkpointed = EngineConfig(dtype="float32"), EngineConfig(dtype="float32", gradient_checkpointing=True)
    first, second = feed_forwards(mixed, TOKENS, 4, trained=True)
    more = 4 * (second.kept - first.kept) + max(0, second.backward - first.backward)
    assert update_bytes(mixed, plain, SIZE, "cpu") - update_bytes(DENSE, plain, SIZE, "cpu") == 4 * more
    larger = second.kept + second.backward - first.kept - first.backward
    assert larger > 0
    found = update_bytes(mixed, checkpointed, SIZE, "cpu") - update_bytes(DENSE, checkpointed, SIZE, "cpu")
    assert found == 4 * larger
    assert last_layer_bytes(mixed, plain, SIZE, "cpu") - last_layer_bytes(DENSE, plain, SIZE, "cpu") == 4 * larger
    states = layer_states_bytes(mixed, plain, SIZE) - layer_states_bytes(DENSE, plain, SIZE)
    assert states == 4 * (second.forward - first.forward)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
def test_normalized_queries_and_keys_count_with_experts(model_type: str) -> None:
    engine, heads = EngineConfig(dtype="float32"), 16 + 16
    found = [update_bytes(with_experts(kind), engine, SIZE, "cpu") for kind in ("mixtral", model_type)]
    assert found[1] - found[0] == 4 * 6 * 2 * heads * TOKENS


def test_eager_attention_goes_backward_when_what_experts_keep_is_freed() -> None:
    engine, eager = EngineConfig(dtype="float32"), replace(SIZE, pairs=10**7)
    last = [last_layer_bytes(shape, engine, eager, "cpu") for shape in (DENSE, MIXTURE)]
    assert last[0] == last[1]


def test_experts_that_an_adapter_freezes_have_no_gradients() -> None:
    engine, few = EngineConfig(dtype="float32", gradient_checkpointing=True), replace(SIZE, tokens=1)
    frozen = replace(engine, lora=LoraConfig(enabled=True, rank=2))
    assert last_layer_bytes(MIXTURE, frozen, few, "cpu") < last_layer_bytes(MIXTURE, engine, few, "cpu")


@pytest.mark.parametrize(("prompts", "later", "device"), [(4, 0, "cpu"), (1, 4, "cpu"), (4, 0, "cuda")])
def test_half_precision_gradients_of_experts_exist_until_their_micro_batch_ends(
    prompts: int, later: int, device: str
) -> None:
    """On a CPU those of linear layers are added to float32 sums. `later`: bytes per parameter of a sum that does not
    exist by then, as in a step with one micro-batch."""
    settings = ("data.max_prompt_tokens=498", "rollout.max_tokens=2", "rollout.samples_per_prompt=2")
    config = configure([], [*SETTINGS, *settings, f"train.prompts_per_step={prompts}"], ["null"])[1].config
    config = replace(config, cluster=replace(config.cluster, device=device))
    engine = EngineConfig(dtype="bfloat16", micro_batch_tokens=1000, gradient_checkpointing=True)
    worker = WorkerPlan(WorkerRequest(ACTOR, "hf", engine=engine, trains=True), ActorWorker, "", "")
    size = largest_micro_batch(config, engine, worker.shared_prefix)
    assert size.alone == (prompts == 1)
    shape, routed, parameters = with_experts(number=64), 6 * 64 * 3 * 16 * 10, 1_000_000
    last = last_layer_bytes(shape, engine, size, device)
    found = working_bytes(config, worker, ModelFacts(parameters, shape))
    added = 0 if device == "cuda" else 2 * (parameters - routed)
    assert found == last - added - later * routed
    if size.alone:  # with many experts the most is held after the pass, when all gradients are sums
        many = with_experts(number=10_000)
        assert working_bytes(config, worker, ModelFacts(10**9, many)) == -2 * 10**9


def test_the_prompts_of_the_embedded_rollout_have_experts() -> None:
    config = configure([], [*SETTINGS, "data.max_prompt_tokens=100"], ["null"])[1].config
    worker = WorkerPlan(WorkerRequest(ROLLOUT, "hf", embedded_in=ACTOR, cached_tokens=TOKENS), RolloutWorker, "", "")
    dense, mixed = (working_bytes(config, worker, ModelFacts(0, shape)) for shape in (DENSE, MIXTURE))
    assert mixed - dense == 4 * (mixture(trained=False).forward - 3 * TOKENS * 40)
