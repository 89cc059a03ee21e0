"""The suites of algorithms are red on what breaks a promise: for each check something that only it is about."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcore.algo.advantage import dr_grpo, gae, grpo, reinforce_pp
from rlcore.algo.loss import PolicyLossOutput, cispo, clip
from rlcore.contracts.offers import Need
from rlcore.testing.suites.estimator import AdvantageEstimatorSuite
from rlcore.testing.suites.harness import all_checks, failures
from rlcore.testing.suites.policy_loss import PolicyLossSuite

SCALES = {"scope": "group", "scales": True}
TOKENS = {"scope": "batch", "per_token": True}
VALUES = {"scope": "sample", "per_token": True, "needs": (Need.VALUES,)}
COMPARES = {
    "scope": "group",
    "zero_when_equal": True,
    "ignores_shifts": True,
    "ignores_scale": True,
}


def draws(inputs):
    return torch.randn(len(inputs.rewards_B))


def writes(inputs):
    inputs.rewards_B.mul_(1.0)
    inputs.rewards_B[0] += 1
    return dr_grpo(inputs)


def by_place(inputs):
    return dr_grpo(inputs) + 0.01 * torch.arange(len(inputs.rewards_B))


def by_number(inputs):
    return dr_grpo(inputs) + 0.01 * inputs.group_B


def over_the_batch(inputs):
    return inputs.rewards_B - inputs.rewards_B.mean()


def rows_count(inputs):
    means_B = torch.stack([inputs.rewards_B[inputs.group_B == group].mean() for group in inputs.group_B])
    return inputs.rewards_B - means_B


def forgets_parts(inputs):
    return gae(replace(inputs, sample_B=torch.arange(len(inputs.sample_B))))


def everywhere(inputs):
    return gae(inputs) + 1.0


def nearly_zero(inputs):
    return grpo(inputs) + 1e-3


def nan_to_zero(inputs):
    return torch.nan_to_num(grpo(inputs))


def one_sample_is_nan(inputs):
    means_B = torch.stack([inputs.rewards_B[inputs.group_B == group].std() for group in inputs.group_B])
    return inputs.rewards_B / means_B


def nothing_compared(inputs):
    return inputs.rewards_B.clone()


def shaped(inputs):
    return inputs.rewards_B.clamp(min=0.0)


def against(inputs):
    return -grpo(inputs)


MORE = "test_more_reward_is_no_smaller_advantage"
ESTIMATORS: list[tuple[Callable[..., Any] | str, dict[str, Any], str]] = [
    ("rlcore.algo.advantage:gae", SCALES, "test_it_passes_the_probe_of_a_run"),
    (lambda inputs: dr_grpo(inputs)[:, None], SCALES, "test_advantages_have_their_shape"),
    (lambda inputs: dr_grpo(inputs).tolist(), SCALES, "test_advantages_have_their_shape"),
    (lambda inputs: dr_grpo(inputs) / 0, SCALES, "test_advantages_have_their_shape"),
    (reinforce_pp, SCALES, "test_advantages_have_their_shape"),
    (everywhere, VALUES, "test_tokens_that_were_not_sampled_have_none"),
    (one_sample_is_nan, SCALES, "test_tokens_that_were_not_sampled_have_none"),
    (draws, SCALES, "test_it_repeats_and_leaves_its_inputs_alone"),
    (writes, SCALES, "test_it_repeats_and_leaves_its_inputs_alone"),
    (by_place, SCALES, "test_rows_may_come_in_any_order"),
    (by_number, SCALES, "test_numbers_of_groups_and_samples_are_names"),
    (over_the_batch, SCALES, "test_it_looks_no_further_than_its_scope"),
    (rows_count, SCALES, "test_parts_of_a_sample_count_once"),
    (forgets_parts, VALUES, "test_parts_of_a_sample_count_once"),
    (nearly_zero, COMPARES, "test_equal_rewards_have_no_advantage"),
    (nan_to_zero, COMPARES, "test_a_reward_that_is_no_number_is_not_overlooked"),
    (nothing_compared, COMPARES, "test_a_constant_changes_nothing"),
    (dr_grpo, COMPARES, "test_a_factor_changes_nothing"),
    (grpo, SCALES, "test_a_factor_is_one_of_the_advantages"),
    (against, COMPARES, MORE),
    (lambda inputs: -dr_grpo(inputs), SCALES, MORE),
    (lambda inputs: -gae(inputs), VALUES, MORE),
]


@pytest.mark.parametrize(("mutant", "message", "check"), ESTIMATORS)
def test_a_broken_estimator_is_red(mutant: Any, message: dict[str, Any], check: str) -> None:
    tested = type("Tested", (AdvantageEstimatorSuite,), {"target": mutant, **message})
    assert check in failures(tested, [check])


def loss(change):
    """`clip`, whose losses are changed."""

    def changed(inputs):
        found = clip(inputs)
        return PolicyLossOutput(change(found.loss_BT, inputs), found.metrics)

    return changed


def metric(value):
    """`clip` with a metric more."""

    def changed(inputs):
        found = clip(inputs)
        return PolicyLossOutput(found.loss_BT, {**found.metrics, "more": value(inputs)})

    return changed


def masked_by_product(inputs):
    ratio_BT = (inputs.logprobs_BT - inputs.old_logprobs_BT).exp()
    return PolicyLossOutput(-ratio_BT * inputs.advantages_BT * inputs.mask_BT)


def over_rows(loss_BT, inputs):
    return torch.where(inputs.mask_BT, loss_BT - loss_BT.mean(0, keepdim=True), 0.0)


def over_padding(loss_BT, inputs):
    return loss_BT / loss_BT.shape[1]


def overflows(inputs):
    ratio_BT = torch.where(inputs.mask_BT, inputs.logprobs_BT - inputs.old_logprobs_BT, 0.0).mul(10).exp()
    return PolicyLossOutput(-(ratio_BT / (1 + ratio_BT)) * torch.where(inputs.mask_BT, inputs.advantages_BT, 0.0))


LOSSES: list[tuple[Callable[..., Any] | str, str]] = [
    ("rlcore.algo.advantage:gae", "test_it_passes_the_probe_of_a_run"),
    (lambda inputs: clip(inputs).loss_BT, "test_a_loss_is_one_number_a_token"),
    (loss(lambda loss_BT, inputs: loss_BT.mean()), "test_a_loss_is_one_number_a_token"),
    (loss(lambda loss_BT, inputs: loss_BT + 1.0), "test_a_loss_is_one_number_a_token"),
    (loss(lambda loss_BT, inputs: loss_BT.detach()), "test_a_loss_is_one_number_a_token"),
    (metric(lambda inputs: inputs.logprobs_BT), "test_metrics_are_numbers_of_tokens"),
    (metric(lambda inputs: inputs.old_logprobs_BT), "test_metrics_are_numbers_of_tokens"),
    (metric(lambda inputs: 1.0), "test_metrics_are_numbers_of_tokens"),
    (masked_by_product, "test_masked_tokens_have_no_gradient"),
    (loss(lambda loss_BT, inputs: 2.0 * loss_BT), "test_on_policy_it_is_the_policy_gradient"),
    (loss(lambda loss_BT, inputs: -loss_BT), "test_on_policy_it_is_the_policy_gradient"),
    (cispo, "test_the_gradient_is_that_of_the_value"),
    (overflows, "test_extremes_are_no_nan"),
    (loss(over_rows), "test_rows_do_not_depend_on_each_other"),
    (loss(over_padding), "test_rows_do_not_depend_on_each_other"),
]


@pytest.mark.parametrize(("mutant", "check"), LOSSES)
def test_a_broken_loss_is_red(mutant: Any, check: str) -> None:
    tested = type("Tested", (PolicyLossSuite,), {"target": mutant})
    assert check in failures(tested, [check])


def select_everything(inputs):
    return torch.ones_like(inputs.mask_BT)


def test_a_selection_that_picks_tokens_without_a_loss_is_red() -> None:
    tested = type("Tested", (PolicyLossSuite,), {"target": clip, "selection": staticmethod(select_everything)})
    assert len(failures(tested)) > 4


@pytest.mark.parametrize(("suite", "rows"), [(AdvantageEstimatorSuite, ESTIMATORS), (PolicyLossSuite, LOSSES)])
def test_every_check_has_a_mutant(suite: Any, rows: Any) -> None:
    assert set(all_checks(suite)) == {row[-1] for row in rows}
