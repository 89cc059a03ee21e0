"""KL estimates and their gradients against an exact divergence, and the controllers of the coefficient."""

import json
import math

import pytest
import torch

from rlcore.algo.kl import AdaptiveKl, FixedKl, kl_controller, kl_loss, kl_penalty
from rlcore.config import KlConfig
from rlcore.errors import CheckpointError

LOGITS_V = torch.tensor([0.3, -0.4, 1.1, 0.0], dtype=torch.float64)
REFERENCE_V = torch.tensor([0.0, 0.5, 0.2, -0.9], dtype=torch.float64).log_softmax(0)


def test_estimates_of_a_hand_computed_token() -> None:
    logprobs_BT, reference_BT = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    assert kl_penalty(logprobs_BT, reference_BT, "k1").item() == pytest.approx(math.log(2))
    assert kl_penalty(logprobs_BT, reference_BT, "k2").item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_penalty(logprobs_BT, reference_BT, "k3").item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_expectation(kind: str) -> None:
    logprobs_V = LOGITS_V.log_softmax(0)
    expectation = (logprobs_V.exp() * kl_penalty(logprobs_V, REFERENCE_V, kind)).sum()  # type: ignore[arg-type]
    exact = (logprobs_V.exp() * (logprobs_V - REFERENCE_V)).sum()
    assert expectation.item() == pytest.approx(exact.item(), rel=1e-12)


def expected_gradient(kind: str) -> torch.Tensor:
    """The expectation, over tokens of the policy, of the gradient of the estimate as a loss."""
    total_V = torch.zeros_like(LOGITS_V)
    for token in range(len(LOGITS_V)):
        logits_V = LOGITS_V.clone().requires_grad_(True)
        logprobs_V = logits_V.log_softmax(0)
        kl_penalty(logprobs_V[token], REFERENCE_V[token], kind).backward()  # type: ignore[arg-type, no-untyped-call]
        assert logits_V.grad is not None
        total_V += logprobs_V[token].exp().detach() * logits_V.grad
    return total_V


def exact_gradient(*, policy_first: bool) -> torch.Tensor:
    logits_V = LOGITS_V.clone().requires_grad_(True)
    logprobs_V = logits_V.log_softmax(0)
    weights_V, sign = (logprobs_V.exp(), 1.0) if policy_first else (REFERENCE_V.exp(), -1.0)
    (sign * weights_V * (logprobs_V - REFERENCE_V)).sum().backward()  # type: ignore[no-untyped-call]
    assert logits_V.grad is not None
    return logits_V.grad


def test_the_gradients_are_those_that_the_docstring_names() -> None:
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros_like(LOGITS_V), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient(policy_first=True))
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(policy_first=False))


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_with_the_ratio_of_policies_the_gradient_is_that_of_the_divergence(kind: str, off_policy: bool) -> None:
    logits_V = LOGITS_V.clone().requires_grad_(True)
    logprobs_V = logits_V.log_softmax(0)
    old_V = (LOGITS_V.flip(0) if off_policy else LOGITS_V).log_softmax(0)
    kl_V = kl_loss(kl_penalty(logprobs_V, REFERENCE_V, kind), logprobs_V, old_V)  # type: ignore[arg-type]
    (old_V.exp() * kl_V).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logits_V.grad, exact_gradient(policy_first=True))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence_at_all(kind: str) -> None:
    assert not kl_penalty(REFERENCE_V, REFERENCE_V.clone(), kind).any()  # type: ignore[arg-type]


def step_of(controller: FixedKl, kl: float, num_samples: int) -> None:
    """A step of one mini-batch, with that mean KL per sample."""
    controller.observe(kl * num_samples, num_samples)
    controller.end_step()


def test_all_minibatches_of_a_step_move_the_adaptive_controller_once() -> None:
    controller = AdaptiveKl(coef=0.1, target=6.0, horizon=1000)
    for total in (600.0, 0.0, 900.0):
        controller.observe(total, num_samples=100)
        assert controller.coef == 0.1
    controller.end_step()
    assert controller.coef == pytest.approx(0.1 * (1 + (5.0 / 6.0 - 1) * 0.3))
    controller.end_step()
    assert controller.coef == pytest.approx(0.1 * (1 + (5.0 / 6.0 - 1) * 0.3)), "a step without samples changes nothing"


def test_the_adaptive_controller_steers_by_a_fifth_at_most() -> None:
    controller = AdaptiveKl(coef=0.1, target=6.0, horizon=1000)
    step_of(controller, kl=6.6, num_samples=100)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller = AdaptiveKl(coef=0.1, target=6.0, horizon=1000)
    step_of(controller, kl=600.0, num_samples=100)
    assert controller.coef == pytest.approx(0.1 * 1.02)
    step_of(controller, kl=0.0, num_samples=5_000_000)
    assert controller.coef == pytest.approx(0.1 * 1.02 * 0.8)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_divergence_that_is_not_finite_does_not_poison_the_coefficient(kl: float) -> None:
    controller = AdaptiveKl(coef=0.1, target=6.0, horizon=1000)
    step_of(controller, kl, num_samples=64)
    assert controller.coef == 0.1


def test_a_controller_resumes_from_json_bit_for_bit() -> None:
    settings = KlConfig(placement="reward", controller="adaptive", coef=0.1, target=1.0, horizon=77)
    controller = kl_controller(settings)
    step_of(controller, kl=1.13, num_samples=13)
    resumed = kl_controller(settings)
    resumed.restore(json.loads(json.dumps(controller.state())))
    assert resumed.coef == controller.coef != settings.coef


def test_a_fixed_coefficient_stays_and_is_that_of_the_configuration() -> None:
    controller = kl_controller(KlConfig(coef=0.25))
    step_of(controller, kl=100.0, num_samples=1000)
    assert type(controller) is FixedKl
    controller.restore(AdaptiveKl(9.0, 1.0, 10).state())
    assert controller.coef == 0.25


def test_an_adaptive_controller_refuses_a_state_without_a_coefficient() -> None:
    with pytest.raises(CheckpointError, match="needs 'coef'"):
        AdaptiveKl(0.1, 6.0, 1000).restore({})
