"""Training of mixtures of experts: log-probs, updates, files, shared prompts, and the operations of an update."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.flops import update_flops
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import ConfigError
from rlcore.testing.tiny import VOCABULARY, random_batch, write_tiny_model
from rlcore.types import Batch, SharedPrefix

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
        | {"mlp_only_layers": [0], "num_key_value_heads": 2, "num_hidden_layers": 3},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "deepseek": (
        "DeepseekV3",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
        | {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
        | {"layer_types": ["full_attention"] * 2},
    ),
}
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": (
        "Llama4Text",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 16}
        | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "layer_types": ["full_attention"] * 2},
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
    "qwen2": (
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
        | {"shared_expert_intermediate_size": 16},
    ),
}
"""Their routers, or gates of their shared experts, are linear layers."""
HIDDEN = 32


def model_of(directory: Path, name: str) -> Path:
    architecture, settings = {**MODELS, **ROUTERS}[name]
    return write_tiny_model(directory / name, architecture, **settings)


def engine_of(
    path: Path, way: SharedPrefix = SharedPrefix.NONE, attention: Any = "sdpa", **settings: object
) -> TrainEngine:
    config = EngineConfig(**{"dtype": "float64", "micro_batch_tokens": 60, "lr": 1e-3, **settings})  # type: ignore[arg-type]
    model = ModelConfig(path=str(path), attention=attention)
    return TrainEngine("causal_lm", model, config, PolicyLoss(clip, AlgoConfig()), shared_prefix=way)


def reference_logprobs(path: Path, batch: Batch, adapter: Path | None = None) -> Tensor:
    """The log-probs of each row by transformers alone, with its loop over experts, and by peft with an adapter."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
    )
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    found = torch.zeros(batch.tokens.token_ids_BT.shape, dtype=torch.float64)
    for row, length in enumerate(batch.lengths_B):
        ids_T = torch.tensor(batch.tokens.token_ids_BT[row, :length], dtype=torch.int64)
        with torch.no_grad():
            logprobs_TV = model(input_ids=ids_T[None]).logits[0].log_softmax(-1)
        found[row, 1:length] = logprobs_TV[:-1].gather(1, ids_T[1:, None])[:, 0]
    return found * torch.tensor(batch.tokens.loss_mask_BT)


@pytest.mark.parametrize(("name", "dtype", "close"), [("qwen3", "float32", 2e-4), ("mixtral", "float64", 2e-6)])
def test_logprobs_equal_those_of_transformers_before_and_after_an_update_that_is_saved(
    tmp_path: Path, name: str, dtype: str, close: float
) -> None:
    """In float32 products of all experts are grouped; torch does not group them in float64."""
    path, batch = model_of(tmp_path, name), random_batch(num_groups=2, samples=3)
    engine = engine_of(path, dtype=dtype)
    np.testing.assert_allclose(engine.logprobs(batch), reference_logprobs(path, batch), rtol=0, atol=close)
    experts = {key: weight.detach().clone() for key, weight in engine.model.named_parameters() if weight.ndim == 3}
    assert len(experts) == 4
    engine.update(batch)
    for key, weight in engine.model.named_parameters():
        assert key not in experts or bool((weight != experts[key]).any()), key
    engine.save_whole(tmp_path / "saved")
    saved = reference_logprobs(tmp_path / "saved", batch)
    np.testing.assert_allclose(engine.logprobs(batch), saved, rtol=0, atol=close)
    assert float((saved - reference_logprobs(path, batch)).abs().max()) > 1e-3


def gradients_of(engine: TrainEngine, batch: Batch) -> Tensor:
    """The gradients of an update, in one row."""
    seen: list[Tensor] = []

    def step(lr: float) -> None:
        seen.extend(master.grad.flatten().clone() for master in engine._optimizer.masters if master.grad is not None)

    engine._optimizer.step = step  # type: ignore[method-assign]
    engine.update(batch)
    return torch.cat(seen)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_shared_prompts_give_the_gradients_of_rows_one_by_one(tmp_path: Path, name: str) -> None:
    path, batch = model_of(tmp_path, name), random_batch(num_groups=3, samples=4)
    alone, shared = engine_of(path), engine_of(path, SharedPrefix.TREE)
    np.testing.assert_allclose(shared.logprobs(batch), alone.logprobs(batch), rtol=0, atol=1e-6)
    expected = gradients_of(alone, batch)
    assert float((gradients_of(shared, batch) - expected).norm() / expected.norm()) < 1e-6


