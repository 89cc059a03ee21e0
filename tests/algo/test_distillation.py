"""The KL term in the advantage: the policy gradient of KL(policy || teacher), on top of the estimator's advantages."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from rlcore.algo.advantage import AdvantageInputs, gae, none, rloo, whitened
from rlcore.algo.kl import FixedKl
from rlcore.algo.step import with_advantages
from rlcore.config import AlgoConfig, KlConfig
from rlcore.testing.tiny import batch_of_rows, random_batch
from rlcore.types import Batch

Placement = Literal["none", "advantage"]


def algo(placement: Placement = "advantage", **settings: Any) -> AlgoConfig:
    return AlgoConfig(kl=KlConfig(placement=placement), **settings)


def with_teacher(batch: Batch, seed: int = 3) -> Batch:
    shape = batch.tokens.token_ids_BT.shape
    return replace(batch, reference_logprobs_BT=-np.random.default_rng(seed).random(shape).astype(np.float32))


def kl_of(batch: Batch) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert batch.reference_logprobs_BT is not None
    difference_BT = batch.tokens.rollout_logprobs_BT - batch.reference_logprobs_BT
    return np.where(batch.tokens.loss_mask_BT, difference_BT, np.float32(0.0))


def test_the_advantage_of_each_sampled_token_loses_its_kl_and_rewards_teach_nothing() -> None:
    batch = with_teacher(random_batch())
    made, metrics = with_advantages(batch, none, False, algo(advantage="none"), 64, FixedKl(0.5))
    assert made.advantages_BT is not None
    np.testing.assert_array_equal(made.advantages_BT, -0.5 * kl_of(batch))
    assert not made.advantages_BT[~batch.tokens.loss_mask_BT].any()
    assert metrics["policy/kl"] == pytest.approx(kl_of(batch).sum() / batch.num_sampled_B.sum(), rel=1e-6)
    assert metrics["policy/kl_coef"] == 0.5


def test_it_is_added_to_advantages_per_sample() -> None:
    """An advantage of rewards alone: the KL changes neither the rewards of the group nor their baseline."""
    batch = with_teacher(replace(random_batch(), advantages_B=None))
    alone, _ = with_advantages(batch, rloo, False, algo("none"), 64, FixedKl(0.0))
    made, _ = with_advantages(batch, rloo, False, algo(), 64, FixedKl(0.5))
    assert alone.advantages_B is not None
    assert made.advantages_B is None
    assert made.advantages_BT is not None
    expected_BT = np.where(batch.tokens.loss_mask_BT, alone.advantages_B[:, None] - 0.5 * kl_of(batch), 0.0)
    np.testing.assert_allclose(made.advantages_BT, expected_BT, atol=1e-6)
    assert np.abs(alone.advantages_B).max() > 0.1


def test_a_critic_learns_the_returns_without_it_and_whitening_comes_first() -> None:
    batch = with_teacher(replace(random_batch(), advantages_B=None))
    batch = replace(batch, values_BT=np.full(batch.tokens.token_ids_BT.shape, 0.25, np.float32))
    settings = {"advantage": "gae", "whiten_advantages": True, "lam": 0.9}
    alone, _ = with_advantages(batch, gae, True, algo("none", **settings), 64, FixedKl(0.0))
    made, _ = with_advantages(batch, gae, True, algo(**settings), 64, FixedKl(0.5))
    assert alone.advantages_BT is not None
    assert made.advantages_BT is not None
    np.testing.assert_array_equal(made.returns_BT, alone.returns_BT)
    np.testing.assert_allclose(made.advantages_BT, alone.advantages_BT - 0.5 * kl_of(batch), atol=1e-6)
    white = whitened(torch.from_numpy(alone.advantages_BT.copy()), torch.from_numpy(batch.tokens.loss_mask_BT.copy()))
    np.testing.assert_allclose(alone.advantages_BT, white, atol=1e-5)


def test_its_expected_policy_gradient_is_that_of_the_divergence() -> None:
    """One token of a policy with five, all of them enumerated; the exact gradient is autograd's of the divergence."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    (exact_V,) = torch.autograd.grad((logprobs_V.exp() * (logprobs_V - teacher_V)).sum(), logits_V, retain_graph=True)
    batch = batch_of_rows([[[0, token] for token in range(5)]])
    policy = np.stack([np.zeros(5), logprobs_V.detach().numpy()], 1).astype(np.float32)
    teacher = np.stack([np.zeros(5), teacher_V.numpy()], 1).astype(np.float32)
    batch = replace(batch, old_logprobs_BT=policy, reference_logprobs_BT=teacher)
    made, _ = with_advantages(batch, none, False, algo(advantage="none"), 64, FixedKl(1.0))
    assert made.advantages_BT is not None
    advantages_V = torch.from_numpy(made.advantages_BT[:, 1].astype(np.float64))
    loss = -(logprobs_V.detach().exp() * advantages_V * logprobs_V).sum()
    (found_V,) = torch.autograd.grad(loss, logits_V)
    torch.testing.assert_close(found_V, exact_V, atol=1e-6, rtol=1e-5)
    assert exact_V.abs().max() > 0.05


def test_the_estimator_none_gives_zeros_of_the_rewards_dtype() -> None:
    rewards_B = torch.tensor([1.0, -2.0, float("inf")], dtype=torch.float64)
    rows_B = torch.arange(3)
    found_B = none(AdvantageInputs(rewards_B, rows_B, rows_B, torch.ones(3)))
    assert found_B[:2].tolist() == [0.0, 0.0]
    assert not found_B[:2].signbit().any()
    assert found_B[2].isnan()
    assert found_B.dtype == torch.float64
