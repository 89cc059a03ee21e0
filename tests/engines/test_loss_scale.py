"""Float16: a loss scale that falls when gradients overflow, grows while they do not, and is in checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train import loss_scale
from rlcore.engines.hf.train.loss_scale import LossScale
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import WorkerError
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

SCALE, RETRIES = "actor/loss_scale", "actor/loss_scale_retries"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(path: Path, **settings: Any) -> TrainEngine:
    config = EngineConfig(**{"lr": 1e-4, "dtype": "float16", "micro_batch_tokens": 60, **settings})
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, PolicyLoss(clip, AlgoConfig()))


def louder(factor: float) -> Batch:
    """A batch with gradients that are `factor` times as large."""
    batch = random_batch()
    assert batch.weights_B is not None
    return replace(batch, weights_B=batch.weights_B * factor)


def gradients_of(engine: TrainEngine, batch: Batch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    engine._optimizer.step = lambda lr: seen.extend(  # type: ignore[method-assign]
        torch.zeros_like(master) if master.grad is None else master.grad.clone() for master in engine._optimizer.masters
    )
    engine.update(batch)
    return seen


def state_of(engine: TrainEngine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in (*engine._optimizer.parameters, *engine._optimizer.masters)]


def unchanged(engine: TrainEngine, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(left, right) for left, right in zip(state_of(engine), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 1e-4])
def test_gradients_are_those_of_float32_also_where_float16_would_lose_them(llama: Path, factor: float) -> None:
    exact = gradients_of(engine_of(llama, dtype="float32", max_grad_norm=1e9), louder(factor))
    found = gradients_of(engine_of(llama, max_grad_norm=1e9), louder(factor))
    error = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)) ** 0.5
    assert error < 0.02 * sum(float(value.square().sum()) for value in exact) ** 0.5


@pytest.mark.slow
def test_an_overflow_in_the_first_step_lowers_the_scale_and_the_update_is_made(llama: Path) -> None:
    engine = engine_of(llama)
    before = state_of(engine)
    metrics = engine.update(louder(3e3))
    assert metrics["actor/skipped"] == 0.0
    assert metrics[RETRIES] >= 1.0
    assert metrics[SCALE] == 2.0 ** (loss_scale.START - loss_scale.BACK_OFF * metrics[RETRIES])
    assert not unchanged(engine, before)
    again = engine.update(louder(3e3))
    assert (again[RETRIES], again[SCALE]) == (0.0, metrics[SCALE]), "the scale that was found stays"


@pytest.mark.slow
def test_an_overflow_at_any_scale_is_a_skipped_update_that_changes_nothing_and_the_scale_comes_back(
    llama: Path,
) -> None:
    engine = engine_of(llama)
    before = state_of(engine)
    metrics = engine.update(louder(1e9))
    assert metrics["actor/skipped"] == 1.0
    assert metrics[RETRIES] == loss_scale.START / loss_scale.BACK_OFF
    assert unchanged(engine, before)
    assert engine.update(random_batch())[SCALE] == 2.0**loss_scale.START


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nan_in_one_micro_batch_skips_the_update_at_once_and_three_in_a_row_stop_the_run(
    llama: Path, dtype: str
) -> None:
    engine, batch = engine_of(llama, dtype=dtype), random_batch()
    assert batch.advantages_B is not None
    bad = replace(batch, advantages_B=np.where(np.arange(len(batch)) == 2, np.nan, batch.advantages_B))
    before = state_of(engine)
    for _ in range(2):
        metrics = engine.update(bad)
        assert metrics["actor/skipped"] == 1.0
        assert metrics.get(RETRIES, 0.0) == 0.0, "no scale makes a number of NaN"
        assert unchanged(engine, before)
    with pytest.raises(WorkerError, match=r"3 updates in a row had a loss \(nan\)") as caught:
        engine.update(bad)
    assert "\n" not in str(caught.value)
    assert ("choose actor.dtype=bfloat16" in str(caught.value)) is (dtype == "float16")
    assert engine.update(random_batch())["actor/skipped"] == 0.0


def test_the_scale_grows_after_finite_updates_and_not_above_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROW_AFTER", 3)
    scale = LossScale(enabled=True)
    for _ in range(3):
        scale.begin()
        scale.succeeded()
    assert scale.value == 2.0 ** (loss_scale.START + 1)
    scale.begin()
    assert scale.lower()
    scale.succeeded()
    assert scale.value == 2.0 ** (loss_scale.START + 1 - loss_scale.BACK_OFF)
    for _ in range(100):
        scale.succeeded()
    assert scale.value == 2.0**loss_scale.HIGHEST


@pytest.mark.slow
def test_the_scale_is_in_the_checkpoint(llama: Path, tmp_path: Path) -> None:
    engine, resumed = engine_of(llama), engine_of(llama)
    found = engine.update(louder(3e3))[SCALE]
    assert found < 2.0**loss_scale.START
    engine.save(tmp_path)
    resumed.restore(tmp_path)
    assert resumed.update(random_batch())[SCALE] == found


@pytest.mark.slow
def test_other_formats_have_no_scale(llama: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        engine = engine_of(llama, dtype=dtype)
        assert engine._scale.value == 1.0
        assert SCALE not in engine.update(random_batch())
