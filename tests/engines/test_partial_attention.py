"""Models with sliding windows and capped scores: computed as transformers' own forward pass computes them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.model_files import model_shape
from rlcore.contracts.requests import WorkerRequest
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.plan import Facts, WorkerPlan
from rlcore.plan.prefixes import plan_shared_prefixes
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, SharedPrefix

torch.set_num_threads(1)

WINDOW = 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("sdpa", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "Gemma2": ("eager", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": WINDOW}),
    "Gemma3Text": ("sdpa", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": WINDOW}),
}


def planned(path: Path, attention: str) -> tuple[SharedPrefix, tuple[str, ...]]:
    request = WorkerRequest(ACTOR, "hf", engine=EngineConfig(), shared_prefix="planned")
    plan = WorkerPlan(request, ActorWorker, "", "")
    workers, notes = plan_shared_prefixes([plan], Facts(shape=model_shape(path)), attention)
    return workers[0].shared_prefix, notes


def logprobs_row_by_row(path: Path, batch: Batch, attention: str) -> tuple[Any, Tensor]:
    """The whole model of transformers, and (B, T) log-probs of the sampled tokens by it, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation=attention).eval()
    logprobs_BT = torch.zeros(batch.tokens.token_ids_BT.shape, dtype=torch.float64)
    for row, length in enumerate(batch.lengths_B.tolist()):
        ids_1T = torch.tensor(batch.tokens.token_ids_BT[row, :length])[None].long()
        logprobs_TV = model(input_ids=ids_1T).logits[0].log_softmax(-1)
        logprobs_BT[row, 1:length] = logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0]
    return model, torch.where(torch.tensor(batch.tokens.loss_mask_BT), logprobs_BT, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_the_planned_way_gives_logprobs_and_gradients_of_transformers_with_rows_longer_than_the_window(
    tmp_path: Path, architecture: str
) -> None:
    attention, settings = MODELS[architecture]
    path = write_tiny_model(tmp_path / "model", architecture, **settings)
    way, notes = planned(path, attention)
    assert way is SharedPrefix.NONE
    assert any("not every layer of" in note for note in notes)
    batch = random_batch(num_groups=3, samples=3)
    assert int(batch.lengths_B.max()) > 2 * WINDOW
    config = EngineConfig(dtype="float64", micro_batch_tokens=60)
    loaded = ModelConfig(path=str(path), attention=attention)  # type: ignore[arg-type]
    engine = TrainEngine("causal_lm", loaded, config, PolicyLoss(clip, AlgoConfig()), shared_prefix=way)
    model, wanted_BT = logprobs_row_by_row(path, batch, attention)
    np.testing.assert_allclose(engine.logprobs(batch), wanted_BT.detach().numpy(), rtol=0, atol=1e-5)
    # The gradient of the policy loss where pi_old is pi.
    weights_B, advantages_B = (torch.tensor(array).double() for array in (batch.weights_B, batch.advantages_B))
    (-(weights_B * advantages_B)[:, None] * wanted_BT).sum().backward()
    found: list[Tensor] = []
    engine._optimizer.step = lambda lr: found.extend(  # type: ignore[method-assign]
        parameter.grad.clone() for parameter in engine.model.transformer.parameters()
    )
    engine._optimizer.clip_gradients = lambda norm: 1.0  # type: ignore[method-assign]
    engine.update(batch)
    wanted = [parameter.grad for parameter in model.parameters()]
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-3
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)  # norms of these models run in float32


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_windows_and_caps_count_in_these_models(tmp_path: Path, architecture: str) -> None:
    attention, settings = MODELS[architecture]
    path = write_tiny_model(tmp_path / "model", architecture, **settings)
    wide = write_tiny_model(
        tmp_path / "wide",
        architecture,
        **{**settings, "sliding_window": 256, "attn_logit_softcapping": None},
    )
    batch = random_batch(num_groups=3, samples=3)
    found_BT, wide_BT = (logprobs_row_by_row(place, batch, attention)[1].detach() for place in (path, wide))
    assert float((found_BT - wide_BT).abs().max()) > 0.01
