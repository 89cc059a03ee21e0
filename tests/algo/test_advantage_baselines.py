"""Further estimators: plain loops over the papers' formulas, all subsets for pass@k, and numbers by hand."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest
import torch

from rlcore.algo.advantage import AdvantageInputs, gpg, opo, pass_at_k, reinforce_pp_baseline, remax

Estimator = Callable[[AdvantageInputs], torch.Tensor]
Groups = Sequence[Sequence[float]]


def of_groups(groups: Groups, lengths: Sequence[int] | None = None, k: int = 1) -> AdvantageInputs:
    """One row per sample, in float64; every sample has one token unless `lengths` says otherwise."""
    rewards = [reward for group in groups for reward in group]
    return AdvantageInputs(
        rewards_B=torch.tensor(rewards, dtype=torch.float64),
        group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group]),
        sample_B=torch.arange(len(rewards)),
        lengths_B=torch.tensor(lengths or [1] * len(rewards)),
        pass_k=k,
    )


def random_groups(seed: int) -> tuple[list[list[float]], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [5, 2, 1, 4]
    groups = [torch.randint(0, 4, (size,), generator=generator).double().tolist() for size in sizes]
    return [*groups, [0.1, 0.1, 0.1]], torch.randint(0, 9, (15,), generator=generator).tolist()


def says_nothing(group: Sequence[float]) -> bool:
    return min(group) == max(group)


def plain_opo(groups: Groups, lengths: Sequence[int]) -> list[float]:
    result, start = [], 0
    for group in groups:
        own = lengths[start : start + len(group)]
        start += len(group)
        baseline = (
            sum(n * r for n, r in zip(own, group, strict=True)) / sum(own)
            if sum(own)
            else math.fsum(group) / len(group)
        )
        result += [0.0 if says_nothing(group) else r - baseline for r in group]
    return result


def plain_gpg(groups: Groups, lengths: Sequence[int]) -> list[float]:
    total = sum(len(group) for group in groups)
    telling = sum(len(group) for group in groups if not says_nothing(group))
    return [
        0.0 if says_nothing(group) else (r - math.fsum(group) / len(group)) * total / telling
        for group in groups
        for r in group
    ]


def plain_reinforce_pp_baseline(groups: Groups, lengths: Sequence[int]) -> list[float]:
    centred = [0.0 if says_nothing(group) else r - math.fsum(group) / len(group) for group in groups for r in group]
    tokens = [value for value, length in zip(centred, lengths, strict=True) for _ in range(length)]
    mean = math.fsum(tokens) / len(tokens)
    std = math.sqrt(math.fsum((token - mean) ** 2 for token in tokens) / len(tokens))
    return [(value - mean) / (std + 1e-6) for value in centred]


PLAIN = [(opo, plain_opo), (gpg, plain_gpg), (reinforce_pp_baseline, plain_reinforce_pp_baseline)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("estimator", "plain"), PLAIN, ids=lambda function: function.__name__)
def test_an_estimator_agrees_with_a_plain_loop(
    estimator: Estimator, plain: Callable[[Groups, Sequence[int]], list[float]], seed: int
) -> None:
    groups, lengths = random_groups(seed)
    assert estimator(of_groups(groups, lengths)).tolist() == pytest.approx(plain(groups, lengths), abs=1e-9)


def best_of_all_sets(group: Sequence[float], k: int) -> list[float]:
    """The advantage of each sample by listing every set of k of the group."""
    sets = list(combinations(range(len(group)), k))
    best = [max(group[i] for i in value) for value in sets]
    mean = math.fsum(best) / len(best)
    std = math.sqrt(math.fsum((score - mean) ** 2 for score in best) / len(best))
    if std < 1e-12:
        return [0.0] * len(group)
    own = [[b for b, group in zip(best, sets, strict=True) if i in group] for i in range(len(group))]
    return [(math.fsum(pool) / len(pool) - mean) / std for pool in own]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_pass_at_k_agrees_with_a_list_of_all_sets(k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    real = torch.randn(6, generator=generator).tolist()
    ties = torch.randint(0, 2, (6,), generator=generator).double().tolist()
    for group in (real, ties):
        assert pass_at_k(of_groups([group], k=k)).tolist() == pytest.approx(best_of_all_sets(group, k), abs=1e-6)


def test_pass_at_k_is_the_papers_closed_form_for_right_and_wrong() -> None:
    # N = 5, of which 3 are wrong, k = 2: R = 1 - C(3,2)/C(5,2) = 0.7; a wrong one: 1 - R - C(2,1)/C(4,1)
    std = math.sqrt(0.7 * 0.3)
    right, wrong = 0.3 / std, (0.3 - 0.5) / std
    seen = pass_at_k(of_groups([[1.0, 0.0, 0.0, 1.0, 0.0]], k=2)).tolist()
    assert seen == pytest.approx([right, wrong, wrong, right, wrong])


def test_pass_at_k_says_nothing_where_every_set_has_a_right_one_and_shrinks_k_with_the_group() -> None:
    assert pass_at_k(of_groups([[1.0, 1.0, 0.0, 1.0], [0.5], [0.0, 0.0]], k=2)).tolist() == [0.0] * 7
    # of a group of two only single samples compare
    assert pass_at_k(of_groups([[1.0, 0.0]], k=4)).tolist() == pytest.approx([1.0, -1.0])


def test_opo_by_hand_weighs_long_samples_more() -> None:
    # baseline (3 * 1 + 1 * 0) / 4
    assert opo(of_groups([[1.0, 0.0]], [3, 1])).tolist() == pytest.approx([0.25, -0.75])


def test_gpg_by_hand_scales_by_the_groups_that_say_something() -> None:
    assert gpg(of_groups([[1.0, 0.0], [1.0, 1.0]])).tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0])


def test_reinforce_pp_baseline_by_hand() -> None:
    # centred 0.5 (three tokens) and -0.5 (one): mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875
    seen = reinforce_pp_baseline(of_groups([[1.0, 0.0]], [3, 1])).tolist()
    std = math.sqrt(0.1875) + 1e-6
    assert seen == pytest.approx([0.25 / std, -0.75 / std])
    assert reinforce_pp_baseline(of_groups([[1.0, 1.0], [0.3]])).tolist() == [0.0] * 3


def test_remax_is_the_reward_less_that_of_the_greedy_sample() -> None:
    inputs = AdvantageInputs(
        rewards_B=torch.tensor([1.0, 0.0, 0.25]),
        group_B=torch.tensor([0, 0, 1]),
        sample_B=torch.arange(3),
        lengths_B=torch.ones(3, dtype=torch.int64),
        baseline_B=torch.tensor([0.5, 0.5, 1.0]),
    )
    assert remax(inputs).tolist() == [0.5, -0.5, -0.75]
    with pytest.raises(ValueError, match="remax: needs baseline_B"):
        remax(of_groups([[1.0]]))


@pytest.mark.parametrize("estimator", [opo, gpg, pass_at_k])
def test_equal_rewards_and_lonely_samples_have_advantage_exactly_zero(estimator: Estimator) -> None:
    seen = estimator(of_groups([[0.1] * 3, [1 / 3] * 7, [0.9], [1.0, 0.0]], k=2)).tolist()
    assert seen[:11] == [0.0] * 11
    assert seen[11] != 0.0


@pytest.mark.parametrize("estimator", [opo, gpg, pass_at_k, reinforce_pp_baseline])
def test_parts_of_a_sample_count_once_and_share_its_advantage(estimator: Estimator) -> None:
    whole = estimator(of_groups([[1.0, 0.0, 0.25], [2.0, 5.0]], [7, 2, 5, 3, 1], k=2))
    rows = [0, 0, 0, 1, 2, 2, 3, 4]
    parts = AdvantageInputs(
        rewards_B=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.25, 0.25, 2.0, 5.0], dtype=torch.float64),
        group_B=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]),
        sample_B=torch.tensor(rows),
        lengths_B=torch.tensor([3, 0, 4, 2, 4, 1, 3, 1]),
        pass_k=2,
    )
    assert estimator(parts).tolist() == whole[rows].tolist()
