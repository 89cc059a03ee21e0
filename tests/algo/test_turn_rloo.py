"""The estimator `turn_rloo` against a plain loop, numbers worked out by hand, and the exact policy gradient."""

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from rlcore.algo.advantage import AdvantageInputs, dr_grpo, rloo, turn_rloo

Turns = Sequence[float]
"""The rewards of a sample's turns."""


def of_turns(*samples: Turns, groups: Sequence[int] = (), gamma: float = 1.0, rows: bool = False) -> AdvantageInputs:
    """Turns of two tokens with a token of the environment between them; with `rows`, each turn in a row."""
    parts = [(sample, [turn]) for sample, turns in enumerate(samples) for turn in turns]
    layout = parts if rows else list(enumerate(samples))
    width = 3 * max(len(turns) for _, turns in layout)
    mask_BT = torch.zeros(len(layout), width, dtype=torch.bool)
    rewards_BT = torch.zeros(len(layout), width)
    for row, (_, turns) in enumerate(layout):
        for turn, reward in enumerate(turns):
            mask_BT[row, 3 * turn + 1 : 3 * turn + 3] = True
            rewards_BT[row, 3 * turn + 2] = reward
    sample_B = torch.tensor([sample for sample, _ in layout])
    group_S = torch.tensor(groups or [0] * len(samples))
    totals_S = torch.tensor([math.fsum(turns) for turns in samples])
    return AdvantageInputs(
        totals_S[sample_B], group_S[sample_B], sample_B, mask_BT.sum(1), mask_BT, rewards_BT, gamma=gamma
    )


def by_turn(inputs: AdvantageInputs) -> list[list[float]]:
    """The advantages of each row's turns; the tokens of a turn have the same, all other tokens 0."""
    found_BT = turn_rloo(inputs)
    assert inputs.loss_mask_BT is not None
    assert not found_BT[~inputs.loss_mask_BT].any()
    turns_BK2 = [row[mask].reshape(-1, 2) for row, mask in zip(found_BT, inputs.loss_mask_BT, strict=True)]
    assert all((turns_K2[:, 0] == turns_K2[:, 1]).all() for turns_K2 in turns_BK2)
    return [turns_K2[:, 0].tolist() for turns_K2 in turns_BK2]


def plain(samples: Sequence[Turns], gamma: float) -> list[list[float]]:
    to_go = [[math.fsum(gamma**d * r for d, r in enumerate(turns[k:])) for k in range(len(turns))] for turns in samples]
    advantages = []
    for i, mine in enumerate(to_go):
        others = [theirs for j, theirs in enumerate(to_go) if j != i]
        longest = max((len(theirs) for theirs in others), default=0)
        advantages.append([])
        for k, value in enumerate(mine):
            there = [theirs[min(k, longest - 1)] for theirs in others if len(theirs) > min(k, longest - 1)]
            advantages[-1].append(value - math.fsum(there) / len(there) if there else 0.0)
    return advantages


def test_turns_of_a_hand_computed_group() -> None:
    # returns from the turns on: 1.5, 1 | 0.25, 0 | 2
    found = by_turn(of_turns([0.5, 1.0], [0.25, 0.0], [2.0]))
    assert found == [[1.5 - 1.125, 1.0], [0.25 - 1.75, -1.0], [2.0 - 0.875]]


def test_a_turn_that_no_other_sample_reached_is_compared_with_the_last_that_another_did() -> None:
    assert by_turn(of_turns([0.0, 0.0, 1.0], [0.0, 0.5])) == [[0.5, 0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rows", [False, True])
def test_turns_agree_with_a_plain_loop(gamma: float, seed: int, rows: bool) -> None:
    draw = random.Random(seed)
    groups = [[[draw.gauss(0, 1) for _ in range(draw.randint(1, 5))] for _ in range(size)] for size in (4, 1, 6)]
    samples = [turns for group in groups for turns in group]
    numbers = [index for index, group in enumerate(groups) for _ in group]
    found = [
        advantage for row in by_turn(of_turns(*samples, groups=numbers, gamma=gamma, rows=rows)) for advantage in row
    ]
    expected = [advantage for group in groups for turns in plain(group, gamma) for advantage in turns]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_samples_of_one_turn_have_the_advantages_of_rloo() -> None:
    inputs = of_turns([3.0], [1.0], [2.0])
    assert torch.allclose(turn_rloo(inputs)[:, 1], rloo(inputs))


def test_equal_returns_from_a_turn_on_have_exactly_no_advantage() -> None:
    equal = [0.6, 0.9]  # discounted, a number whose mean over six samples differs in its last bit
    found = by_turn(of_turns(*[[0.5, *equal]] * 3, *[[0.2, *equal]] * 4, [0.1], gamma=0.9))
    assert [advantages[1:] for advantages in found] == [[0.0, 0.0]] * 7 + [[]]
    assert by_turn(of_turns([1.0, 2.0])) == [[0.0, 0.0]]


def test_rows_of_a_sample_are_turns_even_where_columns_follow_each_other() -> None:
    mask_BT = torch.tensor([[True, False], [False, True], [True, True]])
    rewards_BT = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 5.0]])
    inputs = AdvantageInputs(
        torch.tensor([3.0, 3.0, 5.0]), torch.zeros(3), torch.tensor([0, 0, 1]), mask_BT.sum(1), mask_BT, rewards_BT
    )
    assert turn_rloo(inputs).tolist() == [[3.0 - 5.0, 0.0], [0.0, 2.0 - 5.0], [2.0, 2.0]]


