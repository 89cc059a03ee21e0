"""Rows of a batch as tensors on the model's device, and a model's predictions for them.

Letters as in `rlcore.types`, and N: the positions with a loss in a micro-batch, row by row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlcore.algo.aggregation import weighted_sum
from rlcore.data.batch import needed_tokens
from rlcore.engines.hf.train.context import ContextGroup
from rlcore.engines.hf.train.prefixes import PaddedBatch, pad
from rlcore.engines.hf.train.ranks import shared_tokens
from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.engines.hf.train.tree import PackedBatch, pack
from rlcore.types import Batch, Bools, Float32s, SharedPrefix

LOWEST = -math.inf
"""The maximum over no tokens."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some rows of a mini-batch, trimmed to the longest of them."""

    batch: Batch
    device: torch.device
    shared_prefix: SharedPrefix = SharedPrefix.NONE
    context: ContextGroup | None = None
    """The ranks that hold slices of it, with `tree`; None: this rank has all of it."""

    @cached_property
    def packed(self) -> PackedBatch:
        """The tokens as one sequence, or this rank's slice of it; common prefixes of a group's rows occur once."""
        return pack(self.batch, self.device, self.context)

    @cached_property
    def padded(self) -> PaddedBatch:
        """The rows after their prefixes, and the prefix of each group once, both padded."""
        return pad(self.batch, self.device)

    @cached_property
    def token_ids_BT(self) -> Tensor:
        """Int64 token ids."""
        return device_tensor(self.batch.tokens.token_ids_BT.astype(np.int64), self.device)

    @cached_property
    def mask_BT(self) -> Tensor:
        """True where the token has a loss."""
        return device_tensor(self.batch.tokens.loss_mask_BT, self.device)

    @cached_property
    def flat_N(self) -> Tensor:
        """row * T + t of each position with a loss."""
        loss_mask_BT = self.batch.tokens.loss_mask_BT  # computed on the host: asking the device would wait for it
        return device_tensor(np.flatnonzero(loss_mask_BT), self.device)

    @cached_property
    def targets_N(self) -> Tensor:
        """Ids of the loss tokens; in a context group, of those that this rank predicts."""
        if self.context is None or self.packed.part is None:
            return self.token_ids_BT.flatten()[self.flat_N]
        places_N = np.flatnonzero(self.batch.tokens.loss_mask_BT)[self.packed.part.chosen_m]
        return device_tensor(self.batch.tokens.token_ids_BT.flatten()[places_N].astype(np.int64), self.device)

    def of_all(self, first_N: Tensor, second_N: Tensor) -> tuple[Tensor, Tensor]:
        """Values of all loss tokens from those that this rank predicts; all ranks of a context group must call this."""
        if self.context is None:
            return first_N, second_N
        first_N, second_N = self.whole(torch.stack([first_N, second_N])).unbind()
        return first_N, second_N

    def whole(self, scores_SN: Tensor) -> Tensor:
        """The same for S kinds of scores."""
        if self.context is None or self.packed.part is None:
            return scores_SN
        return self.packed.part.whole(scores_SN)

    @cached_property
    def advantages_BT(self) -> Tensor:
        """The advantage of each token; ValueError if the batch has none yet."""
        if self.batch.advantages_BT is not None:
            return self.per_token(self.batch.advantages_BT)
        if self.batch.advantages_B is None:
            raise ValueError("the mini-batch has no advantages")
        advantages_B = device_tensor(self.batch.advantages_B, self.device)
        return advantages_B[:, None].expand(self.mask_BT.shape)

    def weighted(self, loss_BT: Tensor) -> Tensor:
        """The sum of the loss tokens' losses times the weights of their rows; needs the batch's `weights_B`."""
        weights_B = device_tensor(np.asarray(self.batch.weights_B), self.device).to(loss_BT.dtype)
        return weighted_sum(loss_BT, self.mask_BT, weights_B)

    def per_token(self, array_BT: Float32s | Bools) -> Tensor:
        """A (B, T) array of the batch as a tensor."""
        return device_tensor(array_BT, self.device)

    def spread(self, values_N: Tensor) -> Tensor:
        """(B, T) with the values at the positions with a loss, and 0 elsewhere."""
        flat = torch.zeros(self.mask_BT.numel(), dtype=values_N.dtype, device=self.device)
        return flat.index_copy(0, self.flat_N, values_N).view(self.mask_BT.shape)


@dataclass(frozen=True, eq=False)
class Predictions:
    """The model's predictions for the tokens of a micro-batch; 0 outside the loss mask."""

    scores_BT: Tensor
    """For a causal language model the log-prob of each token under softmax(logits / temperature); for a value model the
    value before the token."""
    entropy_BT: Tensor
    """Entropy of the distribution that the token was drawn from, in nats; 0 for a value model."""


