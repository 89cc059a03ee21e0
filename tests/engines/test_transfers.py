"""Copies to the device: the arguments that CUDA would get. No CUDA device takes part."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig
from rlcore.engines.hf import MicroBatch, Predictions
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.transfers import device_tensor
from rlcore.testing.tiny import random_batch

CUDA = torch.device("cuda:0")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Requests to tensors that go to CUDA; they stay where they are."""
    found: list[tuple[str, Any]] = []
    moved = torch.Tensor.to

    def pin_memory(self: Tensor) -> Tensor:
        found.append(("pinned", self.data_ptr()))
        return self

    def to(self: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        if args[:1] != (CUDA,):
            return moved(self, *args, non_blocking=non_blocking, **kwargs)
        assert found[-1] == ("pinned", self.data_ptr()), "a copy from memory that may be paged out waits"
        found.append(("copied", non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return found


def test_a_copy_to_cuda_is_pinned_and_does_not_block(copies: list[tuple[str, Any]]) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    tensor = device_tensor(array, CUDA)
    assert [what for what, _ in copies] == ["pinned", "copied"]
    assert copies[-1] == ("copied", True)
    assert torch.equal(tensor, torch.arange(6.0).reshape(2, 3))
    tensor += 1.0
    assert array.max() == 5.0, "the tensor has separate memory"


def test_a_copy_on_the_host_is_not_pinned(copies: list[tuple[str, Any]]) -> None:
    assert device_tensor(np.arange(3), torch.device("cpu")).tolist() == [0, 1, 2]
    assert copies == []


def test_all_arrays_of_a_micro_batch_go_the_same_way(
    copies: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `torch.tensor(..., device='cuda')` would be an error here: there is no CUDA."""
    batch = random_batch()
    mask_BT = batch.tokens.loss_mask_BT
    recorded = batch.tokens.rollout_logprobs_BT
    batch = replace(
        batch, old_logprobs_BT=recorded, reference_logprobs_BT=recorded, selected_BT=mask_BT, same_weights_BT=mask_BT
    )
    micro = MicroBatch(batch, CUDA)
    loss = PolicyLoss(clip, AlgoConfig(), sampler_differs=True)
    scores_BT = torch.zeros(mask_BT.shape)
    terms = loss(micro, Predictions(scores_BT, scores_BT))
    micro.weighted(terms.loss_BT)
    assert micro.token_ids_BT.dtype is torch.int64
    predicted = (micro.flat_N, micro.packed.predict_M, micro.padded.predict_M)
    assert [places_M.numel() for places_M in predicted] == [mask_BT.sum()] * 3
    tree = micro.packed.tree
    bounds = [runs.bounds for spans in (tree.own, *tree.levels) for runs in (spans.queries, spans.keys)]
    assert all(places.dtype is torch.int32 for places in bounds)
    made = [what for what, _ in copies]
    assert made.count("pinned") == made.count("copied") >= 18
    assert all(non_blocking is True for what, non_blocking in copies if what == "copied")
