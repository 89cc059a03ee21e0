"""Deals rows to ranks and into micro-batches.

Ranks that gather weights together start each micro-batch together, so a micro-batch takes as long as the rank whose
rows cost most. `dealt` fills the first micro-batch of all ranks to equal cost, then the second, and so on. `split`
makes the micro-batches of a rank that does not wait for others.

Letters: B rows of a batch, R ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import ceil, inf

import numpy as np

from rlcore.data.batch import (
    group_pieces,
    micro_batches,
    select,
    shared_micro_batches,
    shared_prefixes,
    suffix_lengths,
)
from rlcore.data.row_costs import Float64s, LayerCost, row_costs
from rlcore.data.token_tree import sorted_rows, tree_micro_batches, tree_pieces
from rlcore.types import Batch, Int64s, SharedPrefix

WORTH = 0.97
"""More micro-batches are made only if they take less than this share of the time, because each gathers weights."""


def split(batch: Batch, max_tokens: int, shared_prefix: SharedPrefix) -> list[Int64s]:
    """The rows of each micro-batch of at most `max_tokens`."""
    if shared_prefix is SharedPrefix.NONE:
        return micro_batches(batch.lengths_B, max_tokens)
    if shared_prefix is SharedPrefix.TREE:
        return tree_micro_batches(batch, max_tokens)
    return shared_micro_batches(batch, max_tokens)


def dealt(batch: Batch, max_tokens: int, shared_prefix: SharedPrefix, cost: LayerCost, num: int) -> list[list[Int64s]]:
    """The rows of each micro-batch of each of `num` ranks; all ranks have equally many, some perhaps without rows.

    Every row is in one micro-batch. Each computes at most `max_tokens`, padding included; a longer row is alone. With a
    shared prefix, rows of a group stay together as far as they fit. The k-th micro-batches of the ranks have similar
    costs: the most costly rows set the level to which the others are filled.
    """
    pieces = sorted(_pieces(batch, max_tokens, shared_prefix, cost), key=lambda piece: -piece.cost)
    if not pieces:
        return [[] for _ in range(num)]
    fewest = ceil(sum(piece.tokens for piece in pieces) / (num * max_tokens))
    steps = _steps(pieces, max_tokens, num, fewest)
    for more in (len(steps), len(steps) + 1):
        found = _steps(pieces, max_tokens, num, more)
        if _time(found) < WORTH * _time(steps):
            steps = found
    ranks: list[list[Int64s]] = [[] for _ in range(num)]
    totals = [0.0] * num
    for step in steps:
        order = sorted(range(num), key=lambda rank: totals[rank])
        for rank, part in zip(order, sorted(step, key=lambda part: -part.cost), strict=True):
            totals[rank] += part.cost
            ranks[rank].append(np.sort(np.concatenate([np.zeros(0, np.int64), *part.rows])))
    return ranks


@dataclass(frozen=True, eq=False)
class _Piece:
    """Rows that stay together."""

    rows: Int64s
    cost: float
    tokens: int
    """Tokens that are computed for these rows alone."""
    prefix: int = 0
    longest: int = 0
    """Prefix and longest suffix of a padded piece; 0 for a packed one."""


@dataclass(eq=False)
class _Part:
    """A micro-batch of one rank that is being filled."""

    rows: list[Int64s] = field(default_factory=list)
    num_rows: int = 0
    cost: float = 0.0
    packed: int = 0
    prefix: int = 0
    longest: int = 0
    """The longest prefix and suffix of the padded pieces."""
    per_row: float = 0.0
    """Cost of the most costly row; padding raises all others to it."""

    def tokens_with(self, piece: _Piece) -> int:
        """Tokens that are computed with one more piece, padding included."""
        if not piece.longest:
            return self.packed + piece.tokens
        pieces, rows = len(self.rows) + 1, self.num_rows + len(piece.rows)
        return pieces * max(self.prefix, piece.prefix) + rows * max(self.longest, piece.longest)

    def cost_with(self, piece: _Piece) -> float:
        """Cost with one more piece, padding included."""
        if not piece.longest:
            return self.cost + piece.cost
        return (self.num_rows + len(piece.rows)) * max(self.per_row, piece.cost / len(piece.rows))

    def take(self, piece: _Piece) -> None:
        self.cost, self.packed = self.cost_with(piece), self.packed + piece.tokens
        self.per_row = max(self.per_row, piece.cost / len(piece.rows))
        self.prefix, self.longest = max(self.prefix, piece.prefix), max(self.longest, piece.longest)
        self.rows.append(piece.rows)
        self.num_rows += len(piece.rows)


def _pieces(batch: Batch, max_tokens: int, shared_prefix: SharedPrefix, cost: LayerCost) -> list[_Piece]:
    """Single rows; with a shared prefix whole groups, or the parts of a group that fit."""
    costs_B = row_costs(batch, shared_prefix, cost)
    if shared_prefix is SharedPrefix.NONE:
        lengths = batch.lengths_B.tolist()
        return [
            _Piece(np.array([row]), costs_B[row], length, longest=max(1, length)) for row, length in enumerate(lengths)
        ]
    if shared_prefix is SharedPrefix.CACHE:
        prefix_B = shared_prefixes(batch)
        suffix_B = suffix_lengths(batch, prefix_B)
        return [
            _Piece(
                rows,
                _cost_of(batch, rows, costs_B, shared_prefix, cost),
                int(prefix_B[rows[0]] + len(rows) * suffix_B[rows].max()),
                int(prefix_B[rows[0]]),
                max(1, int(suffix_B[rows].max())),
            )
            for rows in group_pieces(batch, prefix_B, suffix_B, max_tokens)
        ]
    sorted_ = sorted_rows(batch)
    return [
        _Piece(rows, _cost_of(batch, rows, costs_B, shared_prefix, cost), tokens)
        for start, stop, tokens in tree_pieces(sorted_, max_tokens)
        for rows in [sorted_.row_B[start:stop]]
    ]


def _cost_of(batch: Batch, rows: Int64s, costs_B: Float64s, shared_prefix: SharedPrefix, cost: LayerCost) -> float:
    """Cost of some rows of a group; shared tokens count once in each part of a divided group."""
    if len(rows) == np.count_nonzero(batch.group_B == batch.group_B[rows[0]]):
        return float(costs_B[rows].sum())
    return float(row_costs(select(batch, rows), shared_prefix, cost).sum())


def _steps(pieces: Sequence[_Piece], max_tokens: int, num: int, wanted: int) -> list[list[_Part]]:
    """The parts of all ranks, one micro-batch after the other: about as many as `wanted`, more if not all fit."""
    left, steps = list(pieces), list[list[_Part]]()
    while left:
        remaining = max(1, wanted - len(steps))
        level = max(left[0].cost, sum(piece.cost for piece in left) / (num * remaining)) * (1 + 1e-9)
        step, left = _filled(left, max_tokens, num, level if remaining > 1 else inf)
        steps.append(step)
    return steps


def _filled(pieces: Sequence[_Piece], max_tokens: int, num: int, level: float) -> tuple[list[_Part], list[_Piece]]:
    """A part for each rank, filled to the level or to `max_tokens`, and the pieces that are left."""

    def has_room(piece: _Piece, place: int) -> bool:
        part = step[place]
        return not part.rows or (part.tokens_with(piece) <= max_tokens and part.cost_with(piece) <= level)

    step = [_Part() for _ in range(num)]
    unfilled, left = [(0.0, index) for index in range(num)], list[_Piece]()
    for index, piece in enumerate(pieces):
        # The other parts cost more: a piece that is too much for the first is too much for all.
        too_much = unfilled[0][0] > 0 and unfilled[0][0] + piece.cost > level
        chosen = None if too_much else _lowest(unfilled, partial(has_room, piece))
        if chosen is None:
            left.append(piece)
            continue
        part = step[chosen]
        part.take(piece)
        if has_room(pieces[-1], chosen):
            heappush(unfilled, (part.cost, chosen))
        elif not unfilled:
            return step, [*left, *pieces[index + 1 :]]
    return step, left


def _lowest(heap: list[tuple[float, int]], has_room: Callable[[int], bool]) -> int | None:
    """Remove the place of lowest cost that has room from the heap, and return it."""
    passed = []
    chosen = None
    while heap and chosen is None:
        cost, place = heappop(heap)
        if has_room(place):
            chosen = place
        else:
            passed.append((cost, place))
    for entry in passed:
        heappush(heap, entry)
    return chosen


def _time(steps: Sequence[Sequence[_Part]]) -> float:
    """Cost of the parts that the ranks wait for: the most costly part of each step."""
    return sum(max(part.cost for part in step) for step in steps)
