"""Batches: what lands where, whatever arrived first; and mini- and micro-batches with every row exactly once."""

import pickle
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algo.advantage import AdvantageInputs, dr_grpo
from rlcore.algo.aggregation import row_weights, weighted_sum
from rlcore.algo.token_rewards import token_rewards
from rlcore.data.batch import collate, micro_batches, minibatches, select
from rlcore.errors import PluginError, RewardError
from rlcore.types import (
    Batch,
    FinishReason,
    FrozenDict,
    Prompt,
    Reward,
    RewardStatus,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

PAD = 99


def row(
    prompt: str,
    sample: int,
    response: Sequence[int],
    score: float = 0.0,
    *,
    part: int = 0,
    prompt_ids: Sequence[int] = (7, 8, 9),
    **reward: Any,
) -> ScoredTrajectory:
    """A trajectory of three prompt tokens and a response that the policy sampled."""
    token_ids = np.array([*prompt_ids, *response], dtype=np.int32)
    loss_mask = np.arange(len(token_ids)) >= len(prompt_ids)
    trajectory = Trajectory(
        id=TrajectoryId(prompt, 0, sample, part),
        prompt=Prompt(prompt, (FrozenDict({"role": "user", "content": "?"}),), None, "source"),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -token_ids / 10.0, 0.0).astype(np.float32),
        completion="x",
        finish=FinishReason.LENGTH if len(response) > 4 else FinishReason.STOP,
        versions=((len(prompt_ids), 0),),
    )
    return ScoredTrajectory(trajectory, Reward(score, **reward))


def random_groups(seed: int, num_groups: int = 4, most_samples: int = 5) -> list[list[ScoredTrajectory]]:
    """Groups of samples in one to three parts; token ids tell whose they are, some rows have nothing sampled."""
    draw = random.Random(seed)
    groups: list[list[ScoredTrajectory]] = []
    for g in range(num_groups):
        group: list[ScoredTrajectory] = []
        for sample in range(draw.randint(1, most_samples)):
            score = draw.choice([0.0, 1.0, draw.gauss(0, 1)])
            for part in range(draw.choice([1, 1, 1, 2, 3])):
                response = [100 * g + 10 * sample + part] * draw.randint(0, 6)
                group.append(row(f"p{g}", sample, response, score, part=part))
        groups.append(group)
    return groups


def test_a_batch_of_two_groups_by_hand() -> None:
    batch = collate(
        [
            [row("a", 1, [4], 0.5), row("a", 0, [1, 2], 1.0)],
            [row("b", 0, [5], 2.0, part=1, prompt_ids=[6]), row("b", 0, [3, 3, 3, 3, 3], 2.0)],
        ],
        PAD,
    )
    tokens = batch.tokens
    assert tokens.token_ids_BT.tolist() == [
        [7, 8, 9, 1, 2, PAD, PAD, PAD],
        [7, 8, 9, 4, PAD, PAD, PAD, PAD],
        [7, 8, 9, 3, 3, 3, 3, 3],
        [6, 5, PAD, PAD, PAD, PAD, PAD, PAD],
    ]
    assert tokens.valid_BT.sum(1).tolist() == batch.lengths_B.tolist() == [5, 4, 8, 2]
    assert tokens.loss_mask_BT.sum(1).tolist() == batch.num_sampled_B.tolist() == [2, 1, 5, 1]
    assert tokens.loss_mask_BT[3].tolist() == [False, True] + [False] * 6
    np.testing.assert_allclose(tokens.rollout_logprobs_BT[0], [0, 0, 0, -0.1, -0.2, 0, 0, 0], rtol=1e-6)
    assert batch.prompt_lengths_B.tolist() == [3, 3, 3, 1]
    assert batch.sample_B.tolist() == [0, 1, 2, 2]
    assert batch.group_B.tolist() == [0, 0, 1, 1]
    assert batch.rewards_B.tolist() == [1.0, 0.5, 2.0, 2.0]
    assert batch.truncated_B is not None
    assert batch.truncated_B.tolist() == [False, False, True, False]
    assert batch.token_scores_BT is None
    with pytest.raises(ValueError, match="read-only"):
        tokens.token_ids_BT[0, 0] = 1


