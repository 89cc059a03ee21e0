"""The suites of algorithms: green on every estimator and loss that the core offers."""

from typing import Any

import pytest

from rlcore.algo.core_offers import OFFERS
from rlcore.contracts.offers import Algorithm
from rlcore.testing.suites.estimator import AdvantageEstimatorSuite
from rlcore.testing.suites.harness import checks, failures
from rlcore.testing.suites.policy_loss import PolicyLossSuite

COMPARES = {"zero_when_equal": True, "ignores_shifts": True}
LAWS: dict[str, dict[str, Any]] = {
    "grpo": {**COMPARES, "ignores_scale": True},
    "dr_grpo": {**COMPARES, "scales": True},
    "rloo": {**COMPARES, "scales": True},
    "turn_rloo": {**COMPARES, "scales": True},
    "opo": {**COMPARES, "scales": True},
    "gpg": {**COMPARES, "scales": True},
    "pass_at_k": {**COMPARES, "ignores_scale": True},
    "reinforce_pp": {**COMPARES, "ignores_scale": True},
    "reinforce_pp_baseline": {**COMPARES, "ignores_scale": True},
    "gdpo": {**COMPARES, "ignores_scale": True, "prefers_reward": False},
    "gae": {"scales": True},
    "remax": {"scales": True},
    "none": {**COMPARES, "scales": True, "prefers_reward": False},
}
"""Claims of each estimator's paper."""
LOSSES: dict[str, dict[str, Any]] = {"cispo": {"is_its_own_gradient": False}}
"""cispo detaches its weight."""


def offers(kind: str) -> list[Any]:
    return [pytest.param(offer, id=offer.name) for offer in OFFERS if offer.kind == kind]


@pytest.mark.parametrize("offer", offers("advantage"))
def test_an_estimator_of_the_core_is_green(offer: Algorithm) -> None:
    tested = type("Tested", (AdvantageEstimatorSuite,), {"target": offer, **LAWS[offer.name]})
    assert len(checks(tested)) >= 9
    assert failures(tested) == {}


@pytest.mark.parametrize("offer", offers("policy_loss"))
def test_a_loss_of_the_core_is_green(offer: Algorithm) -> None:
    tested = type("Tested", (PolicyLossSuite,), {"target": offer, **LOSSES.get(offer.name, {})})
    assert len(checks(tested)) >= 6
    assert failures(tested) == {}


@pytest.mark.parametrize("advantage", ["kl_cov", "clip_cov"])
def test_a_loss_with_a_selection_is_compared_with_finite_differences_where_tokens_are_selected(advantage: str) -> None:
    [offer] = [offer for offer in OFFERS if offer.name == advantage]
    algo = {"kl_cov_frac": 0.3, "clip_cov_frac": 0.3, "clip_cov_low": -5.0}
    tested = type("Tested", (PolicyLossSuite,), {"target": offer, "algo": algo})
    assert failures(tested) == {}


class TestGrpo(AdvantageEstimatorSuite):
    target = "rlcore.algo.advantage:grpo"
    scope = "group"
    zero_when_equal = True


class TestClip(PolicyLossSuite):
    target = "rlcore.algo.loss:clip"
    algo = {"dual_clip": 3.0}
