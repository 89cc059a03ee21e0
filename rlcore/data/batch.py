"""Batches: from groups of scored trajectories to padded arrays, and from those to mini-batches and micro-batches.

Rows keep one order throughout: groups as given, samples of a group by index, segments of a sample by index. The order
of arrival does not matter.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.errors import PluginError, RewardError
from rlcore.errors.checks.arrays import LARGEST
from rlcore.types import (
    Batch,
    Bools,
    FinishReason,
    Float32s,
    Int64s,
    RewardStatus,
    ScoredTrajectory,
    TokenArrays,
    Trajectory,
)


def collate(groups: Sequence[Sequence[ScoredTrajectory]], pad_id: int) -> Batch:
    """A batch with one row per trajectory, sorted by sample and segment within each group, padded on the right.

    Each inner sequence is the group of one prompt, in any order; empty groups are left out. The caller drops failed
    samples or gives them a value first. RewardError for a sample without a finite score. PluginError for a trajectory
    whose arrays disagree, that comes twice or that is in another prompt's group. PluginError for segments of one sample
    with different rewards, too.
    """
    sorted_groups = [sorted(group, key=_place) for group in groups if group]
    rows = [sample for group in sorted_groups for sample in group]
    prompts = [(group[0].trajectory.id.prompt, group[0].trajectory.id.epoch) for group in sorted_groups]
    if len(set(prompts)) < len(prompts):
        raise PluginError(f"batch: two groups of {len(prompts)} are of one prompt and epoch; a prompt is one group")
    for group in sorted_groups:
        _check_group(group)
        _check_rewards(group)
    trajectories = [row.trajectory for row in rows]
    tokens = _token_arrays(trajectories, pad_id)
    if (first_B := tokens.loss_mask_BT[:, :1].any(axis=1)).any():
        bad = trajectories[int(first_B.argmax())].id
        raise PluginError(f"batch: trajectory {bad} has a loss at position 0, whose token has no probability")
    group_B = _int64s([index for index, group in enumerate(sorted_groups) for _ in group])
    lengths_B = _int64s([len(trajectory.token_ids) for trajectory in trajectories])
    return Batch(
        tokens=tokens,
        sample_B=_unit_numbers(group_B, _int64s([trajectory.id.sample for trajectory in trajectories])),
        group_B=group_B,
        lengths_B=lengths_B,
        num_sampled_B=np.count_nonzero(tokens.loss_mask_BT, axis=1).astype(np.int64),
        prompt_lengths_B=_prompt_lengths(tokens.loss_mask_BT, lengths_B),
        rewards_B=np.array([row.reward.score for row in rows], dtype=np.float32),
        truncated_B=np.array([trajectory.finish is FinishReason.LENGTH for trajectory in trajectories], dtype=np.bool_),
        token_scores_BT=_token_scores(rows),
        baselines_B=_baselines(rows),
    )


def rescored(batch: Batch, groups: Sequence[Sequence[ScoredTrajectory]]) -> Batch:
    """`batch` with other rewards of the same trajectories, as from `collate`, with the same errors.

    Groups and rows are in the order of the batch.
    """
    for group in groups:
        _check_rewards(group)
    rows = [sample for group in groups for sample in group]
    rewards_B = np.array([row.reward.score for row in rows], dtype=np.float32)
    return replace(batch, rewards_B=rewards_B, token_scores_BT=_token_scores(rows), baselines_B=_baselines(rows))


def select(batch: Batch, rows: Sequence[int] | npt.NDArray[np.integer]) -> Batch:
    """The chosen rows as a new batch, in the order given, trimmed to the longest of them.

    Samples and groups are renumbered from 0, in the order of their old numbers. Weights stay: they hold the
    denominators of the mini-batch that they were computed for.
    """
    index = np.asarray(rows, dtype=np.int64)
    length = int(batch.lengths_B[index].max(initial=0))
    chosen: dict[str, Any] = {}
    for spec in fields(batch):
        value = getattr(batch, spec.name)
        if isinstance(value, TokenArrays):
            value = TokenArrays(**{inner.name: getattr(value, inner.name)[index, :length] for inner in fields(value)})
        elif isinstance(value, np.ndarray):
            value = value[index, :length] if value.ndim == 2 else value[index]
        chosen[spec.name] = value
    for name in ("sample_B", "group_B"):
        chosen[name] = np.unique(chosen[name], return_inverse=True)[1].astype(np.int64)
    return Batch(**chosen)


def minibatches(batch: Batch, num_groups: int, rng: np.random.Generator) -> list[Batch]:
    """The batch as mini-batches of `num_groups` whole groups each, drawn without replacement; 0: one of all groups.

    The last one is smaller if `num_groups` does not divide the number of groups. Weights are not set, because each
    mini-batch has its own (`rlcore.algo.aggregation.row_weights`). An empty batch has no mini-batches.
    """
    groups = np.unique(batch.group_B)
    size = num_groups or max(1, len(groups))
    if size >= len(groups) > 0:
        return [replace(batch, weights_B=None)]
    groups = rng.permutation(groups)
    parts = [groups[start : start + size] for start in range(0, len(groups), size)]
    return [replace(select(batch, np.flatnonzero(np.isin(batch.group_B, part))), weights_B=None) for part in parts]


def micro_batches(lengths_B: npt.NDArray[np.integer], max_tokens: int) -> list[Int64s]:
    """Row indices of micro-batches, longest rows first, every row exactly once.

    The cost of a micro-batch is its number of rows times its longest row, padding included, and at most `max_tokens`. A
    longer row is a micro-batch by itself. Greedy over sorted lengths: no other grouping of the sorted rows makes fewer
    micro-batches.
    """
    order = np.argsort(-np.asarray(lengths_B, dtype=np.int64), kind="stable")
    result: list[Int64s] = []
    start = 0
    while start < len(order):
        longest = int(lengths_B[order[start]])
        num_rows = len(order) if longest == 0 else max(1, max_tokens // longest)
        result.append(order[start : start + num_rows].astype(np.int64))
        start += num_rows
    return result


def shared_prefixes(batch: Batch) -> Int64s:
    """(B,) number of first tokens that all rows of the row's group have in common and that no row sampled."""
    token_ids_BT = batch.tokens.token_ids_BT
    prefix_B = np.zeros(len(batch), dtype=np.int64)
    for group in np.unique(batch.group_B):
        rows = np.flatnonzero(batch.group_B == group)
        unsampled = int(batch.prompt_lengths_B[rows].min())
        starts = token_ids_BT[rows, :unsampled]
        differs = (starts != starts[0]).any(axis=0)
        prefix_B[rows] = int(differs.argmax()) if differs.any() else unsampled
    return prefix_B


