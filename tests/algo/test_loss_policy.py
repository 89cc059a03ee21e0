"""Policy losses other than clip: a loop over the papers' formulas, numbers by hand, gradients by differences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rlcore.algo.covariance import clip_cov, kl_cov
from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput, cispo, clip, gmpo, gpg, gspo, sapo
from rlcore.config import AlgoConfig

CONFIG = AlgoConfig(clip_low=0.3, clip_high=0.4, sapo_tau_positive=1.5, sapo_tau_negative=2.0, kl_cov_coef=0.7)
LOSSES = (clip, gspo, cispo, sapo, gpg, gmpo, clip_cov, kl_cov)
Row = Sequence[float]


def clipped(ratio: float, advantage: float, config: AlgoConfig) -> float:
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -min(ratio * advantage, bounded * advantage)


def plain(
    name: str, logps: Row, olds: Row, advantage: float, picked: Sequence[bool], config: AlgoConfig
) -> list[float]:
    """The loss of each token of one row, all of whose tokens count, from the formula of the paper."""
    logs = [new - old for new, old in zip(logps, olds, strict=True)]
    ratios = [math.exp(log) for log in logs]
    if name == "gspo":
        return [clipped(math.exp(math.fsum(logs) / len(logs)), advantage, config)] * len(logs)
    if name == "cispo":
        weights = [min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) for ratio in ratios]
        return [-weight * advantage * logp for weight, logp in zip(weights, logps, strict=True)]
    if name == "sapo":
        tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
        return [-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))) for ratio in ratios]
    if name == "gpg":
        return [-advantage * logp for logp in logps]
    if name == "gmpo":
        sign = 1.0 if advantage > 0 else -1.0
        low, high = math.exp(-config.clip_low), math.exp(config.clip_high)
        worse = [sign * min(sign * ratio, sign * min(max(ratio, low), high)) for ratio in ratios]
        return [-advantage * math.prod(worse) ** (1 / len(worse))] * len(logs)
    if name == "kl_cov":
        terms = zip(ratios, logs, picked, strict=True)
        return [-ratio * advantage + pick * config.kl_cov_coef * abs(log) for ratio, log, pick in terms]
    losses = [clipped(ratio, advantage, config) for ratio in ratios]
    return [0.0 if pick and name == "clip_cov" else loss for loss, pick in zip(losses, picked, strict=True)]


def random_inputs(seed: int, config: AlgoConfig = CONFIG) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(seed)
    old_BT = -torch.rand(4, 9, generator=generator, dtype=torch.float64) - 0.1
    advantages_B1 = torch.randn(4, 1, generator=generator, dtype=torch.float64)
    mask_BT = torch.rand(4, 9, generator=generator) < 0.7
    mask_BT[3] = False
    selected_BT = (torch.rand(4, 9, generator=generator) < 0.3) & mask_BT
    logprobs_BT = old_BT + 0.5 * torch.randn(4, 9, generator=generator, dtype=torch.float64)
    return PolicyLossInputs(
        logprobs_BT.requires_grad_(True), old_BT, advantages_B1.expand(4, 9), mask_BT, config, selected_BT
    )


def row_of(inputs: PolicyLossInputs, row: int) -> tuple[list[float], list[float], float, list[bool]]:
    mask_T = inputs.mask_BT[row]
    assert inputs.selected_BT is not None
    picked: list[bool] = inputs.selected_BT[row][mask_T].tolist()
    logps, olds = (tensor[row][mask_T].detach().tolist() for tensor in (inputs.logprobs_BT, inputs.old_logprobs_BT))
    return logps, olds, float(inputs.advantages_BT[row, 0]), picked


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda function: function.__name__)
def test_a_loss_agrees_with_its_paper_in_a_plain_loop(loss: Callable[..., PolicyLossOutput], seed: int) -> None:
    inputs = random_inputs(seed)
    loss_BT = loss(inputs).loss_BT
    assert not loss_BT[~inputs.mask_BT].any()
    for row in range(3):
        expected = plain(loss.__name__, *row_of(inputs, row), CONFIG)
        assert loss_BT[row][inputs.mask_BT[row]].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda function: function.__name__)
def test_the_gradient_of_a_row_is_that_of_the_papers_objective(
    loss: Callable[..., PolicyLossOutput], seed: int
) -> None:
    """By central differences of the plain loop; cispo's weight is constant, because of its stop-gradient."""
    inputs = random_inputs(seed)
    loss(inputs).loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs_BT.grad is not None
    step = 1e-6
    for row in range(3):
        logps, olds, advantage, picked = row_of(inputs, row)
        seen = inputs.logprobs_BT.grad[row][inputs.mask_BT[row]].tolist()
        for t, logp in enumerate(logps):
            if loss is cispo:
                ratio = math.exp(logp - olds[t])
                expected = -min(max(ratio, 1 - CONFIG.clip_low), 1 + CONFIG.clip_high) * advantage
            else:
                above, below = ([*logps[:t], logp + sign * step, *logps[t + 1 :]] for sign in (1, -1))
                sums = [
                    math.fsum(plain(loss.__name__, value, olds, advantage, picked, CONFIG)) for value in (above, below)
                ]
                expected = (sums[0] - sums[1]) / (2 * step)
            assert seen[t] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda function: function.__name__)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss: Callable[..., PolicyLossOutput]) -> None:
    """Raising the probability of a good response's token, and nothing else, lowers the loss."""
    logprobs_BT = torch.tensor([[-0.5, -2.0, -1.0], [-0.3, -0.2, -4.0]], dtype=torch.float64, requires_grad=True)
    advantages_BT = torch.tensor([[1.5] * 3, [-0.5] * 3], dtype=torch.float64)
    mask_BT = torch.tensor([[True, True, True], [True, True, False]])
    nothing_BT = torch.zeros_like(mask_BT)
    output = loss(PolicyLossInputs(logprobs_BT, logprobs_BT.detach(), advantages_BT, mask_BT, CONFIG, nothing_BT))
    output.loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    torch.testing.assert_close(logprobs_BT.grad, -advantages_BT * mask_BT, rtol=1e-12, atol=1e-12)
    for value_BT in output.metrics.values():
        assert not value_BT.requires_grad
        assert not value_BT[~mask_BT].any()
    if "ratio" in output.metrics:
        assert output.metrics["ratio"][mask_BT].tolist() == [1.0] * 5
    assert output.metrics["approx_kl"].tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("loss", LOSSES, ids=lambda function: function.__name__)
