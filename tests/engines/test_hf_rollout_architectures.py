"""The embedded rollout decodes what transformers' own `generate` decodes, whatever the architecture."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample import row_attention
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.testing.tiny import END, write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

GREEDY = Sampling(temperature=0.0, max_tokens=14)
OLD_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
GEMMA = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 4.0}
LLAMA4 = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention", "full_attention"],
}
QWEN3_MOE = {
    "num_key_value_heads": 2, "head_dim": 8,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CASES = [
    ("Llama", "sdpa", "float64", {"num_key_value_heads": 2}),
    ("Qwen2", "sdpa", "float64", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("GPTNeoX", "sdpa", "float64", {}),
    ("Mistral", "eager", "float64", {"num_key_value_heads": 2, "sliding_window": 8}),
    # Gemma 2 caps its attention's logits, which sdpa cannot do.
    pytest.param("Gemma2", "eager", "float32", GEMMA, marks=pytest.mark.real),
    pytest.param("Qwen3", "sdpa", "float64", {"num_key_value_heads": 2, "head_dim": 8}, marks=pytest.mark.real),
    # It brings its attention code.
    ("GPTJ", "eager", "float64", {**OLD_NAMES, "rotary_dim": 8}),
    # Its transformers class names the decoder of a larger model, which it lacks.
    ("Llama4Text", "sdpa", "float64", LLAMA4),
    ("Qwen3Moe", "sdpa", "float64", QWEN3_MOE),
    # Its cache has latents, from which it computes keys and values.
    ("DeepseekV3", "sdpa", "float64", DEEPSEEK),
    # Its layers are not `nn.Linear`.
    pytest.param("GPT2", "sdpa", "float64", OLD_NAMES, marks=pytest.mark.real),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "attention", "dtype", "settings"), CASES)
def test_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, architecture: str, attention: Any, dtype: str, settings: dict[str, Any]
) -> None:
    """Prompts of different lengths, so that some are padded; all rows at once, and fewer than there are."""
    config = ModelConfig(path=str(write_tiny_model(tmp_path, architecture, **settings)), attention=attention)
    model = load_model(ModelKind.CAUSAL_LM, config, dtype=dtype, device="cpu")
    assert isinstance(model, PolicyModel)
    requests = [GenerateRequest(f"r{i}", tuple(range(40 + i, 45 + 3 * i)), GREEDY, 2, seed=i) for i in range(3)]
    ours = [
        decoded(EmbeddedSampler(model, ByteTokens(), max_rows=n, device=torch.device("cpu")), requests) for n in (4, 64)
    ]
    for request in requests:
        prompt_BT = torch.tensor([request.token_ids])
        theirs_BT = model.transformer.generate(
            prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=14, do_sample=False, pad_token_id=END
        )
        expected = theirs_BT[0, prompt_BT.shape[1] :].tolist()
        for found in ours:
            assert [found[request.id, sample] for sample in range(2)] == [expected] * 2


@pytest.mark.parametrize("fuses", [False, True])
def test_rows_whose_prompt_has_left_the_window_are_decoded_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fuses: bool
) -> None:
    """An accelerator fuses no attention with log-sums. NaN would end the rollout."""
    config = ModelConfig(path=str(write_tiny_model(tmp_path, "Mistral", num_key_value_heads=2, sliding_window=8)))
    model = load_model(ModelKind.CAUSAL_LM, config, dtype="float16", device="cpu")
    assert isinstance(model, PolicyModel)
    if not fuses:
        monkeypatch.setattr(row_attention, "can_fuse", lambda device: False)
    requests = [GenerateRequest("r", tuple(range(40, 45)), GREEDY, 2, seed=0)]
    found = decoded(EmbeddedSampler(model, ByteTokens(), max_rows=4, device=torch.device("cpu")), requests)
    assert [len(token_ids) for token_ids in found.values()] == [14, 14]


def decoded(sampler: EmbeddedSampler, requests: list[GenerateRequest]) -> dict[tuple[str, int], list[int]]:
    async def run() -> list[Completion]:
        return [completion async for completion in sampler.generate(requests)]

    return {
        (completion.request_id, completion.sample): completion.token_ids.tolist() for completion in asyncio.run(run())
    }
