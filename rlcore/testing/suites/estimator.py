"""The suite of advantage estimators. Shape letters as in `rlcore.algo.advantage`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcore.algo.advantage import AdvantageInputs
from rlcore.contracts.offers import AlgorithmKind, Need, Scope
from rlcore.testing.suites.algorithm import TOLERANCE, AlgorithmSuite
from rlcore.testing.suites.harness import extra

GROUPS, SAMPLES, LENGTH = 3, 4, 9
ROWS = GROUPS * SAMPLES
PROMPT = 2
"""Tokens of each prompt."""


class AdvantageEstimatorSuite(AlgorithmSuite):
    """An advantage estimator; its further properties are claims."""

    kind = AlgorithmKind.ADVANTAGE
    zero_when_equal: bool = False
    """Claim: groups of equal rewards have advantages of 0."""
    ignores_shifts: bool = False
    """Claim: a constant that is added to all rewards changes nothing."""
    ignores_scale: bool = False
    """Claim: a positive factor of all rewards changes nothing."""
    scales: bool = False
    """Claim: a positive factor of all rewards, values and baselines is a factor of the advantages."""
    prefers_reward: bool = True
    """Claim: of two equally long samples in a group, with equal values and baselines, the one with more reward has at
    least the advantage of the other. Set it to False for an estimator that counts more than the reward."""
    gamma: float = 1.0
    lam: float = 0.9
    pass_k: int = 2

    def inputs(self) -> AdvantageInputs:
        """Three groups of four samples with one row each, and the inputs that the offer needs."""
        draw = torch.Generator().manual_seed(self.seed)
        lengths_B = torch.randint(1, LENGTH - PROMPT + 1, (ROWS,), generator=draw)
        place_T = torch.arange(LENGTH)
        mask_BT = (place_T >= PROMPT) & (place_T < PROMPT + lengths_B[:, None])
        needs = self.offer().needs
        values_BT = torch.where(mask_BT, torch.randn(ROWS, LENGTH, generator=draw), 0.0)
        rewards_B, scores_BF, weights_F = torch.randn(ROWS, generator=draw), None, None
        if Need.FUNCTION_SCORES in needs:
            scores_BF, weights_F = torch.randn(ROWS, 2, generator=draw), torch.tensor([0.25, 0.75])
            rewards_B = scores_BF @ weights_F
        return AdvantageInputs(
            rewards_B=rewards_B,
            group_B=torch.arange(ROWS) // SAMPLES,
            sample_B=torch.arange(ROWS),
            lengths_B=lengths_B,
            loss_mask_BT=mask_BT,
            values_BT=values_BT if Need.VALUES in needs else None,
            gamma=self.gamma,
            lam=self.lam,
            baseline_B=torch.randn(ROWS, generator=draw) if Need.GREEDY_BASELINE in needs else None,
            pass_k=self.pass_k,
            scores_BF=scores_BF,
            weights_F=weights_F,
        )

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """The function's result, after the checks of shape and finiteness."""
        found = self.function()(inputs)
        rows = len(inputs.rewards_B)
        per_token = self.offer().per_token
        self.need_tensor("what it returns", found, (rows, LENGTH) if per_token else (rows,))
        result: Tensor = found
        return result

    def test_advantages_have_their_shape(self) -> None:
        """The shape is (B,), or (B, T) for a `per_token` offer. All are finite."""
        self.advantages(self.inputs())

    def test_tokens_that_were_not_sampled_have_none(self) -> None:
        """Advantages are 0 outside the mask. A group of one sample and a row without tokens give numbers, too."""
        inputs = self.inputs()
        found = self.advantages(inputs)
        if self.offer().per_token and inputs.loss_mask_BT is not None:
            outside = found[~inputs.loss_mask_BT]
            self.need(not bool(outside.any()), "an advantage stands where nothing was sampled; needs 0 there")
        self.advantages(replace(inputs, group_B=torch.arange(ROWS)))

    def test_it_repeats_and_leaves_its_inputs_alone(self) -> None:
        """Two calls give the same bits."""
        inputs = self.inputs()
        one, other = self.advantages(inputs).clone(), self.advantages(inputs)
        self.need(torch.equal(one, other), "the same inputs give other advantages the second time")
        fresh = self.inputs()
        for name, value in vars(fresh).items():
            if isinstance(value, Tensor):
                self.need(torch.equal(value, getattr(inputs, name)), f"it changed its input {name}")

    def test_rows_may_come_in_any_order(self) -> None:
        """Each row keeps its advantage."""
        inputs = self.inputs()
        order_B = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
        found = self.advantages(rows_of(inputs, order_B))
        self.need_equal("rows in another order", self.advantages(inputs)[order_B], found)

    def test_numbers_of_groups_and_samples_are_names(self) -> None:
        """Only equality of the numbers matters, not their values."""
        inputs = self.inputs()
        named = replace(inputs, group_B=70 - 3 * inputs.group_B, sample_B=900 - 7 * inputs.sample_B)
        self.need_equal("other numbers of groups and samples", self.advantages(inputs), self.advantages(named))

    def test_it_looks_no_further_than_its_scope(self) -> None:
        """Rewards outside of the scope change nothing: groups are trained as they arrive."""
        inputs, scope = self.inputs(), self.offer().scope
        if scope is Scope.BATCH:
            return
        size = SAMPLES if scope is Scope.GROUP else 1
        changed_B = inputs.rewards_B.clone()
        changed_B[size:] += torch.arange(1.0, ROWS - size + 1)
        one, other = (self.advantages(found)[:size] for found in (inputs, rewarded(inputs, changed_B)))
        self.need_equal(f"rewards of another {scope.value}, with scope={scope.value}", one, other)

    def test_parts_of_a_sample_count_once(self) -> None:
        """Two rows of a sample have the advantages of one row; those of other samples stay the same."""
        inputs = self.inputs()
        whole, parted = self.advantages(inputs), self.advantages(in_parts(inputs, PARTED))
        both = "a sample in two parts"
        others = [row for row in range(ROWS) if row != PARTED]
        self.need_equal(f"{both}, the others", whole[others], parted[others])
        mine = [PARTED, ROWS]
        if not self.offer().per_token or inputs.loss_mask_BT is None:
            self.need_equal(both, whole[[PARTED, PARTED]], parted[mine])
            return
        mask_BT = in_parts(inputs, PARTED).loss_mask_BT
        if mask_BT is not None:
            tokens = torch.cat([parted[row][mask_BT[row]] for row in mine])
            self.need_equal(both, whole[PARTED][inputs.loss_mask_BT[PARTED]], tokens)

    @extra("zero_when_equal")
    def test_equal_rewards_have_no_advantage(self) -> None:
        """Advantages are exactly 0, without rounding errors."""
        for reward in (0.0, 0.1, -7.3):
            found = self.advantages(rewarded(self.inputs(), torch.full((ROWS,), reward)))
            self.need(not bool(found.any()), f"rewards that are all {reward} have an advantage; needs exactly 0")

    def test_a_reward_that_is_no_number_is_not_overlooked(self) -> None:
        """NaN never counts as "all equal": the advantage is NaN, or the function raises."""
        inputs = self.inputs()
        rewards_B = inputs.rewards_B.clone()
        rewards_B[1] = float("nan")
        try:
            found = self.function()(rewarded(inputs, rewards_B))
        except (ValueError, ArithmeticError):
            return
        row = found[1] if not self.offer().per_token else found[1][self._mask(inputs)[1]]
        self.need(bool(torch.isnan(row).any()), "a NaN reward became a number; needs NaN or a ValueError")

    def _mask(self, inputs: AdvantageInputs) -> Tensor:
        mask_BT = inputs.loss_mask_BT
        return torch.ones(ROWS, LENGTH, dtype=torch.bool) if mask_BT is None else mask_BT

    @extra("ignores_shifts")
    def test_a_constant_changes_nothing(self) -> None:
        """The constant is added to all rewards."""
        inputs = self.inputs()
        scores_BF = None if inputs.scores_BF is None else inputs.scores_BF + 5.0
        found = self.advantages(replace(inputs, rewards_B=inputs.rewards_B + 5.0, scores_BF=scores_BF))
        self.need_equal("5 added to all rewards", self.advantages(inputs), found, 1e-4)

    @extra("ignores_scale")
    def test_a_factor_changes_nothing(self) -> None:
        """All rewards are multiplied."""
        inputs = self.inputs()
        self.need_equal("8 times all rewards", self.advantages(inputs), self.advantages(scaled(inputs, 8.0)), 1e-4)

    @extra("scales")
    def test_a_factor_is_one_of_the_advantages(self) -> None:
        """Rewards, values and baselines are multiplied."""
        inputs = self.inputs()
        self.need_equal("8 times all rewards", 8.0 * self.advantages(inputs), self.advantages(scaled(inputs, 8.0)))

    @extra("prefers_reward")
    def test_more_reward_is_no_smaller_advantage(self) -> None:
        """The samples are in one group and have the same length, values and baseline."""
        inputs = self.inputs()
        lengths_B = torch.full((ROWS,), 3)
        mask_BT = (torch.arange(LENGTH) >= PROMPT) & (torch.arange(LENGTH) < PROMPT + lengths_B[:, None])
        first_B = inputs.group_B * SAMPLES
        values_BT = None if inputs.values_BT is None else inputs.values_BT[first_B]
        baseline_B = None if inputs.baseline_B is None else inputs.baseline_B[first_B]
        inputs = replace(inputs, lengths_B=lengths_B, loss_mask_BT=mask_BT, values_BT=values_BT, baseline_B=baseline_B)
        found = self.advantages(inputs)
        each_B = found[:, PROMPT] if self.offer().per_token else found
        for rows in torch.arange(ROWS).reshape(GROUPS, SAMPLES):
            ordered = each_B[rows][inputs.rewards_B[rows].argsort()]
            rising = bool((ordered.diff() >= -TOLERANCE).all()) and float(ordered[-1]) > float(ordered[0])
            self.need(rising, f"advantages by rising reward are {ordered.tolist()}; need to rise")


