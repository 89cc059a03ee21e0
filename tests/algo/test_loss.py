"""The clip loss against a plain loop, hand-computed tokens, and finite gradients whatever stands outside the mask."""

import dataclasses
import math

import pytest
import torch

from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput, clip
from rlcore.config import AlgoConfig
from rlcore.errors import ConfigError

CONFIG = AlgoConfig(clip_low=0.2, clip_high=0.28)


def of_tokens(ratios: list[float], advantages: list[float], config: AlgoConfig = CONFIG) -> PolicyLossOutput:
    old_BT = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    return clip(
        PolicyLossInputs(
            logprobs_BT=old_BT + torch.tensor([ratios], dtype=torch.float64).log(),
            old_logprobs_BT=old_BT,
            advantages_BT=torch.tensor([advantages], dtype=torch.float64),
            mask_BT=torch.ones(1, len(ratios), dtype=torch.bool),
            config=config,
        )
    )


def plain_clip(logprob: float, old: float, advantage: float, config: AlgoConfig) -> float:
    ratio = math.exp(logprob - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage)
    if config.dual_clip and advantage < 0:
        surrogate = max(surrogate, config.dual_clip * advantage)
    return -surrogate


def test_each_side_has_its_own_bound() -> None:
    # inside, above with A > 0, below with A < 0, above with A < 0 (no bound), below with A > 0 (no bound)
    output = of_tokens([1.0, 1.5, 0.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0])
    assert output.loss_BT[0].tolist() == pytest.approx([-2.0, -2.56, 1.6, 3.0, -1.0])
    assert output.metrics["clipped_high"][0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert output.metrics["clipped_low"][0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert output.metrics["ratio"][0].tolist() == pytest.approx([1.0, 1.5, 0.5, 1.5, 0.5])
    assert output.metrics["approx_kl"][0, 1].item() == pytest.approx(0.5 - math.log(1.5))


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    output = of_tokens([5.0, 5.0, 2.0], [-1.0, 1.0, -1.0], dataclasses.replace(CONFIG, dual_clip=3.0))
    assert output.loss_BT[0].tolist() == pytest.approx([3.0, -1.28, 2.0])
    assert output.metrics["dual_clipped"][0].tolist() == [1.0, 0.0, 0.0]
    assert "dual_clipped" not in of_tokens([5.0], [-1.0]).metrics


@pytest.mark.parametrize("dual_clip", [0.5, 1.0, -3.0])
def test_a_dual_clip_that_would_turn_the_loss_round_is_refused(dual_clip: float) -> None:
    with pytest.raises(ConfigError, match=r"algo.dual_clip=.*needs 0 .off. or a number above 1"):
        of_tokens([1.0], [1.0], dataclasses.replace(CONFIG, dual_clip=dual_clip))


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_losses_and_gradients_agree_with_a_plain_loop(dual_clip: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = dataclasses.replace(CONFIG, dual_clip=dual_clip)
    logprobs_BT, old_BT, advantages_BT = (torch.randn(3, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mask_BT = torch.rand(3, 8, generator=generator) < 0.7
    logprobs_BT.requires_grad_(True)
    output = clip(PolicyLossInputs(logprobs_BT, old_BT, advantages_BT, mask_BT, config))
    output.loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    for b in range(3):
        for t in range(8):
            numbers = old_BT[b, t].item(), advantages_BT[b, t].item(), config
            logprob, step = logprobs_BT[b, t].item(), 1e-6
            slope = (plain_clip(logprob + step, *numbers) - plain_clip(logprob - step, *numbers)) / (2 * step)
            expected = (plain_clip(logprob, *numbers), slope) if mask_BT[b, t] else (0.0, 0.0)
            assert output.loss_BT[b, t].item() == pytest.approx(expected[0], abs=1e-12)
            assert logprobs_BT.grad[b, t].item() == pytest.approx(expected[1], abs=1e-6)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs_BT = torch.tensor([[-0.5, -2.0, -1.0]], requires_grad=True)
    advantages_BT, mask_BT = torch.tensor([[1.5, -0.5, 2.0]]), torch.tensor([[True, True, True]])
    output = clip(PolicyLossInputs(logprobs_BT, logprobs_BT.detach(), advantages_BT, mask_BT, CONFIG))
    output.loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == (-advantages_BT).tolist()


def test_nothing_outside_the_mask_reaches_loss_metrics_or_gradient() -> None:
    logprobs_BT = torch.tensor([[-1.0, 500.0, float("-inf"), -2.0]], requires_grad=True)
    old_BT = torch.tensor([[-1.5, -500.0, float("-inf"), -2.0]])
    advantages_BT = torch.tensor([[1.0, float("nan"), 1.0, float("inf")]])
    mask_BT = torch.tensor([[True, False, False, False]])
    output = clip(PolicyLossInputs(logprobs_BT, old_BT, advantages_BT, mask_BT, CONFIG))
    output.loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert output.loss_BT[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert logprobs_BT.grad is not None
    assert torch.isfinite(logprobs_BT.grad[0, [0, 1, 3]]).all()
    assert logprobs_BT.grad[0, 1:].tolist() == [0.0, 0.0, 0.0]
    for value_BT in output.metrics.values():
        assert value_BT[0, 1:].tolist() == [0.0, 0.0, 0.0]
        assert not value_BT.requires_grad
