"""The embedded rollout in bfloat16 on a CPU that multiplies it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_hf_rollout_sharing import all_of, model_of, sampler_of, sorted_by_id

from rlcore.engines.hf.sample.decode import PACK_TOKENS
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import GenerateRequest, Sampling


@pytest.mark.usefixtures("native_bfloat16")
def test_bfloat16_decodes_with_packed_weights_and_fused_layers(tmp_path: Path) -> None:
    """Both give what the modules give, to the format's precision: an equal first token, and log-probs that are near."""
    settings: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = model_of(write_tiny_model(tmp_path / "model", "Qwen3", head_dim=64, **settings), "bfloat16")
    sampler = sampler_of(model, max_rows=8)
    decoder = sampler._decoder
    assert decoder.shortens
    packed: list[int] = []
    pack = decoder._pack

    def recorded() -> None:
        pack()
        packed.append(0 if decoder._packed is None else decoder._packed.num_products)

    decoder._pack = recorded  # type: ignore[method-assign]
    requests = [
        GenerateRequest(f"r{i}", tuple(range(40, 44 + i)), Sampling(max_tokens=2 * PACK_TOKENS, temperature=0.0), 1, i)
        for i in range(3)
    ]
    short = sorted_by_id(asyncio.run(all_of(sampler, requests)))
    assert max(packed) == 2 * 2 + 1  # both products of each MLP, and the output layer; the others are small
    decoder.shortens = False
    plain = sorted_by_id(asyncio.run(all_of(sampler, requests)))
    for mine, theirs in zip(short, plain, strict=True):
        assert mine.token_ids[0] == theirs.token_ids[0]
        np.testing.assert_allclose(mine.logprobs[0], theirs.logprobs[0], atol=0.02)
