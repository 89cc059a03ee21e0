"""`gdpo`: plain loops over the paper's formula, numbers by hand, and what it does where sums say nothing."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algo.advantage import AdvantageInputs, grpo
from rlcore.algo.decoupled import function_scores, gdpo
from rlcore.errors import RewardError
from rlcore.testing.rewards import make_trajectory
from rlcore.types import FrozenDict, Reward, ScoredTrajectory

Scores = Sequence[Sequence[float]]
SKIPPED = math.nan


def inputs_of(groups: Sequence[Scores], weights: Sequence[float]) -> AdvantageInputs:
    """One row per sample, in float64, with the scores of each function."""
    scores_BF = torch.tensor([scores for group in groups for scores in group], dtype=torch.float64)
    weights_F = torch.tensor(weights, dtype=torch.float64)
    return AdvantageInputs(
        rewards_B=scores_BF.nan_to_num() @ weights_F,
        group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group]),
        sample_B=torch.arange(len(scores_BF)),
        lengths_B=torch.ones(len(scores_BF), dtype=torch.int64),
        scores_BF=scores_BF,
        weights_F=weights_F,
    )


def plain_gdpo(groups: Sequence[Scores], weights: Sequence[float]) -> list[float]:
    """The formula sample by sample, with the epsilon and the denominators of `grpo`, and the mean over the batch."""
    sums = []
    for group in groups:
        for scores in group:
            total = 0.0
            for function, weight in enumerate(weights):
                known = [other[function] for other in group if not math.isnan(other[function])]
                if not math.isnan(scores[function]) and len(set(known)) > 1:
                    centred = scores[function] - statistics.fmean(known)
                    total += weight * centred / (statistics.stdev(known) + 1e-6)
            sums.append(total)
    spread = statistics.stdev(sums) if len(sums) > 1 else 0.0
    return [(total - statistics.fmean(sums)) / (spread + 1e-6) for total in sums]


def test_gdpo_by_hand() -> None:
    found = gdpo(inputs_of([[(1.0, 0.0), (0.0, 1.0)]], [1.0, 0.5]))
    assert found.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)
    assert gdpo(inputs_of([[(1.0, 2.0), (1.0, 2.0)], [(3.0, 1.0)]], [1.0, 0.5])).tolist() == [0.0] * 3


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_is_the_formula_of_the_paper(seed: int) -> None:
    draw = np.random.default_rng(seed)
    groups = [draw.integers(0, 3, (size, 3)).astype(float).tolist() for size in (4, 2, 5, 1)]
    groups[0][1][2] = groups[2][0][0] = groups[2][3][0] = SKIPPED
    weights = [1.0, 0.25, -2.0]
    assert gdpo(inputs_of(groups, weights)).tolist() == pytest.approx(plain_gdpo(groups, weights), abs=1e-9)


def test_functions_that_disagree_teach_where_their_sum_does_not() -> None:
    group = [(1.0, 0.0), (0.0, 2.0), (0.0, 2.0)]
    inputs = inputs_of([group], [1.0, 0.5])
    assert inputs.rewards_B.tolist() == [1.0] * 3
    assert not grpo(inputs).any()
    found = gdpo(inputs)
    assert found[0] > 1.0, "the first function has twice the weight, and prefers it"
    assert found[1] == found[2] < 0.0
    opposite = gdpo(inputs_of([[(1.0, 0.0), (0.0, 1.0), (0.0, 1.0)]], [1.0, 1.0]))
    assert opposite.tolist() == pytest.approx([0.0] * 3, abs=1e-9), "with equal weights the two cancel"


@pytest.mark.parametrize("scale", [1e-3, 0.1, 10.0, 1e4])
def test_functions_that_cancel_each_other_at_different_scales_teach_nothing(scale: float) -> None:
    """The epsilon in their deviations leaves a rest, which must not be divided by its own deviation."""
    draw = np.random.default_rng(3)
    groups = [[(x, -scale * x, SKIPPED) for x in draw.normal(size=size)] for size in (4, 2, 5, 1)]
    inputs = inputs_of(groups, [0.7, 0.7, 1.0])
    found = gdpo(replace(inputs, scores_BF=inputs.scores_BF.float().double()))  # type: ignore[union-attr]
    assert found.tolist() == [0.0] * 12
    assert max(map(abs, plain_gdpo(groups, [0.7, 0.7, 1.0]))) > 1e-3, "the formula alone enlarges the rest"


def test_functions_that_cancel_each_other_in_one_group_only_leave_the_formula_as_it_is() -> None:
    groups = [[(1.0, 0.0), (0.0, 10.0)], [(1.0, 3.0), (0.0, 1.0), (0.0, 2.0)]]
    assert gdpo(inputs_of(groups, [1.0, 1.0])).tolist() == pytest.approx(plain_gdpo(groups, [1.0, 1.0]), abs=1e-12)
    nearly = [[(1.0, 0.0), (0.0, 10.0), (2.0, -10.001)]]
    assert gdpo(inputs_of(nearly, [1.0, 1.0])).tolist() == pytest.approx(plain_gdpo(nearly, [1.0, 1.0]), rel=1e-5)


def test_a_function_of_large_scores_does_not_drown_the_others() -> None:
    groups: list[Scores] = [[(1.0, 300.0), (0.0, 900.0), (1.0, 500.0), (0.0, 100.0)]]
    small = [[(first, second / 1000) for first, second in group] for group in groups]
    inputs, in_thousands = inputs_of(groups, [1.0, 1.0]), inputs_of(small, [1.0, 1.0])
    assert torch.allclose(gdpo(inputs), gdpo(in_thousands), atol=1e-4)
    assert not torch.allclose(grpo(inputs), grpo(in_thousands), atol=0.1)


def test_a_skipped_sample_counts_in_no_statistics_of_the_function() -> None:
    groups = [[(1.0, SKIPPED), (0.0, 5.0), (0.5, 1.0), (0.0, 1.0)], [(1.0, 2.0), (0.0, 3.0)]]
    inputs = inputs_of(groups, [0.0, 1.0])  # only the second function counts
    found = gdpo(inputs)
    assert found[0] == 0.0
    without = inputs_of([groups[0][1:], groups[1]], [0.0, 1.0])
    assert (found[1:] / gdpo(without)).tolist() == pytest.approx([float(found[1] / gdpo(without)[0])] * 5)


def test_a_function_that_skips_all_samples_counts_nothing() -> None:
    groups = [[(1.0, SKIPPED), (0.0, SKIPPED), (0.5, SKIPPED)]]
    alone = [[(first,) for first, _ in group] for group in groups]
    assert torch.equal(gdpo(inputs_of(groups, [1.0, 5.0])), gdpo(inputs_of(alone, [1.0])))
    assert gdpo(inputs_of([[(SKIPPED,), (SKIPPED,)]], [1.0])).tolist() == [0.0, 0.0]


def test_segments_of_a_sample_count_once() -> None:
    inputs = inputs_of([[(1.0, 0.0), (0.0, 3.0), (0.5, 1.0)], [(1.0, 1.0), (0.0, 4.0)]], [1.0, 0.5])
    twice = torch.tensor([0, 1, 1, 2, 3, 4, 4, 4])
    assert inputs.scores_BF is not None
    parted = replace(
        inputs,
        rewards_B=inputs.rewards_B[twice],
        group_B=inputs.group_B[twice],
        sample_B=inputs.sample_B[twice],
        lengths_B=inputs.lengths_B[twice],
        scores_BF=inputs.scores_BF[twice],
    )
    assert torch.equal(gdpo(parted), gdpo(inputs)[twice])


def test_gdpo_needs_the_scores() -> None:
    inputs = inputs_of([[(1.0,), (0.0,)]], [1.0])
    for name in ("scores_BF", "weights_F"):
        with pytest.raises(ValueError, match=r"^gdpo: needs scores_BF and weights_F"):
            gdpo(replace(inputs, **{name: None}))
    assert gdpo(replace(inputs, rewards_B=inputs.rewards_B * math.nan)).isnan().all()


def row(sample: int, components: dict[str, float], **more: Any) -> ScoredTrajectory:
    """A row whose reward has these components."""
    return ScoredTrajectory(make_trajectory(0, sample), Reward(1.0, FrozenDict(components), **more))


def test_scores_are_those_of_the_functions_by_name() -> None:
    rows = [row(0, {"f": 1.0, "f/share": 9.0, "g": 2.0}), row(1, {"g": 3.0})]
    found = function_scores(rows, {"g": 0.5, "f": 2.0})
    assert found.weights_F.tolist() == [0.5, 2.0]
    assert found.scores_BF.tolist() == [[2.0, 1.0], [3.0, pytest.approx(SKIPPED, nan_ok=True)]]
    assert function_scores([], {"f": 1.0}).scores_BF.shape == (0, 1)
    with pytest.raises(RewardError, match=r"^reward of .*: found token_scores, .*algo\.advantage=grpo$"):
        function_scores([row(0, {"f": 1.0}, token_scores=np.zeros(3, np.float32))], {"f": 1.0})
