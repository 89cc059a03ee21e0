"""Token trees: what the rows of a group begin with alike, at any number of levels, each run of tokens once.

Turns of a conversation, segments of a sample and equal responses have more in common than the prompt. A token's hidden
state depends on the tokens up to it only, so a run of tokens that several rows share is computed once for all of them,
whether the policy sampled it or not.

Letters: B rows of a batch.

**Where it saves.** Each level costs a join of the attention of all tokens below it. So a run is shared where that saves
at least one token per `BELOW_PER_SAVED` tokens below it, and below another run at least `FEWEST_SAVED` tokens; elsewhere
its tokens are computed for each branch. The rule looks at the rows that are computed together, no others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rlcore.data.batch import needed_tokens
from rlcore.types import Batch, Int64s

BELOW_PER_SAVED = 64
"""Tokens whose attention may be joined once more to save the computation of one: a join moves about ten numbers per
number of a token's queries, forward and backward; computing a token costs some hundred times that."""
FEWEST_SAVED = 16
"""Tokens that a level below another must save: it adds calls to each layer, however few tokens it has."""


@dataclass(frozen=True)
class TokenRun:
    """A run of tokens that neighbouring rows share: a node of the tree, which begins where the run above it ends."""

    first: int
    """Index of its first row in `SortedRows`."""
    last: int
    """Index after its last row."""
    end: int
    """Position after its last token. The last of its rows has all of it; earlier ones may end within it."""
    children: tuple["TokenRun", ...] = ()
    """The runs that follow it in its rows; none, or at least two."""

    @cached_property
    def below(self) -> int:
        """Tokens of all runs below it."""
        return sum(child.end - self.end + child.below for child in self.children)


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Rows by group, within a group by their tokens, so that rows that begin alike are neighbours."""

    row_B: Int64s
    """The row of the batch at each index."""
    group_B: Int64s
    """Its group."""
    needed_B: Int64s
    """How many of its tokens a prediction needs: those before its last loss token."""
    shared_B: Int64s
    """How many of those it has in common with the row before; 0 for the first row of a group."""

    def tree(self, start: int = 0, stop: int | None = None) -> tuple[TokenRun, ...]:
        """The uppermost runs of the rows from index `start` to `stop`."""
        stop = len(self.row_B) if stop is None else stop
        needed, shared = self.needed_B[start:stop].tolist(), [*self.shared_B[start + 1 : stop].tolist(), 0]
        unfinished: list[tuple[int, list[TokenRun]]] = [(0, [])]  # of each: its end, its children so far
        for index, (num_needed, num_shared) in enumerate(zip(needed, shared, strict=True), start):
            run = TokenRun(index, index + 1, num_needed)
            while unfinished[-1][0] > num_shared:
                end, children = unfinished.pop()
                run = _joined(end, [*children, run])
            if unfinished[-1][0] < num_shared:
                unfinished.append((num_shared, []))
            unfinished[-1][1].append(run)
        return tuple(_worthwhile(0, unfinished[0][1]))

    @property
    def groups(self) -> list[tuple[int, int]]:
        """(start, stop) of the indices of each group."""
        bounds = [0, *(np.flatnonzero(np.diff(self.group_B)) + 1).tolist(), len(self.group_B)]
        return list(zip(bounds, bounds[1:], strict=False)) if len(self.group_B) else []


def sorted_rows(batch: Batch) -> SortedRows:
    """The rows of a batch in the order of a token tree."""
    needed_B = needed_tokens(batch)
    # The bytes of big-endian numbers sort as the numbers do.
    bytes_BT = batch.tokens.token_ids_BT.astype(">u4")
    texts = [row[:num].tobytes() for row, num in zip(bytes_BT, needed_B.tolist(), strict=True)]
    groups = batch.group_B.tolist()
    row_B = np.array(sorted(range(len(batch)), key=lambda row: (groups[row], texts[row])), dtype=np.int64)
    group_B, needed_B = batch.group_B[row_B], needed_B[row_B]
    shared_B = np.zeros_like(needed_B)
    ids_BT = batch.tokens.token_ids_BT[row_B]
    if len(batch) > 1 and ids_BT.shape[1]:
        differs = ids_BT[1:] != ids_BT[:-1]
        alike = np.where(differs.any(axis=1), differs.argmax(axis=1), ids_BT.shape[1])
        alike = np.minimum(alike, np.minimum(needed_B[1:], needed_B[:-1]))
        shared_B[1:] = np.where(group_B[1:] == group_B[:-1], alike, 0)
    return SortedRows(row_B, group_B, needed_B, shared_B)


def walk(runs: Sequence[TokenRun], start: int = 0) -> Iterator[tuple[TokenRun, int]]:
    """Each run of the tree, and the position at which it begins."""
    waiting = [(run, start) for run in runs]
    while waiting:
        run, begin = waiting.pop()
        yield run, begin
        waiting += [(child, run.end) for child in run.children]


def num_tokens(runs: Sequence[TokenRun]) -> int:
    """Tokens that are computed for the uppermost runs and all below them."""
    return sum(run.end + run.below for run in runs)


def tree_tokens(batch: Batch) -> Int64s:
    """(B,) tokens that are computed for each row; a run that rows share counts with one of them."""
    rows, tokens_B = sorted_rows(batch), np.zeros(len(batch), dtype=np.int64)
    for run, start in walk(rows.tree()):
        tokens_B[rows.row_B[run.last - 1]] += run.end - start
    return tokens_B


def tree_micro_batches(batch: Batch, max_tokens: int) -> list[Int64s]:
    """Row indices of micro-batches that compute at most `max_tokens` each, most costly groups first, every row once.

    A group that costs more is divided where its rows have least in common with the next; what they share is computed
    once in each part. A row that alone costs more is a micro-batch by itself.
    """
    rows = sorted_rows(batch)
    pieces = [piece for group in rows.groups for piece in _pieces(rows, *group, max_tokens)]
    pieces.sort(key=lambda piece: -piece[2])
    result: list[list[Int64s]] = []
    total, groups = 0, set[int]()
    for start, stop, cost in pieces:
        group = int(rows.group_B[start])
        if not result or total + cost > max_tokens or group in groups:
            result.append([])
            total, groups = 0, set()
        result[-1].append(rows.row_B[start:stop])
        total, groups = total + cost, groups | {group}
    return [np.sort(np.concatenate(part)) for part in result]


def _pieces(rows: SortedRows, start: int, stop: int, max_tokens: int) -> list[tuple[int, int, int]]:
    """(start, stop, tokens) of the parts of a group's indices, in order, each as large as fits."""
    cost = num_tokens(rows.tree(start, stop))
    if cost <= max_tokens or stop - start == 1:
        return [(start, stop, cost)]
    pieces, begin, cost = [], start, num_tokens(rows.tree(start, start + 1))
    for end in range(start + 2, stop + 1):
        longer = num_tokens(rows.tree(begin, end))
        if longer > max_tokens:
            pieces.append((begin, end - 1, cost))
            begin, longer = end - 1, num_tokens(rows.tree(end - 1, end))
        cost = longer
    return [*pieces, (begin, stop, cost)]


def _joined(end: int, runs: Sequence[TokenRun]) -> TokenRun:
    """The run up to `end` that the rows of all these share, with what is worth a run of it below."""
    first, last, children = runs[0].first, runs[-1].last, _worthwhile(end, runs)
    if len(children) == 1:  # the other rows end within it
        return replace(children[0], first=first, last=last)
    return TokenRun(first, last, end, tuple(children))


def _worthwhile(start: int, runs: Sequence[TokenRun]) -> list[TokenRun]:
    """The runs below one that ends at `start`: without empty ones, and without those that save too little."""
    kept: list[TokenRun] = []
    for run in runs:
        saved = (len(run.children) - 1) * (run.end - start)
        if run.end == start:
            continue
        if not run.children or saved >= max(run.below / BELOW_PER_SAVED, FEWEST_SAVED if start else 0):
            kept.append(run)
        else:  # rows that end within the run find their tokens in the first of its branches
            kept += [replace(run.children[0], first=run.first), *run.children[1:]]
    return kept