@pytest.mark.slow
def test_reward_i_lands_on_the_last_sampled_token_of_sample_i_in_1000_orders_of_arrival() -> None:
    """Scorecard case 15, through collate and token_rewards: lengths travel with rewards."""
    draw = random.Random(15)
    lengths = {(g, s): 1 + (5 * g + 3 * s) % 7 for g in range(3) for s in range(4)}
    reward_of = {(g, s): 1.0 + 10 * g + s for g, s in lengths}
    arrivals = [row(f"p{g}", s, [10 * g + s] * length, reward_of[g, s]) for (g, s), length in lengths.items()]
    in_order = None
    for _ in range(1000):
        draw.shuffle(arrivals)
        groups = [[arrival for arrival in arrivals if arrival.trajectory.id.prompt == f"p{g}"] for g in range(3)]
        batch = collate(groups, PAD)
        tokens = batch.tokens
        rewards_BT = token_rewards(
            torch.tensor(batch.rewards_B), torch.tensor(batch.sample_B), torch.tensor(tokens.loss_mask_BT)
        ).numpy()
        for b, (g, s) in enumerate(lengths):
            expected = np.zeros(rewards_BT.shape[1])
            expected[3 + lengths[g, s] - 1] = reward_of[g, s]
            assert rewards_BT[b].tolist() == expected.tolist()
            assert tokens.token_ids_BT[b, 3] == 10 * g + s
            assert batch.rewards_B[b] == reward_of[g, s]
        in_order = in_order or tokens.token_ids_BT.tobytes()
        assert tokens.token_ids_BT.tobytes() == in_order


def test_zero_length_and_eos_only_responses() -> None:
    """Scorecard case 16: nothing is written at index -1, EOS alone is trained, an empty row weighs nothing."""
    groups = [[row("a", 0, [], 5.0), row("a", 1, [0], 1.0), row("a", 2, [1, 2, 0], 0.0)]]
    batch = collate(groups, PAD)
    tokens = batch.tokens
    assert batch.num_sampled_B.tolist() == [0, 1, 3]
    assert batch.prompt_lengths_B.tolist() == [3, 3, 3]
    mask_BT = torch.tensor(tokens.loss_mask_BT)
    rewards_BT = token_rewards(torch.tensor(batch.rewards_B), torch.tensor(batch.sample_B), mask_BT)
    assert rewards_BT.tolist() == [[0.0] * 6, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.0] * 6]
    weights_B = row_weights("seq_mean_token_mean", batch.num_sampled_B, batch.sample_B)
    np.testing.assert_allclose(weights_B, [0.0, 1 / 2, 1 / 6], rtol=1e-6)
    assert weighted_sum(torch.ones(3, 6), mask_BT, torch.tensor(weights_B)).item() == pytest.approx(1.0)
    assert collate([[row("a", 0, [], 1.0, prompt_ids=[])]], PAD).tokens.token_ids_BT.shape == (1, 0)


def test_a_batch_of_nothing_is_empty_and_has_no_mini_batches() -> None:
    nothing: list[list[list[ScoredTrajectory]]] = [[], [[], []]]
    for groups in nothing:
        batch = collate(groups, PAD)
        assert len(batch) == 0
        assert batch.tokens.token_ids_BT.shape == (0, 0)
        assert minibatches(batch, 2, np.random.default_rng(0)) == []
        assert micro_batches(batch.lengths_B, 10) == []


def test_an_empty_group_does_not_take_a_number() -> None:
    batch = collate([[row("a", 0, [1])], [], [row("c", 2, [1]), row("c", 5, [1])]], PAD)
    assert batch.group_B.tolist() == [0, 1, 1]
    assert batch.sample_B.tolist() == [0, 1, 2]


def test_token_scores_stand_at_their_tokens() -> None:
    scores = np.array([0, 0, 0, 0.5, 0.25], dtype=np.float32)
    batch = collate([[row("a", 0, [1, 2], token_scores=scores), row("a", 1, [1, 2, 3])]], PAD)
    assert batch.token_scores_BT is not None
    assert batch.token_scores_BT.tolist() == [[0, 0, 0, 0.5, 0.25, 0], [0] * 6]


