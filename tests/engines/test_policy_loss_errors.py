"""Errors of a policy loss that come after its probe name it, and the line if it raised."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput
from rlcore.config import AlgoConfig
from rlcore.engines.hf import MicroBatch, Predictions
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import PluginError
from rlcore.testing.tiny import random_batch


def raises(inputs: PolicyLossInputs) -> PolicyLossOutput:
    table: dict[str, float] = {}
    return PolicyLossOutput(inputs.logprobs_BT * table["beta"])


def wrong_shape(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(inputs.logprobs_BT[:, 1:])


def wrong_metric(inputs: PolicyLossInputs) -> PolicyLossOutput:
    return PolicyLossOutput(inputs.logprobs_BT, {"size": inputs.logprobs_BT.sum().detach()})


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (raises, r"KeyError: 'beta' \(tests/engines/test_policy_loss_errors\.py:19\)"),
        (wrong_shape, r"returned loss_BT of shape \(\d+, \d+\); needs \(\d+, \d+\)"),
        (wrong_metric, r"returned size of shape \(\); needs \(\d+, \d+\)"),
    ],
)
def test_a_policy_loss_is_named_by_its_late_errors(
    loss: Callable[[PolicyLossInputs], PolicyLossOutput], found: str
) -> None:
    batch = random_batch()
    zeros_BT = torch.zeros(batch.tokens.loss_mask_BT.shape)
    micro = MicroBatch(replace(batch, old_logprobs_BT=None), torch.device("cpu"))
    policy_loss = PolicyLoss(loss, replace(AlgoConfig(), policy_loss="mine"))
    with pytest.raises(PluginError, match=rf"^algo\.policy_loss=mine:? {found}$"):
        policy_loss(micro, Predictions(zeros_BT, zeros_BT))
