"""Rows of a batch as tensors on the model's device, and what a model says of them.

Letters as in `rlcore.types`, and N: the positions with a loss in a micro-batch, row by row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcore.data.batch import micro_batches, shared_micro_batches
from rlcore.engines.hf.train.prefixes import PaddedBatch, pad
from rlcore.engines.hf.train.tree import PackedBatch, pack
from rlcore.types import Batch, Float32s, Int64s, Ref, SharedPrefix


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some rows of a mini-batch, trimmed to the longest of them."""

    batch: Batch
    device: torch.device
    shared_prefix: SharedPrefix = SharedPrefix.NONE

    @cached_property
    def packed(self) -> PackedBatch:
        """The tokens as one sequence, the prefix of each group once."""
        return pack(self.batch, self.device)

    @cached_property
    def padded(self) -> PaddedBatch:
        """The rows after their prefixes, and the prefix of each group once, both padded."""
        return pad(self.batch, self.device)

    @cached_property
    def token_ids_BT(self) -> Tensor:
        """Int64 token ids."""
        return torch.tensor(self.batch.tokens.get().token_ids_BT, dtype=torch.int64, device=self.device)

    @cached_property
    def mask_BT(self) -> Tensor:
        """True where the token has a loss."""
        return torch.tensor(self.batch.tokens.get().loss_mask_BT, device=self.device)

    @cached_property
    def flat_N(self) -> Tensor:
        """row * T + t of each position with a loss."""
        return self.mask_BT.flatten().nonzero()[:, 0]

    @cached_property
    def advantages_BT(self) -> Tensor:
        """The advantage of each token; ValueError when the batch has none yet."""
        if self.batch.advantages is not None:
            return self.per_token(self.batch.advantages)
        if self.batch.advantages_B is None:
            raise ValueError("the mini-batch has no advantages")
        advantages_B = torch.tensor(self.batch.advantages_B, device=self.device)
        return advantages_B[:, None].expand(self.mask_BT.shape)

    def per_token(self, ref: Ref[Float32s]) -> Tensor:
        """A (B, T) array of the batch as a tensor."""
        return torch.tensor(ref.get(), device=self.device)

    def spread(self, values_N: Tensor) -> Tensor:
        """(B, T) with the values at the positions with a loss, and 0 elsewhere."""
        flat = torch.zeros(self.mask_BT.numel(), dtype=values_N.dtype, device=self.device)
        return flat.index_copy(0, self.flat_N, values_N).view(self.mask_BT.shape)


@dataclass(frozen=True, eq=False)
class Predictions:
    """What the model says of the tokens of a micro-batch; 0 where there is no loss."""

    scores_BT: Tensor
    """Of a causal language model the log-prob of each token under softmax(logits / temperature); of a value model the
    value before the token."""
    entropy_BT: Tensor
    """Entropy of the distribution that the token was drawn from, in nats; 0 of a value model."""


@dataclass(frozen=True, eq=False)
class LossTerms:
    """What a loss makes of predictions."""

    loss_BT: Tensor
    """Loss of each token; the engine masks, weighs with `weights_B` and sums."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """(B, T) by the name they are logged under: averaged over the mini-batch's loss tokens, those that end in '_max'
    maximised."""
    counted: Mapping[str, Tensor] = field(default_factory=dict)
    """(B, T) the tokens that count for a metric, where not all loss tokens do; without any it is not logged."""


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
    """Metrics of a mini-batch, gathered over its micro-batches, with the mini-batch's own denominator."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._nums: dict[str, int] = {}

    def add(self, terms: LossTerms, mask_BT: Tensor) -> None:
        """Take in one micro-batch, whose loss tokens are `mask_BT`."""
        for name, value_BT in terms.metrics.items():
            counted_BT = mask_BT & terms.counted[name] if name in terms.counted else mask_BT
            chosen = value_BT.detach()[counted_BT].double()
            self._nums[name] = self._nums.get(name, 0) + chosen.numel()
            if name.endswith("_max"):
                largest = float(chosen.max()) if chosen.numel() else -float("inf")
                self._sums[name] = max(self._sums.get(name, -float("inf")), largest)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + float(chosen.sum())

    def state(self) -> dict[str, Any]:
        """What has been gathered, for another rank."""
        return {"nums": self._nums, "sums": self._sums}

    @classmethod
    def merged(cls, states: Sequence[Mapping[str, Any]]) -> "MetricSums":
        """What several ranks have gathered of one mini-batch."""
        total = cls()
        for state in states:
            for name, value in state["sums"].items():
                total._nums[name] = total._nums.get(name, 0) + state["nums"][name]
                if name.endswith("_max"):
                    total._sums[name] = max(total._sums.get(name, -float("inf")), value)
                else:
                    total._sums[name] = total._sums.get(name, 0.0) + value
        return total

    def result(self) -> dict[str, float]:
        """The averages and maxima of the metrics that a token counted for."""
        return {
            name: value if name.endswith("_max") else value / self._nums[name]
            for name, value in self._sums.items()
            if self._nums[name]
        }


def split(batch: Batch, max_tokens: int, shared_prefix: SharedPrefix) -> list[Int64s]:
    """The rows of each micro-batch."""
    if shared_prefix is SharedPrefix.NONE:
        return micro_batches(batch.lengths_B, max_tokens)
    return shared_micro_batches(batch, max_tokens, packed=shared_prefix is SharedPrefix.TREE)
