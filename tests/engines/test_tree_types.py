"""Every kind of model that the plan shares prompts for computes them as transformers computes single rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_experts import engine_of, gradients_of

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.model_files import model_shape
from rlcore.contracts.requests import WorkerRequest
from rlcore.plan import Facts, WorkerPlan
from rlcore.plan.prefixes import TREE_TYPES, plan_shared_prefixes
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import SharedPrefix

torch.set_num_threads(1)

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
"""Sizes of a model that computes keys and values from latents; a value is smaller than a key."""
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
OTHER: dict[str, dict[str, Any]] = {"helium": {"head_dim": 8}}


def settings_of(kind: str) -> dict[str, Any]:
    """Small sizes for the settings that the configuration of this kind has."""
    known = vars(transformers.AutoConfig.for_model(kind))
    heads = LATENT if "kv_lora_rank" in known else {"num_key_value_heads": 2, "head_dim": 16}
    sizes = {**heads, **EXPERTS}
    return {name: value for name, value in {**sizes, **OTHER.get(kind, {})}.items() if name in known}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TREE_TYPES))
def test_log_probs_and_gradients_are_those_of_rows_computed_one_by_one(tmp_path: Path, kind: str) -> None:
    architecture = type(transformers.AutoConfig.for_model(kind)).__name__.removesuffix("Config")
    path, batch = write_tiny_model(tmp_path, architecture, **settings_of(kind)), random_batch(num_groups=3, samples=4)
    shape = model_shape(path)
    assert shape is not None
    assert shape.model_type == kind
    worker = WorkerPlan(WorkerRequest(ACTOR, "hf", trains=True, shared_prefix="planned"), ActorWorker, "", "")
    [planned], _ = plan_shared_prefixes([worker], Facts(shape=shape), "sdpa", 64)
    assert planned.shared_prefix is SharedPrefix.TREE
    alone, shared = engine_of(path), engine_of(path, SharedPrefix.TREE)
    np.testing.assert_allclose(shared.logprobs(batch), alone.logprobs(batch), rtol=0, atol=1e-6)
    expected = gradients_of(alone, batch)
    assert float((gradients_of(shared, batch) - expected).norm() / expected.norm()) < 1e-6