def test_nothing_outside_the_mask_reaches_loss_or_gradient(loss: Callable[..., PolicyLossOutput]) -> None:
    logprobs_BT = torch.tensor([[-1.0, 500.0, float("-inf"), -2.0]], requires_grad=True)
    inputs = PolicyLossInputs(
        logprobs_BT,
        torch.tensor([[-1.1, -500.0, float("-inf"), -2.0]]),
        torch.tensor([[1.0, float("nan"), 1.0, float("inf")]]),
        torch.tensor([[True, False, False, False]]),
        CONFIG,
        torch.tensor([[False, True, True, True]]),
    )
    output = loss(inputs)
    output.loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    assert output.loss_BT[0, 1:].tolist() == [0.0] * 3
    assert logprobs_BT.grad[0, 1:].tolist() == [0.0] * 3
    assert -2.0 < logprobs_BT.grad[0, 0] < 0.0
    for value_BT in output.metrics.values():
        assert value_BT[0, 1:].tolist() == [0.0] * 3


def of_row(loss: Callable[..., PolicyLossOutput], ratios: Row, advantages: Row, **settings: float) -> PolicyLossOutput:
    old_BT = torch.full((1, len(ratios)), -1.0, dtype=torch.float64)
    logprobs_BT = old_BT + torch.tensor([ratios], dtype=torch.float64).log()
    mask_BT = torch.ones(1, len(ratios), dtype=torch.bool)
    advantages_BT = torch.tensor([advantages], dtype=torch.float64)
    return loss(PolicyLossInputs(logprobs_BT, old_BT, advantages_BT, mask_BT, replace(CONFIG, **settings)))  # type: ignore[arg-type]