def needed_tokens(batch: Batch) -> Int64s:
    """(B,) tokens of each row that a prediction needs: those before the row's last loss token."""
    loss_mask_BT = batch.tokens.loss_mask_BT
    if not loss_mask_BT.size:
        return np.zeros(len(batch), dtype=np.int64)
    last_B = loss_mask_BT.shape[1] - 1 - loss_mask_BT[:, ::-1].argmax(axis=1)
    return np.where(loss_mask_BT.any(axis=1), last_B, 0).astype(np.int64)


def suffix_lengths(batch: Batch, prefix_B: Int64s) -> Int64s:
    """(B,) tokens of each row after its prefix that a prediction needs."""
    lengths_B: Int64s = np.maximum(needed_tokens(batch) - prefix_B, 0)
    return lengths_B


def shared_micro_batches(batch: Batch, max_tokens: int) -> list[Int64s]:
    """Row indices of micro-batches in which a group's prefix counts once, most costly groups first, every row once.

    Prefixes and suffixes are padded to the longest of their kind. A group that costs more than `max_tokens` is divided,
    and its prefix is computed once in each part. A row that alone costs more is a micro-batch by itself.
    """
    prefix_B = shared_prefixes(batch)
    suffix_B = suffix_lengths(batch, prefix_B)
    pieces = group_pieces(batch, prefix_B, suffix_B, max_tokens)
    pieces.sort(key=lambda piece: -int(prefix_B[piece[0]] + suffix_B[piece].max()))
    result: list[list[Int64s]] = []
    for piece in pieces:
        if result and _cost([*result[-1], piece], prefix_B, suffix_B) <= max_tokens:
            result[-1].append(piece)
        else:
            result.append([piece])
    return [np.sort(np.concatenate(part)) for part in result]


