"""The plan's count of what an update with attention over latents holds, against the tensors of a real one."""

from pathlib import Path
from typing import Any

import pytest
from test_planned_memory import SMALL, Sizes, ratio

from rlcore.types import SharedPrefix

LATENTS: dict[str, Any] = {
    "kv_lora_rank": 64, "q_lora_rank": 96, "num_key_value_heads": 4,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
WIDE_HEADS = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
DEEPSEEK = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "model", "dtype", "checkpointing"),
    [
        ("MiniCPM3", LATENTS, "float32", False),
        ("DeepseekV3", LATENTS | DEEPSEEK, "bfloat16", False),
        *(
            pytest.param(*case, marks=pytest.mark.fault)
            for case in (
                ("MiniCPM3", LATENTS, "bfloat16", True),
                ("DeepseekV2", LATENTS | DEEPSEEK, "float32", False),
                ("DeepseekV3", LATENTS | DEEPSEEK | {"q_lora_rank": None}, "float32", True),
                ("Glm4MoeLite", LATENTS | DEEPSEEK, "bfloat16", False),
                ("DeepseekV3", LATENTS | DEEPSEEK | WIDE_HEADS, "bfloat16", True),
            )
        ),
    ],
)
def test_what_attention_with_latents_keeps_is_counted(
    tmp_path: Path, architecture: str, model: dict[str, Any], dtype: str, checkpointing: bool
) -> None:
    found = ratio(
        tmp_path,
        SMALL | model,
        Sizes(128, 4, 16),
        SharedPrefix.TREE,
        architecture=architecture,
        dtype=dtype,
        gradient_checkpointing=checkpointing,
    )
    assert 1.0 <= found <= 1.15
