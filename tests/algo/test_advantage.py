"""Advantage estimators against plain loops written from the papers, and against numbers worked out by hand."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algo.advantage import (
    AdvantageInputs,
    dr_grpo,
    gae,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
)
from rlcore.algo.token_rewards import sample_rewards, token_rewards
from rlcore.reward.combine import LARGEST_SUM

Estimator = Callable[[AdvantageInputs], torch.Tensor]
GROUP_ESTIMATORS = (grpo, dr_grpo, rloo)


def of_groups(*groups: Sequence[float]) -> AdvantageInputs:
    """One row per sample, one list of rewards per group."""
    rewards = [reward for group in groups for reward in group]
    return AdvantageInputs(
        rewards_B=torch.tensor(rewards),
        group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group]),
        sample_B=torch.arange(len(rewards)),
        lengths_B=torch.ones(len(rewards), dtype=torch.int64),
    )


def plain_group_estimate(name: str, rewards: Sequence[float]) -> list[float]:
    """The papers' formulas, one number at a time."""
    n = len(rewards)
    if n < 2 or min(rewards) == max(rewards):
        return [0.0] * n
    mean = math.fsum(rewards) / n
    if name == "dr_grpo":
        return [r - mean for r in rewards]
    if name == "rloo":
        return [r - (math.fsum(rewards) - r) / (n - 1) for r in rewards]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]


def plain_gae(
    rewards: Sequence[float], values: Sequence[float], sampled: Sequence[bool], gamma: float, lam: float
) -> list[float]:
    """GAE of one sample by the definition: the sum of discounted TD errors over the tokens that were sampled."""
    steps = [t for t in range(len(rewards)) if sampled[t]]
    deltas = [
        rewards[t] + (gamma * values[steps[k + 1]] if k + 1 < len(steps) else 0.0) - values[t]
        for k, t in enumerate(steps)
    ]
    advantages = [0.0] * len(rewards)
    for k, t in enumerate(steps):
        advantages[t] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(steps)))
    return advantages


@pytest.mark.parametrize("estimator", [*GROUP_ESTIMATORS, opo, gpg, pass_at_k, reinforce_pp_baseline])
def test_the_largest_sum_of_scores_leaves_no_float32_in_any_advantage(estimator: Estimator) -> None:
    lowest, highest = [-LARGEST_SUM] * 63, [LARGEST_SUM]
    inputs = of_groups([*highest, *lowest], [0.0, 1.0], *[[1.0, 1.0]] * 200)
    assert inputs.rewards_B.dtype == torch.float32
    assert estimator(inputs).isfinite().all()


def test_grpo_of_a_hand_computed_group() -> None:
    # mean 0.5, unbiased variance 4 * 0.25 / 3
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(
        grpo(of_groups([1.0, 0.0, 1.0, 0.0])), torch.tensor([expected, -expected, expected, -expected])
    )


def test_dr_grpo_of_a_hand_computed_group() -> None:
    torch.testing.assert_close(dr_grpo(of_groups([1.0, 0.0, 0.0, 0.0])), torch.tensor([0.75, -0.25, -0.25, -0.25]))


def test_rloo_of_a_hand_computed_group() -> None:
    # of 3, 1, 2 the others' means are 1.5, 2.5 and 2
    torch.testing.assert_close(rloo(of_groups([3.0, 1.0, 2.0])), torch.tensor([1.5, -1.5, 0.0]))


