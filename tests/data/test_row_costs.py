"""Costs of rows: tokens, and what each of them sees."""

from types import SimpleNamespace

import numpy as np
import pytest

from rlcore.data.row_costs import LayerCost, row_costs
from rlcore.data.token_tree import tree_tokens
from rlcore.testing.tiny import batch_of_rows, random_batch
from rlcore.types import SharedPrefix

QWEN = SimpleNamespace(
    hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960, num_hidden_layers=28
)


def test_attention_costs_as_much_as_the_matrices_where_its_operations_are_as_many() -> None:
    """Counted by hand: queries, output and two of 256 wide, three feed-forward matrices; 2 x 1536 products a token."""
    matrices = 2 * (1536 * 1536 * 2 + 1536 * 256 * 2 + 3 * 1536 * 8960)
    assert LayerCost.of_config(QWEN).per_seen == pytest.approx(4 * 1536 / matrices)


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": 128}, {"layer_types": ["full_attention", "sliding_attention"]}, {"hidden_size": None}],
    ids=["window", "layers with a window", "unknown"],
)
def test_tokens_alone_count_where_a_layer_does_not_see_all_or_sizes_are_unknown(changes: dict[str, object]) -> None:
    config = SimpleNamespace(**(vars(QWEN) | changes))
    assert LayerCost.of_config(config) == LayerCost(0.0)
    assert LayerCost.of_config(SimpleNamespace(**vars(QWEN), sliding_window=128, use_sliding_window=False)).per_seen > 0


def test_a_token_sees_itself_and_all_before_it_also_those_that_rows_share() -> None:
    rows = [[1, *range(40), 50, 51, 52], [1, *range(40), 60, 61]]
    batch = batch_of_rows([rows])
    seen = LayerCost(1.0)
    plain_B = row_costs(batch, SharedPrefix.NONE, seen)
    assert plain_B.tolist() == [n + n * (n + 1) / 2 for n in (44, 43)]
    for way in (SharedPrefix.TREE, SharedPrefix.CACHE):
        free_B, costs_B = row_costs(batch, way, LayerCost()), row_costs(batch, way, seen)
        counted = costs_B.sum() - free_B.sum()
        if way is SharedPrefix.TREE:  # 43 tokens of one row before its last, and one more of the other
            assert free_B.sum() == tree_tokens(batch).sum() == 41 + 2 + 1
            assert counted == sum(range(1, 44)) + 42
        else:  # the first token alone is a prompt
            assert counted == sum(range(1, 44)) + sum(range(1, 43)) - 1


def test_without_attention_costs_are_tokens() -> None:
    batch = random_batch(num_groups=3, samples=4, seed=2)
    np.testing.assert_array_equal(row_costs(batch, SharedPrefix.NONE, LayerCost()), batch.lengths_B)
    np.testing.assert_array_equal(row_costs(batch, SharedPrefix.TREE, LayerCost()), tree_tokens(batch))