def test_a_sample_without_sampled_tokens_counts_as_one_turn_with_its_reward() -> None:
    mask_BT = torch.tensor([[True], [True], [False]])
    inputs = AdvantageInputs(torch.tensor([1.0, 0.0, 4.0]), torch.zeros(3), torch.arange(3), mask_BT.sum(1), mask_BT)
    assert turn_rloo(inputs).tolist() == [[1.0 - 2.0], [0.0 - 2.5], [0.0]]


def test_turns_need_a_loss_mask() -> None:
    with pytest.raises(ValueError, match="turn_rloo: needs loss_mask_BT"):
        turn_rloo(AdvantageInputs(torch.zeros(2), torch.zeros(2), torch.arange(2), torch.ones(2)))


P_CONTINUES, P_RIGHT = 0.3, 0.6
OUTCOMES: list[tuple[float, Turns, tuple[float, float]]] = [
    (1 - P_CONTINUES, [0.8], (-P_CONTINUES, 0.0)),
    (P_CONTINUES * P_RIGHT, [0.3, 0.9], (1 - P_CONTINUES, 1 - P_RIGHT)),
    (P_CONTINUES * (1 - P_RIGHT), [0.3, 0.2], (1 - P_CONTINUES, -P_RIGHT)),
]
"""A policy stops, or takes a second turn and is right or wrong there: probability, rewards of the turns, and the
gradients of the log-probs of its two decisions."""


def expected_gradient(of_groups: int, turns: bool) -> list[float]:
    """The mean over all groups of the policy gradient's estimate for the two decisions."""
    total = [0.0, 0.0]
    for group in product(OUTCOMES, repeat=of_groups):
        probability = math.prod(outcome[0] for outcome in group)
        inputs = of_turns(*[outcome[1] for outcome in group])
        found = by_turn(inputs) if turns else own_rewards_centred([outcome[1] for outcome in group])
        for (_, _, gradients), advantages in zip(group, found, strict=True):
            for decision, advantage in enumerate(advantages):
                total[decision] += probability * gradients[decision] * advantage / of_groups
    return total


def own_rewards_centred(samples: Sequence[Turns]) -> list[list[float]]:
    """The estimate that has a bias: each turn's reward less the group's mean at that turn, summed from the turn on."""
    means = []
    for k in range(2):
        there = [turns[k] for turns in samples if len(turns) > k]
        means.append(math.fsum(there) / len(there) if there else 0.0)
    return [
        [math.fsum(turns[j] - means[j] for j in range(k, len(turns))) for k in range(len(turns))] for turns in samples
    ]


def test_the_gradient_has_no_bias_for_a_policy_that_decides_when_to_stop() -> None:
    value_of_second = P_RIGHT * 0.9 + (1 - P_RIGHT) * 0.2
    exact = [
        P_CONTINUES * (1 - P_CONTINUES) * (0.3 + value_of_second - 0.8),
        P_CONTINUES * P_RIGHT * (1 - P_RIGHT) * (0.9 - 0.2),
    ]
    # Where no other sample takes a second turn, the baseline is that of the first: no bias, either.
    assert expected_gradient(3, turns=True) == pytest.approx(exact, rel=1e-5)
    with_bias = expected_gradient(3, turns=False)
    assert with_bias[0] * exact[0] < 0, "the decision to go on would be trained in the wrong direction"


def test_the_whole_reward_at_each_turn_is_what_rewards_of_turns_improve_on() -> None:
    inputs = of_turns([1.0, 0.0], [0.0, 0.0])
    assert dr_grpo(inputs).tolist() == [0.5, -0.5]
    assert by_turn(inputs) == [[1.0, 0.0], [-1.0, 0.0]]
