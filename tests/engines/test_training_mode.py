"""Updates turn on gradient checkpointing, and never the dropout of the model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_engine import engine_of, gradients_of

from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path: Path) -> None:
    path, batch = write_tiny_model(tmp_path, num_key_value_heads=2), random_batch()
    expected, _ = gradients_of(engine_of(path), batch)
    engine = engine_of(path, gradient_checkpointing=True)
    gradients, _ = gradients_of(engine, batch)
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    assert not any(module.training for module in engine.model.modules())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("GPT2", {"embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5}),
        # Its layers call dropout themselves, and not through a module.
        ("OPT", {"dropout": 0.5, "attention_dropout": 0.5, "ffn_dim": 48}),
    ],
)
def test_the_models_own_dropout_is_off_in_training_so_the_ratio_is_exact(
    tmp_path: Path, architecture: str, settings: dict[str, Any], checkpointing: bool
) -> None:
    path = write_tiny_model(tmp_path, architecture, **settings)
    engine, batch = engine_of(path, gradient_checkpointing=checkpointing), random_batch()
    with engine.model.training_mode():
        assert any(module.training for module in engine.model.modules()) is checkpointing
    metrics = engine.update(replace(batch, old_logprobs_BT=engine.logprobs(batch)))
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_every_layer_of_every_micro_batch_is_in_a_checkpoint(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, num_key_value_heads=2)
    engine = engine_of(path, gradient_checkpointing=True, micro_batch_tokens=30)
    transformer: Any = engine.model.transformer
    computed, checkpointed = [0], [0]

    def counting(checkpoint: Any) -> Any:
        def counted(*inputs: Any) -> Any:
            checkpointed[0] += 1
            return checkpoint(*inputs)

        return counted

    def count(*inputs: Any) -> None:
        computed[0] += 1

    counted = [counting(layer._gradient_checkpointing_func) for layer in transformer.model.layers]
    for layer, checkpoint in zip(transformer.model.layers, counted, strict=True):
        layer._gradient_checkpointing_func = checkpoint
    transformer.model.embed_tokens.register_forward_hook(count)
    engine.update(random_batch(num_groups=4, samples=3))
    assert computed[0] > 1
    assert checkpointed[0] == len(counted) * computed[0]
    after = [layer._gradient_checkpointing_func for layer in transformer.model.layers]
    assert all(now is before for now, before in zip(after, counted, strict=True))
