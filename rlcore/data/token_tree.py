"""Token trees: the common beginnings of a group's rows, at any number of levels, with each run of tokens once.

Turns of a conversation, segments of a sample and equal responses have more in common than the prompt. A token's hidden
state depends only on the tokens up to it. So a run of tokens that several rows share is computed once for all of them,
also if the policy sampled it.

Letters: B rows of a batch.

**Choice of runs.** Each level costs a join of the attention of all tokens below it, and calls to each layer. The tree
has the runs with the lowest sum of three numbers: the computed tokens, one per `JOINED_PER_TOKEN` tokens below each
run, and `LEVEL_TOKENS` for each run that is below another. The tokens of other runs are computed for each branch. Only
rows that are computed together count.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rlcore.data.batch import needed_tokens
from rlcore.types import Batch, Int64s

JOINED_PER_TOKEN = 64
"""Number of tokens whose attention is joined once more at the cost of computing one token.

A join moves about ten numbers per number of a token's queries, forward and backward. Computing a token costs some
hundred times that.
"""
LEVEL_TOKENS = 16
"""Number of tokens that are computed at the cost of the calls for a level."""
MOST_SPREAD = 16
"""Most nested runs, one below the other, that may be computed for each branch. A bound of the search."""


@dataclass(frozen=True)
class TokenRun:
    """A run of tokens that neighbouring rows share: a node of the tree. It begins where the run above it ends."""

    first: int
    """Index of its first row in `SortedRows`."""
    last: int
    """Index after its last row."""
    end: int
    """Position after its last token. The last of its rows has the whole run; earlier rows may end within it."""
    children: tuple["TokenRun", ...] = ()
    """The runs that follow it in its rows; none, or at least two."""
    below: int = 0
    """Tokens of all runs below it."""


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Rows sorted by group and within a group by their tokens, so that rows with a common beginning are neighbours."""

    row_B: Int64s
    """The row of the batch at each index."""
    group_B: Int64s
    """The group of the row at each index."""
    needed_B: Int64s
    """Number of the row's tokens that a prediction needs: those before its last loss token."""
    shared_B: Int64s
    """Number of leading tokens in common with the previous row; 0 for the first row of a group."""

    def tree(self, start: int = 0, stop: int | None = None) -> tuple[TokenRun, ...]:
        """The uppermost runs of the rows from index `start` to `stop`."""
        stop = len(self.row_B) if stop is None else stop
        return _worthwhile(_branchings(start, self.needed_B[start:stop].tolist(), self.shared_B[start:stop].tolist()))

    @property
    def groups(self) -> list[tuple[int, int]]:
        """(start, stop) of the indices of each group."""
        bounds = [0, *(np.flatnonzero(np.diff(self.group_B)) + 1).tolist(), len(self.group_B)]
        return list(pairwise(bounds)) if len(self.group_B) else []


def sorted_rows(batch: Batch) -> SortedRows:
    """The rows of a batch in the order of a token tree."""
    needed_B = needed_tokens(batch)
    # The bytes of big-endian numbers sort like the numbers.
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
    """(B,) tokens that are computed for each row; a run that rows share counts for one of them."""
    rows, tokens_B = sorted_rows(batch), np.zeros(len(batch), dtype=np.int64)
    for run, start in walk(rows.tree()):
        tokens_B[rows.row_B[run.last - 1]] += run.end - start
    return tokens_B


def tree_micro_batches(batch: Batch, max_tokens: int) -> list[Int64s]:
    """Row indices of micro-batches that compute at most `max_tokens` each, most costly groups first, every row once.

    A group that costs more is divided, in the order of its rows; tokens that its parts share are computed once in each
    part. A row that alone costs more is a micro-batch by itself.
    """
    rows = sorted_rows(batch)
    pieces = tree_pieces(rows, max_tokens)
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