def with_arrays(scored: ScoredTrajectory, **arrays: Any) -> ScoredTrajectory:
    return ScoredTrajectory(replace(scored.trajectory, **arrays), scored.reward)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([[row("a", 0, [1], status=RewardStatus.FAILED)]], RewardError, "is 'failed'; drop the sample"),
        ([[row("a", 0, [1], status=RewardStatus.SKIPPED)]], RewardError, "is 'skipped'; drop the sample"),
        ([[row("a", 0, [1], float("nan"))]], RewardError, "is nan; needs a finite score"),
        ([[row("a", 0, [1], float("-inf"))]], RewardError, "is -inf; needs a finite score"),
        ([[row("a", 0, [1]), row("a", 0, [1])]], PluginError, "comes twice"),
        ([[row("a", 0, [1]), row("b", 1, [1])]], PluginError, "is in the group of prompt 'a'"),
        ([[row("a", 0, [1])], [row("a", 1, [1])]], PluginError, "two groups of 2 are of one prompt"),
        ([[row("a", 0, [1], 1.0), row("a", 0, [1], 0.0, part=1)]], PluginError, "share one reward"),
        ([[row("a", 0, [1], prompt_ids=[])]], PluginError, "loss at position 0"),
        ([[with_arrays(row("a", 0, [1]), logprobs=np.zeros(3, dtype=np.float32))]], PluginError, "have shapes"),
        ([[row("a", 0, [1], token_scores=np.zeros(1, dtype=np.float32))]], RewardError, "one per token"),
        ([[row("a", 0, [1], token_scores=np.array([0, 0, 0, np.nan]))]], RewardError, "not all finite"),
        ([[row("a", 0, [1], token_scores=np.array([0, 0, 1.0, 0]))]], RewardError, "did not sample"),
    ],
)
def test_what_would_train_on_a_wrong_number_is_refused(
    groups: list[list[ScoredTrajectory]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        collate(groups, PAD)
    assert "\n" not in str(raised.value)


def filled(batch: Batch) -> Batch:
    """The batch with every optional field set to numbers that tell row and position."""
    shape = batch.tokens.token_ids_BT.shape
    numbers_BT = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
    return replace(
        batch,
        weights_B=np.arange(len(batch), dtype=np.float32),
        advantages_B=np.arange(len(batch), dtype=np.float32) * 2,
        values_BT=numbers_BT,
        old_logprobs_BT=numbers_BT + np.float32(0.5),
        reference_logprobs_BT=-numbers_BT,
    )


def test_arrays_of_a_batch_cannot_be_written_also_where_it_arrives() -> None:
    batch = filled(collate([[row("a", 0, [1, 2])]], PAD))
    for copy in (batch, select(batch, [0]), pickle.loads(pickle.dumps(batch))):
        arrays = [*vars(copy).values(), *vars(copy.tokens).values()]
        assert not any(array.flags.writeable for array in arrays if isinstance(array, np.ndarray))
        assert copy.values_BT is not None
        assert copy.values_BT.dtype == np.float32


def test_select_takes_every_field_of_the_rows_and_trims_the_padding() -> None:
    batch = filled(collate([[row("a", s, [s] * s) for s in range(5)], [row("b", 0, [9])]], PAD))
    part = select(batch, [5, 2, 1])
    assert part.lengths_B.tolist() == [4, 5, 4]
    assert part.tokens.token_ids_BT.tolist() == [[7, 8, 9, 9, PAD], [7, 8, 9, 2, 2], [7, 8, 9, 1, PAD]]
    assert part.group_B.tolist() == [1, 0, 0]
    assert part.sample_B.tolist() == [2, 1, 0]
    assert part.weights_B is not None
    assert part.weights_B.tolist() == [5.0, 2.0, 1.0]
    assert part.advantages_B is not None
    assert part.advantages_B.tolist() == [10.0, 4.0, 2.0]
    assert part.values_BT is not None
    assert part.values_BT.tolist() == [[35, 36, 37, 38, 39], [14, 15, 16, 17, 18], [7, 8, 9, 10, 11]]
    assert part.old_logprobs_BT is not None
    assert part.old_logprobs_BT.shape == (3, 5)
    assert part.returns_BT is None


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), num_groups=st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_mini_batches_hold_whole_groups_and_every_row_once(seed: int, num_groups: int) -> None:
    batch = collate(random_groups(seed), PAD)
    numbered = replace(filled(batch), advantages_B=np.arange(len(batch), dtype=np.float32))
    parts = minibatches(numbered, num_groups, np.random.default_rng(seed))
    seen: list[int] = []
    for part in parts:
        assert part.weights_B is None
        assert part.advantages_B is not None
        rows = part.advantages_B.astype(int)
        assert rows.tolist() == sorted(rows.tolist())
        groups = set(batch.group_B[rows].tolist())
        assert np.isin(batch.group_B, list(groups)).sum() == len(rows)
        assert len(groups) == (num_groups or 4) or (part is parts[-1] and len(groups) < num_groups)
        assert part.group_B.tolist() == np.unique(batch.group_B[rows], return_inverse=True)[1].tolist()
        assert part.rewards_B.tolist() == batch.rewards_B[rows].tolist()
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(batch)))


