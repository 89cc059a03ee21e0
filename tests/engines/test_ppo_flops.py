"""Metrics time/tflops and time/mfu of an update: operations counted by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.flops import update_flops
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.testing.tiny import VOCABULARY, random_batch, write_tiny_model
from rlcore.types import SharedPrefix

HIDDEN, FORWARD = 32, 48
MATRICES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FORWARD)
"""Two layers: queries, keys, values and outputs, and the gated feed-forward's three; embeddings cost nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama")


def engine(model: Path, kind: str, peak_tflops: float = 0.0, **settings: object) -> TrainEngine:
    loss = PolicyLoss(clip, AlgoConfig())  # without one nothing is trained
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    return TrainEngine(kind, ModelConfig(path=str(model)), config, loss, peak_tflops=peak_tflops)


def test_an_update_of_all_weights_costs_six_operations_a_weight_and_token(model: Path) -> None:
    batch = random_batch()
    tokens, sampled = int(batch.lengths_B.sum()), int(batch.num_sampled_B.sum())
    policy = update_flops(engine(model, "causal_lm").model, batch, SharedPrefix.NONE)
    assert policy == 6 * MATRICES * tokens + 6 * HIDDEN * VOCABULARY * sampled
    value = update_flops(engine(model, "value").model, batch, SharedPrefix.NONE)
    assert value == 6 * MATRICES * tokens + 6 * HIDDEN * sampled


def test_frozen_weights_cost_four(model: Path) -> None:
    batch = random_batch()
    tokens, sampled = int(batch.lengths_B.sum()), int(batch.num_sampled_B.sum())
    lora = LoraConfig(enabled=True, rank=2, target_modules=("q_proj",))
    adapters = 2 * 2 * (2 * HIDDEN)
    found = update_flops(engine(model, "causal_lm", lora=lora).model, batch, SharedPrefix.NONE)
    assert found == (4 * MATRICES + 6 * adapters) * tokens + 4 * HIDDEN * VOCABULARY * sampled


def test_a_shared_prompt_counts_once(model: Path) -> None:
    batch = random_batch(num_groups=1, samples=2)
    prompt, policy = int(batch.prompt_lengths_B.min()), engine(model, "causal_lm").model
    shared, alone = (update_flops(policy, batch, way) for way in (SharedPrefix.TREE, SharedPrefix.NONE))
    assert alone - shared == 6 * MATRICES * prompt
    apart = replace(batch, group_B=np.array([0, 1]))
    assert update_flops(policy, apart, SharedPrefix.TREE) == alone


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_share_of_the_peak_is_that_of_the_devices_of_all_ranks(model: Path, num_ranks: int) -> None:
    actor, batch = engine(model, "causal_lm", peak_tflops=2.0), random_batch()
    ranks: Any = SimpleNamespace(num=num_ranks)
    actor.ranks = ranks if num_ranks > 1 else None
    found = actor._performance(batch, 3.0)
    whole = update_flops(actor.model, batch, SharedPrefix.NONE) / 3.0 / 1e12
    assert found["time/tflops/actor"] == whole
    assert found["time/mfu/actor"] == pytest.approx(whole / (2.0 * num_ranks))