def tree_pieces(rows: SortedRows, max_tokens: int) -> list[tuple[int, int, int]]:
    """(start, stop, tokens) of the indices of each group, divided as in `tree_micro_batches`."""
    return [piece for group in rows.groups for piece in _pieces(rows, *group, max_tokens)]


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


@dataclass(eq=False)
class _Branching:
    """A place where rows diverge, or where one of them ends: a run of tokens that may be shared."""

    first: int
    last: int
    end: int
    """The field of `TokenRun`."""
    children: "list[_Branching]"
    starts: tuple[int, ...] = ()
    """The ends of the branchings above it, nearest first: its run begins at the nearest one that is shared."""


def _branchings(start: int, needed: Sequence[int], shared: Sequence[int]) -> list[_Branching]:
    """All places where rows diverge, each after those below it; the last is the one before the first token.

    `start`: index of the first row; `needed`, `shared`: of these rows, as in `SortedRows`.
    """
    found: list[_Branching] = []
    unfinished = [_Branching(start, start, 0, [])]
    for index, num_needed in enumerate(needed):
        num_shared = shared[index + 1] if index + 1 < len(shared) else 0
        branch = _Branching(start + index, start + index + 1, num_needed, [])
        found.append(branch)
        while unfinished[-1].end > num_shared:
            parent = unfinished.pop()
            _take(parent, branch)
            if len(parent.children) == 1:  # the other rows end within it
                branch = parent.children[0]
                branch.first, branch.last = parent.first, parent.last
            else:
                branch = parent
                found.append(branch)
        if unfinished[-1].end < num_shared:
            unfinished.append(_Branching(branch.first, branch.last, num_shared, []))
        _take(unfinished[-1], branch)
    return [*found, unfinished[0]]


def _take(parent: _Branching, child: _Branching) -> None:
    """Make the child's rows the parent's; a child that ends with the parent has no tokens."""
    parent.last = child.last
    if child.end > parent.end:
        parent.children.append(child)


@dataclass(frozen=True)
class _Choice:
    """The runs of a branching, if they begin at a given position."""

    cost: float
    tokens: int
    runs: tuple[TokenRun, ...]


def _worthwhile(branchings: Sequence[_Branching]) -> tuple[TokenRun, ...]:
    """The uppermost runs of the tree of lowest cost."""
    for branching in reversed(branchings):
        for child in branching.children:
            child.starts = (branching.end, *branching.starts[: MOST_SPREAD - 1])
    choices: dict[_Branching, list[_Choice]] = {}  # one per start; removed when the parent chooses
    *below, top = branchings
    for branching in below:
        if branching.starts:  # a branching without starts has no tokens
            choices[branching] = _choices(branching, [choices.pop(child) for child in branching.children])
    return tuple(run for child in top.children for run in choices[child][0].runs)


def _choices(branching: _Branching, children: Sequence[list[_Choice]]) -> list[_Choice]:
    """The better choice for each of `starts`: one run that all rows share, or the runs below it, beginning there."""
    first, end = branching.first, branching.end
    here = _together([choices[0] for choices in children])
    run = TokenRun(first, branching.last, end, here.runs, here.tokens)
    result = []
    for index, start in enumerate(branching.starts):
        cost = end - start + here.cost
        if children:
            cost += here.tokens / JOINED_PER_TOKEN + (LEVEL_TOKENS if start else 0)
        choice = _Choice(cost, end - start + here.tokens, (run,))
        if children and index + 1 < len(children[0]):
            spread = _together([choices[index + 1] for choices in children])
            if spread.cost < choice.cost:  # the first branch has the tokens of rows that end here
                runs = (replace(spread.runs[0], first=first), *spread.runs[1:])
                choice = replace(spread, runs=runs)
        result.append(choice)
    return result


def _together(choices: Sequence[_Choice]) -> _Choice:
    cost, tokens = sum(choice.cost for choice in choices), sum(choice.tokens for choice in choices)
    return _Choice(cost, tokens, tuple(run for choice in choices for run in choice.runs))