@pytest.mark.slow
@given(
    groups=st.lists(
        st.lists(st.floats(-5, 5, width=32, allow_subnormal=False), min_size=1, max_size=6), min_size=1, max_size=5
    ),
    estimator=st.sampled_from(GROUP_ESTIMATORS),
)
@settings(deadline=None, max_examples=150)
def test_group_estimators_agree_with_plain_loops(groups: list[list[float]], estimator: Estimator) -> None:
    expected = [a for group in groups for a in plain_group_estimate(estimator.__name__, group)]
    torch.testing.assert_close(estimator(of_groups(*groups)), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_and_lonely_samples_have_advantage_exactly_zero(estimator: Estimator, reward: float) -> None:
    inputs = of_groups([reward] * 7, [0.9], [reward] * 3)
    for dtype in (torch.float32, torch.float64):
        # in float64 the mean of three 0.1 is not 0.1
        rewards_B = torch.tensor([reward] * 7 + [0.9] + [reward] * 3, dtype=dtype)
        advantages = estimator(AdvantageInputs(rewards_B, inputs.group_B, inputs.sample_B, inputs.lengths_B))
        assert advantages.dtype == dtype
        assert advantages.tolist() == [0.0] * 11


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_parts_of_a_sample_count_once_and_share_its_advantage(estimator: Estimator) -> None:
    whole = estimator(of_groups([1.0, 0.0, 0.25], [2.0, 5.0]))
    parts = AdvantageInputs(
        rewards_B=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.25, 0.25, 2.0, 5.0]),
        group_B=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]),
        sample_B=torch.tensor([0, 0, 0, 1, 2, 2, 3, 4]),
        lengths_B=torch.ones(8, dtype=torch.int64),
    )
    assert estimator(parts).tolist() == whole[[0, 0, 0, 1, 2, 2, 3, 4]].tolist()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("seed", range(20))