def test_an_update_counts_the_experts_that_a_token_is_routed_to(tmp_path: Path) -> None:
    batch = random_batch()
    tokens, sampled = int(batch.lengths_B.sum()), int(batch.num_sampled_B.sum())
    attention = 2 * HIDDEN * 16 * (4 + 2)
    mixture = 2 * 3 * HIDDEN * 16 + 8 * HIDDEN
    matrices = 3 * attention + 3 * HIDDEN * 48 + 2 * mixture
    path = model_of(tmp_path, "qwen3")
    found = update_flops(engine_of(path).model, batch, SharedPrefix.NONE)
    assert found == 6 * matrices * tokens + 6 * HIDDEN * VOCABULARY * sampled
    lora = LoraConfig(enabled=True, rank=2, target_modules=("q_proj",))
    adapters = 3 * 2 * (HIDDEN + 4 * 16)
    found = update_flops(engine_of(path, lora=lora).model, batch, SharedPrefix.NONE)
    assert found == (4 * matrices + 6 * adapters) * tokens + 4 * HIDDEN * VOCABULARY * sampled


def test_biases_of_experts_do_not_count(tmp_path: Path) -> None:
    batch = random_batch()
    tokens, sampled = int(batch.lengths_B.sum()), int(batch.num_sampled_B.sum())
    mixture = 2 * 3 * HIDDEN * 48 + 4 * HIDDEN
    engine = engine_of(model_of(tmp_path, "gpt_oss"), attention="eager")
    matrices = 2 * (2 * HIDDEN * 16 * (4 + 2) + mixture)
    found = update_flops(engine.model, batch, SharedPrefix.NONE)
    assert found == 6 * matrices * tokens + 6 * HIDDEN * VOCABULARY * sampled


@pytest.mark.parametrize("name", list(MODELS))
def test_the_count_is_that_of_the_products_that_torch_sees(tmp_path: Path, name: str) -> None:
    """Forward and backward pass of one row by transformers, with its loop over experts; attention scores excluded."""
    engine = engine_of(model_of(tmp_path, name), attention="eager")
    batch = random_batch(num_groups=1, samples=1)
    length, sampled = int(batch.lengths_B[0]), int(batch.num_sampled_B[0])
    transformer: Any = engine.model.transformer
    transformer.set_experts_implementation("eager")
    ids_BT = torch.tensor(batch.tokens.token_ids_BT[:, :length], dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        transformer(input_ids=ids_BT).logits[:, length - sampled - 1 : -1].sum().backward()
    products = {
        str(name): flops for name, flops in counter.get_flop_counts()["Global"].items() if "bmm" not in str(name)
    }
    head = 6 * HIDDEN * VOCABULARY * (length - sampled)
    assert sum(products.values()) - head == update_flops(engine.model, batch, SharedPrefix.NONE)


@pytest.mark.parametrize("name", ["qwen3", "deepseek", *ROUTERS])
def test_adapters_on_every_linear_layer_leave_experts_out_and_merge_into_what_is_saved(
    tmp_path: Path, name: str
) -> None:
    path, batch = model_of(tmp_path, name), random_batch(num_groups=2, samples=3)
    engine = engine_of(path, lora=LoraConfig(enabled=True, rank=2))
    trained = [key for key, weight in engine.model.named_parameters() if weight.requires_grad]
    assert trained
    assert all(".self_attn." in key for key in trained)
    for _ in range(2):
        engine.update(batch)
    engine.save_whole(tmp_path / "saved")
    saved = reference_logprobs(tmp_path / "saved", batch)
    np.testing.assert_allclose(engine.logprobs(batch), saved, rtol=0, atol=2e-6)
    assert float((saved - reference_logprobs(path, batch)).abs().max()) > 1e-4
    engine.save_adapter(tmp_path / "adapter")
    loaded = reference_logprobs(path, batch, tmp_path / "adapter")
    np.testing.assert_allclose(loaded, saved, rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", ["gate_proj", "mlp.experts.down_proj"])
def test_adapters_on_experts_are_refused_with_the_layers_that_can_carry_them(tmp_path: Path, target: str) -> None:
    lora = LoraConfig(enabled=True, rank=2, target_modules=("q_proj", target))
    with pytest.raises(ConfigError, match=f"'{target}' would be among their weights.*: k_proj, o_proj, q_proj, v_proj"):
        engine_of(model_of(tmp_path, "qwen3"), lora=lora)
