"""Rows of a mini-batch are shared out to the ranks."""

import numpy as np
import pytest

from rlcore.data.row_costs import LayerCost, row_costs
from rlcore.engines.hf.train.ranks import balanced, by_node, computed_tokens, shares
from rlcore.testing.tiny import batch_of_rows, random_batch
from rlcore.types import SharedPrefix


def test_no_rank_has_more_tokens_than_the_one_with_the_fewest_plus_the_largest_group() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_rows, num_ranks = int(rng.integers(1, 40)), int(rng.integers(1, 6))
        lengths_B = rng.geometric(0.02, num_rows)
        groups_B = rng.integers(0, rng.integers(1, num_rows + 1), num_rows)
        ranks_B = balanced(lengths_B, groups_B, num_ranks)
        loads = [
            sum(int(n) for n, rank in zip(lengths_B, ranks_B, strict=True) if rank == index)
            for index in range(num_ranks)
        ]
        sizes = [int(lengths_B[groups_B == group].sum()) for group in set(groups_B.tolist())]
        assert max(loads) - min(loads) <= max(sizes)
        for group in set(groups_B.tolist()):
            assert len(set(ranks_B[groups_B == group].tolist())) == 1


def test_a_shared_prompt_counts_once_for_its_group() -> None:
    batch = random_batch(num_groups=3, samples=4, seed=2)
    plain_B = computed_tokens(batch, SharedPrefix.NONE)
    shared_B = computed_tokens(batch, SharedPrefix.TREE)
    assert plain_B.tolist() == batch.lengths_B.tolist()
    for group in range(3):
        rows = np.flatnonzero(batch.group_B == group)
        prompt = int(batch.prompt_lengths_B[rows[0]])
        # A row's last token predicts nothing and is not computed.
        sampled = sum(int(batch.lengths_B[row]) - prompt for row in rows)
        assert sampled + prompt - len(rows) == int(shared_B[rows].sum())


@pytest.mark.slow
def test_a_row_of_32k_tokens_gets_a_rank_with_fewer_tokens_than_the_others() -> None:
    """By tokens alone its rank would take a third longer than the mean."""
    cost = LayerCost(1 / 15234)  # of Qwen2.5-1.5B
    batch = batch_of_rows([[[row, *range(32767)] if row == 0 else [row, *range(499)]] for row in range(513)])
    costs_B = row_costs(batch, SharedPrefix.NONE, cost)

    def largest(seen: LayerCost) -> float:
        loads = np.bincount(shares(batch, SharedPrefix.NONE, seen, 4), costs_B)
        return float(loads.max() / loads.mean())

    assert largest(cost) < 1.01
    assert largest(LayerCost()) > 1.25


def test_ranks_are_sorted_by_node_and_the_first_stays_the_first() -> None:
    assert by_node(["b", "a", "b", "c", "a"]) == [0, 2, 1, 4, 3]
    assert by_node(["a"] * 3) == [0, 1, 2]
