"""Token trees: what rows of a group begin with alike, each run once where that saves."""

from itertools import pairwise

import numpy as np
import pytest

from rlcore.data import token_tree
from rlcore.data.batch import select
from rlcore.data.token_tree import num_tokens, sorted_rows, tree_micro_batches, tree_tokens, walk
from rlcore.testing.tiny import batch_of_rows, random_conversations

Rows = list[list[int]]
"""The token ids of each row of a group."""


@pytest.fixture
def shares_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tree, "JOINED_PER_TOKEN", np.inf)
    monkeypatch.setattr(token_tree, "LEVEL_TOKENS", 0)


def distinct_prefixes(groups: list[Rows]) -> int:
    return len({(group, *row[:end]) for group, rows in enumerate(groups) for row in rows for end in range(1, len(row))})


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.usefixtures("shares_everything")
def test_each_distinct_beginning_is_one_token_of_the_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_conversations(rng) for _ in range(4)]
    batch = batch_of_rows(groups)
    assert num_tokens(sorted_rows(batch).tree()) == distinct_prefixes(groups)
    assert int(tree_tokens(batch).sum()) == distinct_prefixes(groups)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ratio", [0.0, 1.0, 8.0, np.inf])
def test_under_any_rule_the_runs_of_a_row_are_the_row(seed: int, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tree, "JOINED_PER_TOKEN", ratio or 1e-9)
    batch = batch_of_rows([random_conversations(np.random.default_rng(seed)) for _ in range(3)])
    rows = sorted_rows(batch)
    runs, token_ids_BT = list(walk(rows.tree())), batch.tokens.token_ids_BT
    total = sum(run.end - start for run, start in runs)
    assert total == num_tokens(rows.tree())
    assert total <= int(rows.needed_B.sum())
    for index, needed in enumerate(rows.needed_B.tolist()):
        own = sorted((start, run.end, run) for run, start in runs if run.first <= index < run.last and start < needed)
        assert [start for start, *_ in own] == [0, *(end for _, end, _ in own)][:-1]
        assert needed <= (own[-1][1] if own else 0)
        for start, end, run in own:
            theirs = token_ids_BT[rows.row_B[run.last - 1], start : min(end, needed)]
            assert theirs.tolist() == token_ids_BT[rows.row_B[index], start : min(end, needed)].tolist()
    assert all(not run.children or len(run.children) > 1 for run, _ in runs)


def branches(shared: int, alone: int, rows: int = 2) -> Rows:
    """Rows that begin with `shared` common tokens and continue with `alone` others; a prediction needs all of them."""
    return [[7] * shared + [row + 10] * alone + [0] for row in range(rows)]


@pytest.mark.parametrize(
    ("shared", "alone", "rows", "computed"),
    [
        (2, 64, 2, 2 + 2 * 64),
        (2, 65, 2, 2 * (2 + 65)),  # 2 tokens saved, 130 whose attention would be joined
        (2, 65, 3, 2 + 3 * 65),
        (1, 32, 2, 1 + 2 * 32),
    ],
)
def test_a_prompt_is_shared_where_it_saves_a_token_per_64_below_it(
    shared: int, alone: int, rows: int, computed: int
) -> None:
    batch = batch_of_rows([branches(shared, alone, rows)])
    assert num_tokens(sorted_rows(batch).tree()) == computed


@pytest.mark.parametrize(("turn", "rows", "shares"), [(17, 2, True), (16, 2, False), (9, 3, True), (8, 3, False)])
def test_a_run_below_another_is_shared_where_it_saves_more_than_16_tokens_and_one_per_64_below_it(
    turn: int, rows: int, shares: bool
) -> None:
    prompt, other = [9] * 20, [9] * 20 + [5] * 30
    group = [*([*prompt, *row] for row in branches(turn, 4, rows)), [*other, 0]]
    computed = num_tokens(sorted_rows(batch_of_rows([group])).tree())
    assert computed == 20 + 30 + rows * 4 + (turn if shares else rows * turn)


def test_a_short_run_of_many_rows_is_shared_although_each_place_where_they_part_would_save_little() -> None:
    turn, other = [9] * 20 + [5] * 8, [9] * 20 + [6] * 30
    rows = [[*turn, *(1 + (index >> bit) % 2 for bit in range(4)), 3, 3, 3, 0] for index in range(16)]
    batch = batch_of_rows([[*rows, [*other, 0]]])
    assert int(tree_tokens(batch).sum()) == 20 + 30 + 8 + 16 * (4 + 3)


def test_groups_share_nothing_and_rows_that_predict_nothing_have_no_token() -> None:
    same = [1, 2, 3, 4]
    assert num_tokens(sorted_rows(batch_of_rows([[same], [same]])).tree()) == 6
    assert num_tokens(sorted_rows(batch_of_rows([[same, same]])).tree()) == 3
    assert sorted_rows(batch_of_rows([[[1], [2]]])).tree() == ()
    assert tree_tokens(batch_of_rows([[[1], [1, 2, 3]]])).tolist() == [0, 2]


@pytest.mark.slow
def test_segments_that_each_continue_the_previous_one_need_no_recursion() -> None:
    prompt, rows = [1], []
    for segment in range(1500):
        rows.append([*prompt, 2, 2, 0])
        prompt = [*prompt, 3 + segment % 2]
    batch = batch_of_rows([rows])
    total = int(tree_tokens(batch).sum())
    assert 1500 * 3 < total < int(sorted_rows(batch).needed_B.sum()) / 50


@pytest.mark.parametrize("budget", [1, 30, 64, 10_000])
def test_micro_batches_hold_every_row_once_and_keep_to_the_budget_by_the_tokens_of_their_tree(budget: int) -> None:
    rng = np.random.default_rng(1)
    batch = batch_of_rows([random_conversations(rng, rows=8) for _ in range(6)])
    parts = tree_micro_batches(batch, budget)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(batch)))
    costs = [num_tokens(sorted_rows(select(batch, part)).tree()) for part in parts]
    assert all(cost <= budget or len(part) == 1 for cost, part in zip(costs, parts, strict=True))
    if budget == 10_000:
        assert len(parts) == 1
    if budget == 64:  # of no two neighbours both would have fitted into one
        groups = [set(batch.group_B[part].tolist()) for part in parts]
        assert all(
            cost + next_cost > budget or here & there
            for (cost, next_cost), (here, there) in zip(pairwise(costs), pairwise(groups), strict=True)
        )


def test_a_group_is_divided_where_its_rows_have_least_in_common() -> None:
    turns = [[9] * 10 + [turn] * 20 for turn in (1, 2)]
    group = [[*turn, *[answer] * 5, 0] for answer in (3, 4, 5) for turn in turns]
    parts = tree_micro_batches(batch_of_rows([group]), 45)
    assert [part.tolist() for part in parts] == [[0, 2, 4], [1, 3, 5]]
