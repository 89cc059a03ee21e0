"""Costs of rows: the work of a model's layers, to give ranks shares that take equally long.

Letters: B rows of a batch.

The matrices of a layer cost the same for every token. Attention costs more per token that a token sees, so the cost of
a row grows with the square of its length.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.data.batch import shared_prefixes, suffix_lengths
from rlcore.data.token_tree import sorted_rows, walk
from rlcore.types import Batch, Int64s, SharedPrefix

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer's attention relative to that of its matrices."""

    per_seen: float = 0.0
    """Cost of one token that another one sees; the matrices cost 1 per token. 0: only the number of tokens counts."""

    @classmethod
    def of_config(cls, config: Any) -> "LayerCost":
        """The cost of a decoder with gated feed-forward, from its transformers configuration.

        Operations per token: two per weight of the matrices. Per token seen: two per number of a query for the score,
        and two for its share of the output. Only the number of tokens counts if a layer does not see all earlier
        tokens, or if the configuration lacks a size.
        """
        hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        kinds = set(getattr(config, "layer_types", None) or ())
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        if not isinstance(hidden, int) or not isinstance(heads, int) or windowed or not kinds <= {"full_attention"}:
            return cls()
        size = getattr(config, "head_dim", None) or hidden // heads
        query, kv = heads * size, (getattr(config, "num_key_value_heads", None) or heads) * size
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        return cls(2 * query / (hidden * (2 * query + 2 * kv + 3 * inner)))


def row_costs(batch: Batch, shared_prefix: SharedPrefix, cost: LayerCost) -> Float64s:
    """(B,) costs, in units of the matrices' cost of one token, without padding.

    Tokens that rows share count for one of the rows.
    """
    if shared_prefix is SharedPrefix.NONE or not len(batch):
        return _stretch(np.zeros_like(batch.lengths_B), batch.lengths_B, cost)
    costs_B = np.zeros(len(batch))
    if shared_prefix is SharedPrefix.TREE:
        rows = sorted_rows(batch)
        for run, start in walk(rows.tree()):
            costs_B[rows.row_B[run.last - 1]] += _stretch(np.array(start), np.array(run.end), cost)
        return costs_B
    prefix_B = shared_prefixes(batch)
    first_G = np.unique(batch.group_B, return_index=True)[1]
    costs_B += _stretch(prefix_B, prefix_B + suffix_lengths(batch, prefix_B), cost)
    costs_B[first_G] += _stretch(np.zeros_like(first_G), prefix_B[first_G], cost)
    return costs_B


def _stretch(start: Int64s, end: Int64s, cost: LayerCost) -> Float64s:
    """Cost of the tokens from position `start` to before `end`; each sees itself and all earlier ones."""
    seen = (end * (end + 1) - start * (start + 1)) / 2
    return np.asarray((end - start) + cost.per_seen * seen, dtype=np.float64)
