"""The share of the returns' variance that the critic explains, over all loss tokens of a step."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlcore_critic_engine.critic import ValueCritic
from rlcore_critic_engine.explained import ExplainedVariance
from rlcore_critic_engine.settings import CriticSettings

from rlcore.data.batch import select
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch, Metrics


def batch_of(returns: tuple[float, float], noise: float, seed: int = 0) -> Batch:
    """A mini-batch whose returns lie between two numbers, with values that miss them by about `noise`."""
    rng, batch = np.random.default_rng(seed), random_batch(num_groups=2 + seed, seed=seed)
    mask_BT = batch.tokens.loss_mask_BT
    returns_BT = np.where(mask_BT, rng.uniform(*returns, size=mask_BT.shape), 0.0).astype(np.float32)
    values_BT = np.where(mask_BT, returns_BT + noise * rng.normal(size=mask_BT.shape), 0.0).astype(np.float32)
    return replace(batch, returns_BT=returns_BT, values_BT=values_BT)


def plain(batches: list[Batch]) -> Metrics:
    """The metrics by loops over all tokens."""
    pairs = [
        (float(value), float(target))
        for batch in batches
        for value, target in zip(
            batch.values_BT[batch.tokens.loss_mask_BT],  # type: ignore[index]
            batch.returns_BT[batch.tokens.loss_mask_BT],  # type: ignore[index]
            strict=True,
        )
    ]
    mean = sum(target for _, target in pairs) / len(pairs)
    bias = sum(target - value for value, target in pairs) / len(pairs)
    left = sum((target - value - bias) ** 2 for value, target in pairs)
    return {
        "critic/value_mean": sum(value for value, _ in pairs) / len(pairs),
        "critic/return_mean": mean,
        "critic/explained_variance": 1 - left / sum((target - mean) ** 2 for _, target in pairs),
    }


class Worker:
    """A worker whose updates do nothing."""

    async def call(self, method: Any, *args: Any) -> Metrics:
        return {}


def step_metrics(batches: list[Batch]) -> Metrics:
    """The metrics of a step with these mini-batches."""

    async def step() -> Metrics:
        workers: Any = SimpleNamespace(replicas=[Worker()])
        critic = ValueCritic(workers, CriticSettings())
        for batch in batches:
            assert "critic/explained_variance" not in await critic.update(batch)
        found = critic.metrics()
        assert critic.metrics() == {}  # the next step starts over
        return found

    return asyncio.run(step())


def test_the_share_is_that_of_the_steps_tokens_and_not_a_mean_over_minibatches() -> None:
    solved, other = batch_of((0.999, 1.001), 0.05), batch_of((0.0, 1.0), 0.05, seed=1)
    assert plain([solved])["critic/explained_variance"] < -100
    found = step_metrics([solved, other])
    assert found == pytest.approx(plain([solved, other]), rel=1e-9)
    assert found["critic/explained_variance"] > 0.9


def test_equal_returns_and_minibatches_without_tokens_are_left_out() -> None:
    equal = batch_of((0.5, 0.5), 0.1)
    assert step_metrics([equal]).keys() == {"critic/value_mean", "critic/return_mean"}
    tokens = replace(equal.tokens, loss_mask_BT=np.zeros_like(equal.tokens.loss_mask_BT))
    empty = replace(equal, tokens=tokens)
    assert step_metrics([empty]) == {}
    other = batch_of((0.0, 1.0), 0.1, seed=1)
    assert step_metrics([other, empty]) == step_metrics([other])


def test_a_minibatch_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="no returns or no values"):
        ExplainedVariance().add(random_batch())


def test_rows_without_a_weight_do_not_count() -> None:
    batch = batch_of((0.0, 1.0), 0.1)
    kept = np.arange(len(batch)) % 2 == 0
    weighed = replace(batch, weights_B=kept.astype(np.float32))
    expected = plain([select(batch, np.flatnonzero(kept))])
    assert step_metrics([weighed]) == pytest.approx(expected, rel=1e-5)
