"""Shared prefixes with `tree`: the token tree of a micro-batch as one sequence without padding.

Letters: B rows, T positions, N tokens of the packed sequence, M loss tokens, H hidden size.

Only attention uses the tree: a token sees the runs above its run, and its run up to itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlcore.data.token_tree import TokenRun, sorted_rows
from rlcore.engines.hf.train.context import ContextGroup, Slice, SlicedTree, slice_of
from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.engines.hf.train.tree_attention import Runs, Spans, Tree
from rlcore.types import Batch, Int64s

TREE_ATTENTION = "rlcore_tree"
"""The name of the attention implementation that understands a `Tree`."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of a micro-batch that predictions need, without repeats."""

    token_ids_N: Tensor
    positions_N: Tensor
    """Position of each token in its row."""
    tree: Tree | SlicedTree
    predict_M: Tensor
    """Place of the hidden state from which each loss token is predicted."""
    part: Slice | None = None
    """This rank's slice of the sequence; None: all of it."""


def pack(batch: Batch, device: torch.device, context: ContextGroup | None = None) -> PackedBatch:
    """The rows of a micro-batch as a token tree, each run of tokens stored once; in a context group this rank's slice.

    A row's last loss token and everything after it are left out, because they predict nothing.
    """
    rows = sorted_rows(batch)
    if not rows.needed_B.any():  # transformers computes no empty sequence
        rows = replace(rows, needed_B=(np.arange(len(batch)) == 0).astype(np.int64))
    runs, levels = _places(rows.tree(), device)
    place_BT = np.zeros(batch.tokens.token_ids_BT.shape, dtype=np.int64)
    for run in runs:
        place_BT[rows.row_B[run.first : run.last], run.position : run.position + run.length] = np.arange(
            run.place, run.place + run.length
        )
    lengths = [run.length for run in runs]
    row_N = np.repeat(rows.row_B[[run.last - 1 for run in runs]], lengths)  # earlier rows may end within the run
    positions_N = np.arange(len(row_N)) + np.repeat([run.position - run.place for run in runs], lengths)
    row_M, position_M = np.nonzero(batch.tokens.loss_mask_BT)
    own = Runs.neighbours(0, lengths, device)

    def tensor(array: Int64s) -> Tensor:
        return device_tensor(array.astype(np.int64), device)

    token_ids_N, predict_M = batch.tokens.token_ids_BT[row_N, positions_N], place_BT[row_M, position_M - 1]
    tree = Tree(Spans(own, own, causal=True), levels, longest=int(positions_N.max(initial=-1)) + 1)
    if context is None:
        return PackedBatch(tensor(token_ids_N), tensor(positions_N), tree, tensor(predict_M))
    part = slice_of(len(token_ids_N), predict_M, context)
    sliced = SlicedTree(tree, len(token_ids_N), context)
    return PackedBatch(
        tensor(token_ids_N[part.tokens_n]), tensor(positions_N[part.tokens_n]), sliced, tensor(part.predict_m), part
    )


@dataclass(frozen=True)
class _PlacedRun:
    """A run of a token tree in the packed sequence."""

    first: int
    last: int
    """The indices of its rows in `SortedRows`, the last one excluded."""
    position: int
    """Position of its first token in its rows."""
    place: int
    """Index of its first token in the packed sequence."""
    length: int


def _places(uppermost: Sequence[TokenRun], device: torch.device) -> tuple[list[_PlacedRun], tuple[Spans, ...]]:
    """Places of the runs of a token tree, and for each level the tokens below each of its runs.

    The tokens below a run are contiguous: first the runs that have others below them, then the tokens below each of
    these, then the rest. With one level neither queries nor keys have gaps. Runs of equal length are neighbours, so CPU
    kernels compute them in one call.
    """
    placed, levels = list[_PlacedRun](), list[Spans]()
    stretches: list[tuple[Sequence[TokenRun], int, int]] = [(uppermost, 0, 0)]  # runs, their position, their place
    while stretches:
        keys, queries, below = list[_PlacedRun](), list[tuple[int, int]](), list[tuple[Sequence[TokenRun], int, int]]()
        for runs, position, place in stretches:
            parents = sorted((run for run in runs if run.children), key=lambda run: (-run.end, -run.below))
            leaves = sorted((run for run in runs if not run.children), key=lambda run: -run.end)
            for run in parents:
                keys.append(_PlacedRun(run.first, run.last, position, place, run.end - position))
                place += run.end - position
            for run in parents:
                below.append((run.children, run.end, place))
                queries.append((place, run.below))
                place += run.below
            for run in leaves:
                placed.append(_PlacedRun(run.first, run.last, position, place, run.end - position))
                place += run.end - position
        if keys:
            key_runs = Runs(tuple(run.place for run in keys), tuple(run.length for run in keys), device)
            starts, lengths = zip(*queries, strict=True)
            levels.append(Spans(Runs(starts, lengths, device), key_runs, causal=False))
        placed += keys
        stretches = below
    return sorted(placed, key=lambda run: run.place), tuple(levels)


def tree_hidden(transformer: Any, packed: PackedBatch) -> Tensor:
    """(M, H) hidden states that predict the loss tokens.

    The model's attention implementation must be `TREE_ATTENTION`, until after the backward pass.
    """
    hidden_1NH = transformer.base_model(
        input_ids=packed.token_ids_N[None], position_ids=packed.positions_N[None], use_cache=False, tree=packed.tree
    ).last_hidden_state
    return torch.index_select(hidden_1NH[0], 0, packed.predict_M)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree | SlicedTree,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a packed token tree; transformers calls it once per layer.

    `query` is (1, heads, N, size), `key` and `value` have the heads of the keys; the result is (1, N, heads, size of a
    value). Flash kernels need keys and values of one size, so zeros are added to the smaller ones: they change neither
    scores nor outputs. ValueError for capped scores, and for rows longer than a sliding window, which are not
    supported. Shorter rows see everything through the window.
    """
    if softcap is not None or (sliding_window is not None and not 0 < tree.longest <= sliding_window):
        raise ValueError(
            f"its attention has sliding_window={sliding_window} and softcap={softcap}, and a row {tree.longest} tokens"
        )
    scale, size, kept = query.shape[-1] ** -0.5 if scaling is None else scaling, key.shape[-1], value.shape[-1]
    if size != kept:
        wider = max(size, kept)
        query, key, value = (pad(tensor, (0, wider - tensor.shape[-1])) for tensor in (query, key, value))
    return tree.attend(query, key, value, scale)[..., :kept].transpose(1, 2), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Replaces the [N, N] mask, which a packed sequence does not need."""


@contextmanager
def attending_to_trees(transformer: Any) -> Iterator[None]:
    """Context in which a transformers model has `TREE_ATTENTION`; backward passes belong inside, too."""
    register_tree_attention()
    configs = {id(module.config): module.config for module in transformer.modules() if hasattr(module, "config")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = TREE_ATTENTION
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


@lru_cache(maxsize=1)
def register_tree_attention() -> None:
    """Register `TREE_ATTENTION` with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(TREE_ATTENTION, torch.compiler.disable(tree_attention))  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(TREE_ATTENTION, _no_mask)
