"""`only_top_entropy`: the tokens of highest entropy keep their advantages, as a plain sort chooses them."""

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from rlcore.algo.covariance import select_clip_cov, select_kl_cov
from rlcore.algo.step import weigh
from rlcore.algo.top_entropy import only_top_entropy
from rlcore.config import AlgoConfig
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch

SHARES = (0.01, 0.2, 0.5, 0.93, 1.0)


def algo(share: float, overlong: Literal["none", "mask"] = "none") -> AlgoConfig:
    return AlgoConfig(top_entropy_quantile=share, overlong=overlong)


def with_entropy(batch: Batch, seed: int = 5, **more: Any) -> Batch:
    """Entropies also where no token has a loss: the largest ones."""
    draws = np.random.default_rng(seed)
    shape = batch.tokens.loss_mask_BT.shape
    entropy_BT = np.where(batch.tokens.loss_mask_BT, draws.random(shape), 9.0).astype(np.float32)
    advantages_B = draws.normal(size=shape[0]).astype(np.float32)
    return replace(batch, **({"entropy_BT": entropy_BT, "advantages_B": advantages_B} | more))


def plain_choice(batch: Batch, share: float, rows: set[int]) -> set[tuple[int, int]]:
    """Place of each token of the rows whose entropy is among the highest."""
    assert batch.entropy_BT is not None
    places = [(int(row), int(column)) for row, column in np.argwhere(batch.tokens.loss_mask_BT) if row in rows]
    ranked = sorted(places, key=lambda place: -float(batch.entropy_BT[place]))  # type: ignore[index]
    return set(ranked[: math.ceil(share * len(ranked))])


def places_of(batch: Batch) -> set[tuple[int, int]]:
    assert batch.advantages_BT is not None
    return {(int(row), int(column)) for row, column in np.argwhere(batch.advantages_BT)}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_that_a_plain_sort_ranks_first_keep_the_advantage_of_their_row(share: float, seed: int) -> None:
    batch = with_entropy(random_batch(), seed)
    found, metrics = only_top_entropy(batch, algo(share))
    chosen = plain_choice(batch, share, set(range(len(batch))))
    assert places_of(found) == chosen
    assert found.advantages_B is None
    assert batch.advantages_B is not None
    assert batch.entropy_BT is not None
    for row, column in chosen:
        assert found.advantages_BT is not None
        assert found.advantages_BT[row, column] == batch.advantages_B[row]
    assert metrics == {"policy/top_entropy": min(float(batch.entropy_BT[place]) for place in chosen)}


def test_an_advantage_per_token_is_kept_or_zero() -> None:
    batch = random_batch()
    advantages_BT = np.random.default_rng(2).normal(size=batch.tokens.loss_mask_BT.shape).astype(np.float32)
    batch = with_entropy(batch, advantages_B=None, advantages_BT=advantages_BT)
    found, _ = only_top_entropy(batch, algo(0.3))
    chosen = plain_choice(batch, 0.3, set(range(len(batch))))
    assert found.advantages_BT is not None
    expected_BT = np.zeros_like(advantages_BT)
    for place in chosen:
        expected_BT[place] = advantages_BT[place]
    np.testing.assert_array_equal(found.advantages_BT, expected_BT)


def test_a_whole_number_of_tokens_is_not_rounded_up() -> None:
    """0.28 * 50 is 14.000000000000002 as a float."""
    batch = random_batch(num_groups=12)
    kept_BT = np.zeros_like(batch.tokens.loss_mask_BT)
    kept_BT[tuple(np.argwhere(batch.tokens.loss_mask_BT)[:50].T)] = True
    batch = with_entropy(replace(batch, tokens=replace(batch.tokens, loss_mask_BT=kept_BT)))
    assert len(places_of(only_top_entropy(batch, algo(0.28))[0])) == 14
    assert len(places_of(only_top_entropy(batch, algo(0.281))[0])) == 15
    assert len(places_of(only_top_entropy(batch, algo(1e-12))[0])) == 1


def test_tokens_as_high_as_the_last_that_is_chosen_are_chosen_too() -> None:
    batch = random_batch()
    flat_BT = np.ones(batch.tokens.loss_mask_BT.shape, dtype=np.float32)
    found, metrics = only_top_entropy(with_entropy(batch, entropy_BT=flat_BT), algo(0.1))
    assert len(places_of(found)) == int(batch.num_sampled_B.sum())
    assert metrics == {"policy/top_entropy": 1.0}


def test_truncated_samples_without_a_weight_are_not_counted() -> None:
    """Their entropies are the highest: counted, they would leave nothing for the others."""
    batch = random_batch()
    truncated_B = batch.sample_B == batch.sample_B[0]
    entropy_BT = np.where(truncated_B[:, None], 5.0, with_entropy(batch).entropy_BT).astype(np.float32)
    batch = with_entropy(batch, entropy_BT=entropy_BT, truncated_B=truncated_B)
    rows = {row for row in range(len(batch)) if not truncated_B[row]}
    found, _ = only_top_entropy(batch, algo(0.25, "mask"))
    assert places_of(found) == plain_choice(batch, 0.25, rows)
    counted, _ = only_top_entropy(batch, algo(0.25))
    assert places_of(counted) == plain_choice(batch, 0.25, set(range(len(batch))))


def test_all_samples_without_a_weight_leave_the_batch_as_it_is() -> None:
    batch = with_entropy(random_batch(), truncated_B=np.ones(len(random_batch()), dtype=np.bool_))
    assert only_top_entropy(batch, algo(0.2, "mask")) == (batch, {})


@pytest.mark.parametrize("selection", [select_clip_cov, select_kl_cov])
def test_a_policy_loss_selects_among_the_tokens_that_are_trained(selection: Any) -> None:
    """The penalty of `kl_cov` has a gradient without an advantage, too: elsewhere it would train tokens left out."""
    chosen = replace(algo(0.25), kl_cov_frac=0.5, clip_cov_frac=0.5, clip_cov_low=-100.0, clip_cov_high=100.0)
    batch, _ = only_top_entropy(with_entropy(random_batch()), chosen)
    selected_BT = weigh(batch, chosen, selection).selected_BT
    assert selected_BT is not None
    assert batch.advantages_BT is not None
    assert selected_BT.sum() == len(places_of(batch)) // 2
    assert batch.advantages_BT[selected_BT].all()
    everywhere = weigh(batch, replace(chosen, top_entropy_quantile=1.0), selection).selected_BT
    assert everywhere is not None
    assert not batch.advantages_BT[everywhere].all()


@pytest.mark.parametrize("missing", ["entropy_BT", "advantages_B"])
def test_a_batch_without_entropies_or_advantages_is_an_error(missing: str) -> None:
    with pytest.raises(ValueError, match=r"the batch has none$"):
        only_top_entropy(with_entropy(random_batch(), **{missing: None}), algo(0.2))