def test_a_failed_sample_leaves_every_advantage_as_in_the_batch_without_it(estimator: Estimator, seed: int) -> None:
    draw = random.Random(seed)
    groups = [[draw.gauss(0, 1) for _ in range(8)] for _ in range(8)]
    failed = draw.randrange(64)
    full = of_groups(*groups)
    kept = torch.arange(64) != failed
    # numbered as collate and select number them, and also with the failed sample's number left open
    with_gap = AdvantageInputs(full.rewards_B[kept], full.group_B[kept], full.sample_B[kept], full.lengths_B[kept])
    without = [[r for i, r in enumerate(group) if 8 * g + i != failed] for g, group in enumerate(groups)]
    afresh = estimator(of_groups(*without))
    assert estimator(with_gap).tolist() == afresh.tolist()
    alone = [a for group in without for a in estimator(of_groups(group)).tolist()]
    assert afresh.tolist() == alone
    other_groups = kept & (torch.arange(64) // 8 != failed // 8)
    assert estimator(full)[other_groups].tolist() == estimator(with_gap)[other_groups[kept]].tolist()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_group_left_with_one_sample_has_advantage_zero_next_to_others(estimator: Estimator) -> None:
    advantages = estimator(of_groups([0.7], [1.0, 0.0]))
    assert advantages[0].item() == 0.0
    assert advantages[1].item() > 0 > advantages[2].item()


def test_the_order_of_rows_has_no_meaning_for_group_estimators() -> None:
    inputs = of_groups([1.0, 0.5, 0.0], [0.25, 0.5, 3.0])
    order = torch.tensor([5, 0, 3, 2, 4, 1])
    shuffled = AdvantageInputs(
        inputs.rewards_B[order], inputs.group_B[order], inputs.sample_B[order], inputs.lengths_B[order]
    )
    for estimator in GROUP_ESTIMATORS:
        torch.testing.assert_close(estimator(shuffled), estimator(inputs)[order], rtol=1e-6, atol=1e-7)


def test_gae_of_a_hand_computed_row_with_a_tool_answer_inside() -> None:
    # sampled at t = 1, 2, 4; t = 3 is a tool's answer and has a value that must not count
    inputs = AdvantageInputs(
        rewards_B=torch.tensor([1.0]),
        group_B=torch.tensor([0]),
        sample_B=torch.tensor([0]),
        lengths_B=torch.tensor([3]),
        loss_mask_BT=torch.tensor([[False, True, True, False, True, False]]),
        values_BT=torch.tensor([[9.0, 0.2, 0.4, 99.0, 0.6, 9.0]]),
        gamma=0.5,
        lam=0.5,
    )
    last = 1.0 - 0.6
    middle = (0.5 * 0.6 - 0.4) + 0.25 * last
    first = (0.5 * 0.4 - 0.2) + 0.25 * middle
    advantages_BT = gae(inputs)
    torch.testing.assert_close(advantages_BT, torch.tensor([[0.0, first, middle, 0.0, last, 0.0]]))


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.97, 0.5]), lam=st.sampled_from([1.0, 0.95, 0.0]))
@settings(deadline=None, max_examples=100)
def test_gae_agrees_with_a_plain_loop_over_the_definition(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(4, 9, generator=generator) < 0.6
    rewards_BT = torch.randn(4, 9, generator=generator, dtype=torch.float64) * mask_BT
    values_BT = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards_B=torch.zeros(4, dtype=torch.float64),
        group_B=torch.zeros(4, dtype=torch.int64),
        sample_B=torch.arange(4),
        lengths_B=mask_BT.sum(1),
        loss_mask_BT=mask_BT,
        token_rewards_BT=rewards_BT,
        values_BT=values_BT,
        gamma=gamma,
        lam=lam,
    )
    expected = [
        plain_gae(rewards_BT[b].tolist(), values_BT[b].tolist(), mask_BT[b].tolist(), gamma, lam) for b in range(4)
    ]
    torch.testing.assert_close(gae(inputs), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", [gae, reinforce_pp])
def test_a_sample_in_parts_is_one_episode(estimator: Estimator) -> None:
    """Two parts give every sampled token what the same tokens in one row get, whatever stands between them."""
    generator = torch.Generator().manual_seed(3)
    values_BT = torch.rand(2, 8, generator=generator)
    one_row = AdvantageInputs(
        rewards_B=torch.tensor([2.0, -1.0]),
        group_B=torch.zeros(2, dtype=torch.int64),
        sample_B=torch.arange(2),
        lengths_B=torch.tensor([5, 3]),
        loss_mask_BT=torch.tensor([[False, True, True, False, False, True, True, True], [False] * 5 + [True] * 3]),
        values_BT=values_BT,
        gamma=0.9,
        lam=0.8,
    )
    assert one_row.loss_mask_BT is not None
    first, last = one_row.loss_mask_BT[0].clone(), one_row.loss_mask_BT[0].clone()
    first[4:], last[:4] = False, False
    in_parts = AdvantageInputs(
        rewards_B=torch.tensor([2.0, 2.0, -1.0]),
        group_B=torch.zeros(3, dtype=torch.int64),
        sample_B=torch.tensor([0, 0, 1]),
        lengths_B=torch.tensor([2, 3, 3]),
        loss_mask_BT=torch.stack([first, last, one_row.loss_mask_BT[1]]),
        values_BT=values_BT[[0, 0, 1]],
        gamma=0.9,
        lam=0.8,
    )
    whole, parts = estimator(one_row), estimator(in_parts)
    assert (parts[0] + parts[1]).tolist() == whole[0].tolist()
    assert parts[2].tolist() == whole[1].tolist()
    assert not parts[0][~first].any()


def plain_reinforce_pp(
    rewards: Sequence[Sequence[float]], sampled: Sequence[Sequence[bool]], gamma: float
) -> list[list[float]]:
    to_go = [[0.0] * len(row) for row in rewards]
    for b, row in enumerate(rewards):
        running = 0.0
        for t in reversed(range(len(row))):
            if sampled[b][t]:
                running = row[t] + gamma * running
                to_go[b][t] = running
    flat = [to_go[b][t] for b in range(len(rewards)) for t in range(len(rewards[b])) if sampled[b][t]]
    mean = math.fsum(flat) / len(flat)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in flat) / len(flat))
    return [
        [(x - mean) / (std + 1e-6) if sampled[b][t] else 0.0 for t, x in enumerate(row)] for b, row in enumerate(to_go)
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_reinforce_pp_with_token_rewards_agrees_with_a_plain_loop(gamma: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(5, 7, generator=generator) < 0.5
    rewards_BT = torch.randn(5, 7, generator=generator) * mask_BT
    inputs = AdvantageInputs(
        rewards_B=torch.zeros(5),
        group_B=torch.zeros(5, dtype=torch.int64),
        sample_B=torch.arange(5),
        lengths_B=mask_BT.sum(1),
        loss_mask_BT=mask_BT,
        token_rewards_BT=rewards_BT,
        gamma=gamma,
    )
    expected = plain_reinforce_pp(rewards_BT.tolist(), mask_BT.tolist(), gamma)
    torch.testing.assert_close(reinforce_pp(inputs), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_reinforce_pp_by_hand() -> None:
    # one token with return 1, three with return 0: mean 1/4, variance 3/16
    mask_BT = torch.tensor([[False, True, False, False], [False, True, True, True]])
    inputs = AdvantageInputs(
        torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), torch.arange(2), torch.tensor([1, 3]), loss_mask_BT=mask_BT
    )
    std = math.sqrt(3 / 16) + 1e-6
    torch.testing.assert_close(reinforce_pp(inputs), torch.tensor([0.75 / std, -0.25 / std])[:, None] * mask_BT)


def test_reinforce_pp_of_equal_rewards_is_exactly_zero() -> None:
    mask_BT = torch.tensor([[False, True, True], [False, True, False]])
    inputs = AdvantageInputs(
        torch.tensor([0.1, 0.1]), torch.tensor([0, 1]), torch.arange(2), torch.tensor([2, 1]), loss_mask_BT=mask_BT
    )
    assert not reinforce_pp(inputs).any()


def test_estimators_say_what_they_lack() -> None:
    inputs = of_groups([1.0, 0.0])
    with pytest.raises(ValueError, match="gae: needs values_BT and loss_mask_BT"):
        gae(inputs)
    with pytest.raises(ValueError, match="reinforce_pp: needs loss_mask_BT"):
        reinforce_pp(inputs)


@pytest.mark.parametrize("estimator", [gae, reinforce_pp])
def test_a_row_without_sampled_tokens_changes_no_other_row(estimator: Estimator) -> None:
    mask_BT = torch.tensor([[False, True, True], [False, False, False], [False, True, False]])
    rewards_B, values_BT = torch.tensor([1.0, 50.0, 0.0]), torch.full((3, 3), 0.5)

    def estimate(rows: list[int]) -> torch.Tensor:
        return estimator(
            AdvantageInputs(
                rewards_B[rows],
                torch.zeros(len(rows), dtype=torch.int64),
                torch.tensor(rows),
                mask_BT[rows].sum(1),
                loss_mask_BT=mask_BT[rows],
                values_BT=values_BT[rows],
            )
        )

    with_empty = estimate([0, 1, 2])
    assert not with_empty[1].any()
    assert with_empty[[0, 2]].tolist() == estimate([0, 2]).tolist()
    assert estimate([1]).tolist() == [[0.0, 0.0, 0.0]]


def test_token_rewards_put_the_reward_on_the_last_sampled_token_of_the_last_part() -> None:
    mask_BT = torch.tensor(
        [
            [False, True, True, False],  # sample 0, part 0
            [False, True, False, False],  # sample 0, part 1
            [False, False, False, False],  # sample 0, part 2: nothing sampled
            [False, False, False, False],  # sample 1: nothing sampled
            [False, False, False, True],  # sample 2: EOS only
        ]
    )
    rewards_BT = token_rewards(torch.tensor([5.0, 5.0, 5.0, 7.0, 3.0]), torch.tensor([0, 0, 0, 1, 2]), mask_BT)
    expected = torch.zeros(5, 4)
    expected[1, 1], expected[4, 3] = 5.0, 3.0
    assert rewards_BT.tolist() == expected.tolist()


def test_a_kl_penalty_lands_on_its_own_tokens_and_sums_to_the_samples() -> None:
    mask_BT = torch.tensor([[False, True, True], [False, True, False], [False, False, True]])
    kl_BT = torch.tensor([[9.0, 0.1, 0.2], [9.0, 0.4, 9.0], [float("nan"), float("inf"), 0.5]])
    scores_BT = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rewards_B, sample_B = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([4, 4, 7])
    by_token = token_rewards(rewards_B, sample_B, mask_BT, scores_BT, kl_BT, kl_coef=0.5)
    torch.testing.assert_close(
        by_token, torch.tensor([[0.0, 1.0 - 0.05, -0.1], [0.0, 1.0 - 0.2, 0.0], [0.0, 0.0, 2.0 - 0.25]])
    )
    by_sample = sample_rewards(rewards_B, sample_B, mask_BT, scores_BT, kl_BT, kl_coef=0.5)
    torch.testing.assert_close(by_sample, torch.tensor([2.0 - 0.35, 2.0 - 0.35, 2.0 - 0.25]))


def test_a_sample_without_sampled_tokens_keeps_its_reward_in_the_group() -> None:
    mask_BT = torch.tensor([[False, False], [False, True]])
    rewards_B = sample_rewards(torch.tensor([0.25, 1.0]), torch.arange(2), mask_BT, None, torch.ones(2, 2), 0.5)
    assert rewards_B.tolist() == [0.25, 0.5]