def group_pieces(batch: Batch, prefix_B: Int64s, suffix_B: Int64s, max_tokens: int) -> list[Int64s]:
    """The rows of each group, divided into parts of at most `max_tokens`, padding of prefix and suffixes included."""
    return [
        piece
        for group in np.unique(batch.group_B)
        for piece in _pieces(np.flatnonzero(batch.group_B == group), prefix_B, suffix_B, max_tokens)
    ]


def _pieces(rows: Int64s, prefix_B: Int64s, suffix_B: Int64s, max_tokens: int) -> list[Int64s]:
    """The rows of one group, longest first, in runs of at most `max_tokens` each."""
    ordered = rows[np.argsort(-suffix_B[rows], kind="stable")]
    pieces, start = [], 0
    for end in range(1, len(ordered) + 1):
        if end - start > 1 and _cost([ordered[start:end]], prefix_B, suffix_B) > max_tokens:
            pieces.append(ordered[start : end - 1])
            start = end - 1
    return [*pieces, ordered[start:]]


def _cost(pieces: Sequence[Int64s], prefix_B: Int64s, suffix_B: Int64s) -> int:
    """Tokens of one forward pass over the pieces; each piece belongs to one group."""
    prefix = max(int(prefix_B[piece[0]]) for piece in pieces)
    longest = max(int(suffix_B[piece].max()) for piece in pieces)
    return len(pieces) * prefix + sum(map(len, pieces)) * longest


def _place(scored: ScoredTrajectory) -> tuple[int, int]:
    return scored.trajectory.id.sample, scored.trajectory.id.segment


def _check_group(group: Sequence[ScoredTrajectory]) -> None:
    """The checks of `collate` on the trajectories of one sorted group."""
    first, before = group[0].trajectory.id, None
    for sample in group:
        row = sample.trajectory.id
        _check_arrays(sample.trajectory)
        if row.prompt != first.prompt or row.epoch != first.epoch:
            raise PluginError(f"batch: trajectory {row} is in the group of prompt '{first.prompt}'")
        if before is not None and before.sample == row.sample and before.segment == row.segment:
            raise PluginError(f"batch: trajectory {row} comes twice; each must come exactly once")
        before = row


def _check_rewards(group: Sequence[ScoredTrajectory]) -> None:
    """The checks of `collate` on the rewards of one sorted group."""
    before: ScoredTrajectory | None = None
    for sample in group:
        row, reward = sample.trajectory.id, sample.reward
        if reward.status is not RewardStatus.OK:
            raise RewardError(
                f"batch: the reward of {row} is '{reward.status}'; drop the sample or give it a value first"
            )
        if not -LARGEST <= reward.score <= LARGEST:
            raise RewardError(f"batch: the reward of {row} is {reward.score}; needs a finite score")
        if reward.token_scores is not None:
            _check_token_scores(sample, reward.token_scores)
        if before is not None and before.trajectory.id.sample == row.sample and before.reward.score != reward.score:
            raise PluginError(
                f"batch: parts of {row.unit()} have rewards {before.reward.score} and {reward.score}; "
                "the parts of a sample share one reward"
            )
        before = sample


