"""Row weights: hand-computed denominators, a plain loop over the definitions, and exactness under any split."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algo.aggregation import Mode, row_weights, weighted_sum

MODES: tuple[Mode, ...] = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_constant")


def plain_loss(mode: Mode, losses: list[list[float]], samples: list[int], constant: float) -> float:
    """The definitions of docs/algorithms.md; `losses` holds the loss tokens of each row only."""
    by_sample: dict[int, list[float]] = {}
    for row, sample in zip(losses, samples, strict=True):
        by_sample.setdefault(sample, []).extend(row)
    sequences = [tokens for tokens in by_sample.values() if tokens]
    if not sequences:
        return 0.0
    if mode == "token_mean":
        tokens = [x for sequence in sequences for x in sequence]
        return sum(tokens) / len(tokens)
    if mode == "seq_mean_token_mean":
        return sum(sum(s) / len(s) for s in sequences) / len(sequences)
    total = sum(sum(s) for s in sequences) / len(sequences)
    return total if mode == "seq_mean_token_sum" else total / constant


def test_weights_of_a_hand_computed_mini_batch() -> None:
    # sample 0 has two parts of 1 and 3 tokens, sample 1 one of 2, sample 2 has none
    num_sampled_B, sample_B = np.array([1, 3, 2, 0]), np.array([0, 0, 1, 2])
    assert row_weights("token_mean", num_sampled_B, sample_B).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0])
    assert row_weights("seq_mean_token_mean", num_sampled_B, sample_B).tolist() == [0.125, 0.125, 0.25, 0.0]
    assert row_weights("seq_mean_token_sum", num_sampled_B, sample_B).tolist() == [0.5, 0.5, 0.5, 0.0]
    assert row_weights("token_sum_constant", num_sampled_B, sample_B, 4.0).tolist() == [0.125, 0.125, 0.125, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_a_mini_batch_without_tokens_has_no_weights_and_no_division_by_zero(mode: Mode) -> None:
    assert row_weights(mode, np.array([0, 0]), np.array([0, 1]), 8.0).tolist() == [0.0, 0.0]
    assert row_weights(mode, np.array([], dtype=np.int64), np.array([], dtype=np.int64), 8.0).tolist() == []


@pytest.mark.slow
@given(seed=st.integers(0, 100_000), mode=st.sampled_from(MODES), num_rows=st.integers(1, 8))
@settings(deadline=None, max_examples=200)
def test_any_split_into_micro_batches_gives_the_loss_and_gradient_of_the_plain_loop(
    seed: int, mode: Mode, num_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    mask_BT = rng.random((num_rows, 6)) < 0.5
    samples = np.sort(rng.integers(0, num_rows, num_rows))
    values_BT = rng.normal(size=(num_rows, 6))
    weights_B = row_weights(mode, mask_BT.sum(1), samples, 5.0)
    losses_BT = torch.tensor(np.where(mask_BT, values_BT, np.nan), requires_grad=True)

    shuffled = rng.permutation(num_rows)
    cuts = np.sort(rng.integers(0, num_rows + 1, rng.integers(0, 4)))
    total = 0.0
    for rows in np.split(shuffled, cuts):
        part = weighted_sum(losses_BT[rows], torch.tensor(mask_BT[rows]), torch.tensor(weights_B[rows]))
        part.backward()  # type: ignore[no-untyped-call]
        total += part.item()

    expected = plain_loss(mode, [values_BT[b][mask_BT[b]].tolist() for b in range(num_rows)], samples.tolist(), 5.0)
    assert total == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert losses_BT.grad is not None
    np.testing.assert_allclose(losses_BT.grad.numpy(), mask_BT * weights_B[:, None], rtol=1e-12)


def test_a_masked_sample_is_as_if_it_were_not_there() -> None:
    for mode in MODES:
        masked = row_weights(mode, np.array([3, 0, 2]), np.array([0, 1, 2]), 8.0)
        without = row_weights(mode, np.array([3, 2]), np.array([0, 2]), 8.0)
        assert masked[[0, 2]].tolist() == without.tolist()
        assert masked[1] == 0.0