PARTED = 5
"""Index of the row that is split in two."""


def rows_of(inputs: AdvantageInputs, order_B: Tensor) -> AdvantageInputs:
    """The rows in this order."""
    moved: dict[str, Any] = {
        name: tensor[order_B]
        for name, tensor in vars(inputs).items()
        if isinstance(tensor, Tensor) and name != "weights_F"
    }
    return replace(inputs, **moved)


def rewarded(inputs: AdvantageInputs, rewards_B: Tensor) -> AdvantageInputs:
    """The inputs with these rewards, on which all functions agree: their weights add up to 1."""
    scores_BF = None if inputs.scores_BF is None else rewards_B[:, None].expand_as(inputs.scores_BF)
    return replace(inputs, rewards_B=rewards_B, scores_BF=scores_BF)


def scaled(inputs: AdvantageInputs, factor: float) -> AdvantageInputs:
    """Rewards, functions' scores, values and baselines, times the factor."""
    names: Sequence[str] = ("rewards_B", "scores_BF", "values_BT", "baseline_B")
    found: dict[str, Any] = {
        name: value * factor for name in names if isinstance(value := getattr(inputs, name), Tensor)
    }
    return replace(inputs, **found)


def in_parts(inputs: AdvantageInputs, row: int) -> AdvantageInputs:
    """The inputs with one more row at the end: the later tokens of `row`, as another segment of its sample, at the same
    positions."""
    doubled = rows_of(inputs, torch.tensor([*range(ROWS), row]))
    if doubled.loss_mask_BT is None:
        return doubled
    mask_BT, half = doubled.loss_mask_BT.clone(), PROMPT + int(inputs.lengths_B[row]) // 2
    mask_BT[row, half:] = False
    mask_BT[ROWS, :half] = False
    return replace(doubled, loss_mask_BT=mask_BT, lengths_B=mask_BT.sum(1))