def test_mini_batches_follow_their_random_stream() -> None:
    batch = collate([[row(f"p{g}", 0, [g])] for g in range(20)], PAD)

    def order(seed: int) -> list[float]:
        parts = minibatches(batch, 3, np.random.default_rng(seed))
        return [part.tokens.token_ids_BT[:, 3].tolist() for part in parts]

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 40), max_size=40), max_tokens=st.integers(1, 100))
@settings(deadline=None, max_examples=300)
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    parts = micro_batches(np.array(lengths, dtype=np.int64), max_tokens)
    assert sorted(b for part in parts for b in part.tolist()) == list(range(len(lengths)))
    in_order = [lengths[b] for part in parts for b in part.tolist()]
    assert in_order == sorted(lengths, reverse=True)
    for index, part in enumerate(parts):
        longest = max(lengths[b] for b in part.tolist())
        assert len(part) == 1 or len(part) * longest <= max_tokens
        if index + 1 < len(parts):  # no room was left for the next row
            assert (len(part) + 1) * longest > max_tokens


def test_micro_batches_of_hand_computed_lengths() -> None:
    parts = micro_batches(np.array([5, 30, 9, 10, 1]), 20)
    assert [part.tolist() for part in parts] == [[1], [3, 2], [0, 4]]


@pytest.mark.slow
@given(seed=st.integers(0, 10_000), max_tokens=st.integers(1, 60), num_groups=st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_any_micro_batches_of_any_mini_batch_give_its_loss(seed: int, max_tokens: int, num_groups: int) -> None:
    batch = collate(random_groups(seed), PAD)
    for part in minibatches(batch, num_groups, np.random.default_rng(seed)):
        weighed = replace(part, weights_B=row_weights("seq_mean_token_mean", part.num_sampled_B, part.sample_B))
        rows_of = micro_batches(weighed.lengths_B, max_tokens)
        pieces = [select(weighed, rows) for rows in rows_of]
        assert sum(map(loss_of, pieces)) == pytest.approx(loss_of(weighed), rel=1e-9, abs=1e-12)


def loss_of(batch: Batch) -> float:
    """A loss that depends on token and position, aggregated with the batch's weights."""
    tokens = batch.tokens
    losses_BT = torch.tensor(tokens.token_ids_BT, dtype=torch.float64).sin() + torch.arange(
        tokens.token_ids_BT.shape[1], dtype=torch.float64
    )
    weights_B = torch.tensor(batch.weights_B, dtype=torch.float64)
    return weighted_sum(losses_BT, torch.tensor(tokens.loss_mask_BT), weights_B).item()


@pytest.mark.parametrize("failed", range(8))
def test_dropping_a_failed_sample_leaves_its_siblings_as_in_a_batch_without_it(failed: int) -> None:
    """Scorecard case 11, the numbers."""
    draw = random.Random(failed)
    groups = [[row(f"p{g}", s, [s] * (1 + s), draw.gauss(0, 1)) for s in range(8)] for g in range(8)]
    dropped = [
        [sample for sample in group if (g, sample.trajectory.id.sample) != (3, failed)]
        for g, group in enumerate(groups)
    ]

    def advantages(of: list[list[ScoredTrajectory]]) -> dict[TrajectoryId, float]:
        batch = collate(of, PAD)
        inputs = AdvantageInputs(
            torch.tensor(batch.rewards_B),
            torch.tensor(batch.group_B),
            torch.tensor(batch.sample_B),
            torch.tensor(batch.num_sampled_B),
        )
        ids = [sample.trajectory.id for group in of for sample in group]
        return dict(zip(ids, dr_grpo(inputs).tolist(), strict=True))

    left, full = advantages(dropped), advantages(groups)
    siblings = advantages([dropped[3]])
    for row_id, advantage in left.items():
        assert advantage == (siblings if row_id.prompt == "p3" else full)[row_id]
    assert len(left) == 63