@dataclass(frozen=True, eq=False)
class LossTerms:
    """The result of a loss."""

    loss_BT: Tensor
    """Loss of each token; the engine masks, weights by `weights_B` and sums."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """(B, T) by logged name: averaged over the mini-batch's loss tokens, or maximised if the name ends in '_max'."""
    counted: Mapping[str, Tensor] = field(default_factory=dict)
    """(B, T) the tokens that count for a metric, if not all loss tokens do; without any it is not logged."""


class Loss(Protocol):
    """The loss of each token: what a `TrainEngine` trains with."""

    def __call__(self, micro: MicroBatch, predictions: Predictions, /) -> LossTerms:
        """(B, T) losses of a micro-batch, with gradients to `predictions`.

        Called once per micro-batch. The result for a row may depend on that row only: neither ranks nor the division
        into micro-batches are visible. Positions outside `micro.mask_BT` are ignored, and no mean is taken: the engine
        multiplies by the rows' `weights_B` and sums. ValueError when the batch lacks what the loss needs.
        """
        ...


class MetricSums:
    """Loss and metrics of a mini-batch, summed on the device and read once, with the mini-batch's own denominator.

    Adding does not wait, so the device's queue stays full from one micro-batch to the next.
    """

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._nums: dict[str, Tensor] = {}

    def add(self, terms: LossTerms, mask_BT: Tensor, loss: Tensor) -> None:
        """Add one micro-batch with loss tokens `mask_BT` and weighted loss `loss`."""
        loss = loss.detach().double()
        self._loss = loss if self._loss is None else self._loss + loss
        num_masked = mask_BT.sum()
        for name, value_BT in terms.metrics.items():
            counted_BT = mask_BT & terms.counted[name] if name in terms.counted else mask_BT
            num = counted_BT.sum() if name in terms.counted else num_masked
            values_BT = value_BT.detach().double()
            if name.endswith("_max"):
                largest = torch.where(counted_BT, values_BT, LOWEST).max()
                self._sums[name] = torch.maximum(self._sums.get(name, largest), largest)
            else:
                total = torch.where(counted_BT, values_BT, 0.0).sum()
                self._sums[name] = self._sums[name] + total if name in self._sums else total
            self._nums[name] = self._nums[name] + num if name in self._nums else num

    def read(self) -> "ReadMetrics":
        """Wait for the device, once, and copy the sums."""
        if self._loss is None:
            return ReadMetrics(0.0)
        tensors = [self._loss, *self._sums.values(), *(num.double() for num in self._nums.values())]
        loss, *numbers = torch.stack(tensors).tolist()
        sums, nums = numbers[: len(self._sums)], numbers[len(self._sums) :]
        return ReadMetrics(loss, dict(zip(self._sums, sums, strict=True)), dict(zip(self._nums, nums, strict=True)))


@dataclass(frozen=True)
class ReadMetrics:
    """Loss, sums of metrics and token counts as plain numbers, to be sent to other ranks."""

    loss: float
    sums: Mapping[str, float] = field(default_factory=dict)
    nums: Mapping[str, float] = field(default_factory=dict)

    def with_shared_tokens(self, name: str, parts: Sequence[Batch], shared_prefix: SharedPrefix) -> "ReadMetrics":
        """These and, if rows share tokens, under `name` the share that another row of a micro-batch computed."""
        if shared_prefix is SharedPrefix.NONE:
            return self
        shared = sum(shared_tokens(part, shared_prefix) for part in parts)
        needed = sum(int(needed_tokens(part).sum()) for part in parts)
        return ReadMetrics(self.loss, {**self.sums, name: shared}, {**self.nums, name: needed})

    @classmethod
    def merged(cls, read: Sequence["ReadMetrics"]) -> "ReadMetrics":
        """The total of several ranks' sums for one mini-batch."""
        sums, nums = dict[str, float](), dict[str, float]()
        for metrics in read:
            for name, value in metrics.sums.items():
                before = sums.get(name, LOWEST if name.endswith("_max") else 0.0)
                # `max` would skip a NaN
                sums[name] = float(np.maximum(before, value)) if name.endswith("_max") else before + value
                nums[name] = nums.get(name, 0.0) + metrics.nums[name]
        return cls(math.fsum(metrics.loss for metrics in read), sums, nums)

    def result(self) -> dict[str, float]:
        """The averages and maxima of the metrics that a token counted for."""
        return {
            name: value if name.endswith("_max") else value / self.nums[name]
            for name, value in self.sums.items()
            if self.nums[name]
        }