def test_gspo_by_hand() -> None:
    # the ratio of the sequence is (2 * 0.5 * 8) ^ (1/3) = 2, above 1.4
    output = of_row(gspo, [2.0, 0.5, 8.0], [1.0] * 3)
    assert output.loss_BT[0].tolist() == pytest.approx([-1.4] * 3)
    assert output.metrics["ratio"][0].tolist() == pytest.approx([2.0] * 3)
    assert output.metrics["clipped_high"][0].tolist() == [1.0] * 3
    assert of_row(gspo, [2.0, 0.5, 8.0], [-1.0] * 3).loss_BT[0].tolist() == pytest.approx([2.0] * 3)


def test_cispo_by_hand_bounds_the_weight_and_keeps_the_gradient() -> None:
    output = of_row(cispo, [math.e, 1.0, 0.5], [1.0, 1.0, -2.0], clip_low=1.0)
    # log-probs are 0, -1 and -1 - log 2; weights 1.4, 1 and 0.5
    assert output.loss_BT[0].tolist() == pytest.approx([0.0, 1.0, -0.5 * 2 * (1 + math.log(2))])
    assert output.metrics["clipped_high"][0].tolist() == [1.0, 0.0, 0.0]


def test_sapo_by_hand_closes_its_gate_faster_for_negative_advantages() -> None:
    output = of_row(sapo, [2.0, 2.0, 1.0], [1.0, -1.0, 3.0])
    gates = [4 / 1.5 / (1 + math.exp(-1.5)), -4 / 2 / (1 + math.exp(-2.0)), 3 * 4 / 1.5 / 2]
    assert output.loss_BT[0].tolist() == pytest.approx([-gate for gate in gates])
    left = output.metrics["gate"][0].tolist()
    assert left[1] < left[0] < left[2] == 1.0


def test_gmpo_by_hand_takes_the_geometric_mean_of_the_clipped_ratios() -> None:
    # log ratios 0.6, clipped to 0.4, and -0.8, which a positive advantage does not clip: their mean is -0.2
    output = of_row(gmpo, [math.exp(0.6), math.exp(-0.8)], [2.0, 2.0])
    assert output.loss_BT[0].tolist() == pytest.approx([-2 * math.exp(-0.2)] * 2)
    assert output.metrics["clipped_high"][0].tolist() == [1.0, 0.0]
    # a negative one clips the other: (0.6 - 0.3) / 2
    assert of_row(gmpo, [math.exp(0.6), math.exp(-0.8)], [-2.0] * 2).loss_BT[0].tolist() == pytest.approx(
        [2 * math.exp(0.15)] * 2
    )
    # of an advantage a token the mean counts
    assert of_row(gmpo, [1.0, 1.0], [1.0, 2.0]).loss_BT[0].tolist() == pytest.approx([-1.5] * 2)


@pytest.mark.parametrize("loss", [clip_cov, kl_cov])
def test_a_loss_with_a_selection_says_that_it_needs_one(loss: Callable[..., PolicyLossOutput]) -> None:
    with pytest.raises(ValueError, match=f"{loss.__name__}: needs selected_BT"):
        of_row(loss, [1.0], [1.0])


def test_a_ratio_that_overflows_shuts_the_gate_of_sapo() -> None:
    logprobs_BT = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old_BT, mask_BT = torch.tensor([[-200.0, -1.0]]), torch.tensor([[True, True]])
    output = sapo(PolicyLossInputs(logprobs_BT, old_BT, torch.ones(1, 2), mask_BT, CONFIG))
    output.loss_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad[0].tolist() == [0.0, -1.0]
