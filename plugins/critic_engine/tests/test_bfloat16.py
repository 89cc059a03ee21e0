"""A critic in bfloat16: what it learns from is not rounded to it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rlcore_critic_engine.loss import ValueLoss
from rlcore_critic_engine.trunk import TrunkValueModel

from rlcore.config import EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import PolicyModel, TrainEngine, ValueModel
from rlcore.engines.hf.train.model import ModelKind, load_model
from rlcore.testing.tiny import random_batch, write_tiny_model

STEP = 2.0**-8
"""Distance of two bfloat16 numbers just below 1."""


def own(path: Path) -> ValueModel:
    model = load_model(ModelKind.VALUE, ModelConfig(path=str(path)), dtype="bfloat16", device="cpu")
    assert isinstance(model, ValueModel)
    return model


def on_the_actor(path: Path) -> ValueModel:
    policy = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="bfloat16", device="cpu")
    assert isinstance(policy, PolicyModel)
    return TrunkValueModel(policy, LoraConfig(enabled=True, rank=2), seed=0)


@pytest.mark.parametrize("make", [own, on_the_actor])
def test_values_near_one_are_finer_than_bfloat16_before_and_after_an_update(
    tmp_path: Path, make: Callable[[Path], ValueModel]
) -> None:
    model, batch = make(write_tiny_model(tmp_path)), random_batch()
    assert next(model.transformer.parameters()).dtype == torch.bfloat16
    with torch.no_grad():
        model.value_head.weight.fill_(1e-3)
        model.value_head.bias.fill_(1.0)
    engine = TrainEngine("value", model, EngineConfig(lr=1e-6), ValueLoss(0.0), name="critic")
    values_BT = engine.values(batch)
    values_N = values_BT[batch.tokens.loss_mask_BT]
    assert np.abs(values_N - 1.0).max() < 0.1
    assert np.abs(values_N / STEP - np.round(values_N / STEP)).max() > 0.1
    engine.update(replace(batch, values_BT=values_BT, returns_BT=np.ones_like(values_BT) * 2))
    moved = float(model.value_head.bias.detach()[0]) - 1.0
    assert 0.0 < moved < STEP / 8  # as far as the learning rate says