def _check_arrays(trajectory: Trajectory) -> None:
    loss_mask_T, shape = trajectory.loss_mask, trajectory.token_ids.shape
    if len(shape) != 1 or loss_mask_T.shape != shape or trajectory.logprobs.shape != shape:
        shapes = shape, loss_mask_T.shape, trajectory.logprobs.shape
        raise PluginError(f"batch: arrays of trajectory {trajectory.id} have shapes {shapes}; needs one (T,)")


def _check_token_scores(scored: ScoredTrajectory, scores: Float32s) -> None:
    row = scored.trajectory.id
    if scores.shape != scored.trajectory.token_ids.shape:
        expected = scored.trajectory.token_ids.shape
        raise RewardError(f"batch: token_scores of {row} have shape {scores.shape}; needs {expected}, one per token")
    if not np.isfinite(scores).all():
        raise RewardError(f"batch: token_scores of {row} are not all finite")
    if scores[~scored.trajectory.loss_mask].any():
        raise RewardError(f"batch: token_scores of {row} reward a token that the policy did not sample; needs 0 there")


def _unit_numbers(group_B: Int64s, sample_in_group_B: Int64s) -> Int64s:
    """(B,) number of each row's sample, from 0; segments of a sample follow each other."""
    begins_B = np.ones(len(group_B), dtype=np.bool_)
    begins_B[1:] = (group_B[1:] != group_B[:-1]) | (sample_in_group_B[1:] != sample_in_group_B[:-1])
    return np.asarray(np.cumsum(begins_B) - 1, dtype=np.int64)


def _prompt_lengths(loss_mask_BT: Bools, lengths_B: Int64s) -> Int64s:
    """(B,) tokens before the first sampled one, all of them if none was sampled: `Trajectory.prompt_length`."""
    if not loss_mask_BT.size:
        return lengths_B
    return np.asarray(np.where(loss_mask_BT.any(axis=1), loss_mask_BT.argmax(axis=1), lengths_B), dtype=np.int64)


def _token_arrays(trajectories: Sequence[Trajectory], pad_id: int) -> TokenArrays:
    lengths_B = _int64s([len(trajectory.token_ids) for trajectory in trajectories])
    valid_BT = np.arange(int(lengths_B.max(initial=0))) < lengths_B[:, None]
    token_ids_BT = np.full(valid_BT.shape, pad_id, dtype=np.int32)
    loss_mask_BT = np.zeros(valid_BT.shape, dtype=np.bool_)
    logprobs_BT = np.zeros(valid_BT.shape, dtype=np.float32)
    if trajectories:
        # one assignment for all rows: a step may have many thousands
        token_ids_BT[valid_BT] = np.concatenate([trajectory.token_ids for trajectory in trajectories])
        loss_mask_BT[valid_BT] = np.concatenate([trajectory.loss_mask for trajectory in trajectories])
        logprobs_BT[valid_BT] = np.concatenate([trajectory.logprobs for trajectory in trajectories])
    logprobs_BT[~loss_mask_BT] = 0.0
    return TokenArrays(token_ids_BT, valid_BT, loss_mask_BT, logprobs_BT)


def _token_scores(rows: Sequence[ScoredTrajectory]) -> Float32s | None:
    """(B, T) extra rewards, 0 where a sample has none; None if no sample has any."""
    if all(row.reward.token_scores is None for row in rows):
        return None
    scores_BT = np.zeros((len(rows), max(len(row.trajectory.token_ids) for row in rows)), dtype=np.float32)
    for row, sample in enumerate(rows):
        if sample.reward.token_scores is not None:
            scores_BT[row, : len(sample.reward.token_scores)] = sample.reward.token_scores
    return scores_BT


def _baselines(rows: Sequence[ScoredTrajectory]) -> Float32s | None:
    """(B,) scores of greedy samples; None if a row has none."""
    found = [row.baseline for row in rows if row.baseline is not None]
    return np.array(found, dtype=np.float32) if rows and len(found) == len(rows) else None


def _int64s(values: Sequence[int]) -> Int64s:
    return np.array(values, dtype=np.int64)
