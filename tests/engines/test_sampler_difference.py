"""The difference between sampler and trainer, over tokens that both computed with the same weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig
from rlcore.data.batch import select
from rlcore.engines.hf import LossTerms, MicroBatch, Predictions
from rlcore.engines.hf.train.microbatch import MetricSums, ReadMetrics
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.testing.tiny import random_batch, random_groups
from rlcore.train.versions import sampled_with
from rlcore.types import Batch, Trajectory

NAME = "policy/rollout_logprob_diff"


def trajectory(versions: tuple[tuple[int, int], ...], mask: str) -> Trajectory:
    """A trajectory with a loss at each '1' of the mask."""
    loss_mask = np.array([value == "1" for value in mask])
    token_ids, logprobs = np.arange(len(mask), dtype=np.int32), np.zeros(len(mask), dtype=np.float32)
    like = random_groups(1, 1, 0)[0][0].trajectory
    return replace(like, token_ids=token_ids, loss_mask=loss_mask, logprobs=logprobs, versions=versions)


def test_tokens_of_a_version_are_those_of_its_runs_that_the_policy_sampled() -> None:
    rows = [
        trajectory(((2, 6), (4, 7)), "001111"),
        trajectory(((1, 7),), "0110"),  # the last token is a tool's
        trajectory(((1, 7), (3, 6), (4, 7)), "01111"),
        trajectory(((1, 6),), "01"),
    ]
    expected = ["000011", "011000", "011010", "000000"]
    assert ["".join(map(str, row)) for row in sampled_with(rows, 7).astype(int).tolist()] == expected
    alone = ["000000", "011000", "000000", "000000"]
    assert ["".join(map(str, row)) for row in sampled_with(rows, 7, alone=True).astype(int).tolist()] == alone
    assert not sampled_with(rows, 5).any()
    assert sampled_with([], 7).shape == (0, 0)


def terms_of(batch: Batch, logprobs_BT: torch.Tensor) -> tuple[LossTerms, torch.Tensor]:
    micro = MicroBatch(batch, torch.device("cpu"))
    old = replace(batch, old_logprobs_BT=logprobs_BT.numpy())
    loss = PolicyLoss(clip, AlgoConfig(), sampler_differs=True)
    return loss(MicroBatch(old, micro.device), Predictions(logprobs_BT, torch.zeros_like(logprobs_BT))), micro.mask_BT


def summed(batches: list[tuple[Batch, torch.Tensor]]) -> dict[str, float]:
    """The engine's metrics of these micro-batches, those of two ranks."""
    found: list[ReadMetrics] = []
    for batch, logprobs_BT in batches:
        sums = MetricSums()
        sums.add(*terms_of(batch, logprobs_BT), logprobs_BT.sum())
        found.append(sums.read())
    return ReadMetrics.merged(found).result()


def test_the_difference_counts_only_tokens_of_the_same_weights_and_is_absent_without_any() -> None:
    """The others have moved by 10 since they were sampled; those of the same weights differ by 0.25."""
    batch = random_batch()
    mask_BT = batch.tokens.loss_mask_BT
    same_BT = mask_BT & (np.arange(len(batch))[:, None] == 1)
    assert 0 < same_BT.sum() < mask_BT.sum()
    rollout_BT = batch.tokens.rollout_logprobs_BT
    logprobs_BT = torch.tensor(np.where(mask_BT, rollout_BT + np.where(same_BT, -0.25, 10.0), 0.0).astype(np.float32))
    halves = np.array_split(np.arange(len(batch)), 2)

    def parts(of: Batch) -> list[tuple[Batch, torch.Tensor]]:
        chosen = [(rows, select(of, rows)) for rows in halves]
        return [(row, logprobs_BT[rows, : int(row.lengths_B.max())]) for rows, row in chosen]

    all_equal = summed(parts(batch))
    num_same, num = int(same_BT.sum()), int(mask_BT.sum())
    assert all_equal[NAME] == pytest.approx((0.25 * num_same + 10.0 * (num - num_same)) / num, rel=1e-5)
    marked = summed(parts(replace(batch, same_weights_BT=same_BT)))
    assert marked[NAME] == pytest.approx(0.25, abs=1e-5)
    none = summed(parts(replace(batch, same_weights_BT=np.zeros_like(same_BT))))
    assert NAME not in none
    assert {name: value for name, value in marked.items() if name != NAME} == none, "nothing else changes"
