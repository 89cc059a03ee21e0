"""Rows that ranks compute step by step: every row once, within the budget, and alike in each step."""

from pathlib import Path

import numpy as np
import pytest

from rlcore.data.batch import select
from rlcore.data.dealt import dealt, split
from rlcore.data.row_costs import LayerCost, row_costs
from rlcore.engines.hf.train.ranks import computed_tokens, shares
from rlcore.testing.tiny import random_batch
from rlcore.types import Batch, Int64s, SharedPrefix, TokenArrays

SEVEN_B = LayerCost(2 * 3584 / (3584 * (2 * 3584 + 2 * 512 + 3 * 18944)))
"""Of Qwen2.5-7B, by its configuration."""
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def of_lengths(*lengths: int) -> Batch:
    """Rows that nothing is known of but their lengths; each is a group."""
    num, lengths_B = len(lengths), np.array(lengths, dtype=np.int64)
    no_flags, nothing = np.zeros((num, 0), np.bool_), np.zeros((num, 0), np.float32)
    return Batch(
        tokens=TokenArrays(np.zeros((num, 0), np.int32), no_flags, no_flags, nothing),
        sample_B=np.arange(num),
        group_B=np.arange(num),
        lengths_B=lengths_B,
        num_sampled_B=lengths_B,
        prompt_lengths_B=np.zeros(num, np.int64),
        rewards_B=np.zeros(num, np.float32),
    )


def by_ranks(batch: Batch, most: int, num: int) -> list[list[Int64s]]:
    """The micro-batches of ranks that each pack their share by tokens, as those that wait for nothing."""
    ranks_B = shares(batch, SharedPrefix.NONE, SEVEN_B, num)
    found = []
    for rank in range(num):
        rows = np.flatnonzero(ranks_B == rank)
        found.append([rows[part] for part in split(select(batch, rows), most, SharedPrefix.NONE)])
    return found


def costs_of(batch: Batch, ranks: list[list[Int64s]]) -> list[list[float]]:
    """The cost of each rank's part of each step."""
    costs_B = row_costs(batch, SharedPrefix.NONE, SEVEN_B)
    most = max(map(len, ranks))
    parts = [[*rank, *[np.zeros(0, np.int64)] * (most - len(rank))] for rank in ranks]
    return [[float(costs_B[rows].sum()) for rows in step] for step in zip(*parts, strict=True)]


def test_a_long_row_and_many_short_ones_take_less_time_and_the_page_shows_it() -> None:
    batch, most = of_lengths(32768, *[500] * 512), 33000
    tables = {"packed by rank": by_ranks(batch, most, 4), "dealt step by step": []}
    tables["dealt step by step"] = dealt(batch, most, SharedPrefix.NONE, SEVEN_B, 4)
    lines, times, means = [], {}, {}
    for name, ranks in tables.items():
        steps = costs_of(batch, ranks)
        ratios = ", ".join(f"{max(step) / np.mean(step):.2f}" for step in steps)
        times[name], means[name] = sum(map(max, steps)), sum(map(np.mean, steps))
        lines.append(f"| {name} | {ratios} | {times[name] / means[name]:.2f} |")
    page = PAGE.read_text("utf-8")
    assert [line for line in lines if line not in page] == []
    assert means["packed by rank"] == pytest.approx(means["dealt step by step"]), "the same work"
    assert times["dealt step by step"] < 0.96 * times["packed by rank"]
    assert max(max(step) / np.mean(step) for step in costs_of(batch, tables["dealt step by step"])[1:]) < 1.02


def test_the_budget_holds_and_every_row_is_dealt_once() -> None:
    rng = np.random.default_rng(0)
    for num in (1, 3, 8):
        batch = of_lengths(*rng.integers(1, 900, 200).tolist(), 2500)
        ranks = dealt(batch, 1000, SharedPrefix.NONE, SEVEN_B, num)
        assert len({len(rank) for rank in ranks}) == 1, "each rank makes as many passes as the others"
        parts = [rows for rank in ranks for rows in rank if len(rows)]
        assert sorted(np.concatenate(parts).tolist()) == list(range(201))
        for rows in parts:
            assert len(rows) * batch.lengths_B[rows].max() <= 1000 or len(rows) == 1
        fewest = -(-len(split(batch, 1000, SharedPrefix.NONE)) // num)
        assert len(ranks[0]) <= 1.15 * fewest + 1, "hardly more passes than the tokens need"


@pytest.mark.parametrize("way", [SharedPrefix.TREE, SharedPrefix.CACHE])
@pytest.mark.parametrize("most", [30, 60, 1000])
def test_shared_prompts_count_once_in_each_part_of_a_group(way: SharedPrefix, most: int) -> None:
    batch = random_batch(num_groups=5, samples=4, seed=3)
    ranks = dealt(batch, most, way, LayerCost(0.01), 3)
    assert len({len(rank) for rank in ranks}) == 1
    parts = [rows for rank in ranks for rows in rank if len(rows)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(20))
    for rows in parts:
        assert computed_tokens(select(batch, rows), way).sum() <= most or len(rows) == 1
    if most == 1000:
        for group in range(5):
            assert sum(group in batch.group_B[rows] for rows in parts) == 1, "groups that fit stay whole"


def test_ranks_without_rows_have_empty_parts_and_equal_rows_are_dealt_out_evenly() -> None:
    assert [[rows.tolist() for rows in rank] for rank in dealt(of_lengths(7), 10, SharedPrefix.NONE, SEVEN_B, 3)] == [
        [[0]],
        [[]],
        [[]],
    ]
    assert dealt(select(of_lengths(7), []), 10, SharedPrefix.NONE, SEVEN_B, 2) == [[], []]
    even = dealt(of_lengths(*[10] * 16), 40, SharedPrefix.NONE, SEVEN_B, 4)
    assert [[len(rows) for rows in rank] for rank in even] == [[4]] * 4
    one_more = dealt(of_lengths(*[10] * 17), 40, SharedPrefix.NONE, SEVEN_B, 4)
    assert sorted(len(rows) for rank in one_more for rows in rank) == [2, 2, 2, 2, 2, 2, 2, 3]


def test_the_most_costly_parts_are_not_always_the_same_ranks() -> None:
    batch = of_lengths(900, 800, 700, 600, 500, 400)
    ranks = dealt(batch, 1000, SharedPrefix.NONE, LayerCost(), 2)
    totals = [sum(int(batch.lengths_B[rows].sum()) for rows in rank) for rank in ranks]
    assert max(totals) <= 1.1 * min(totals)
