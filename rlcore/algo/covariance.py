"""Losses that treat a few tokens of a mini-batch differently: those whose log-prob and advantage vary together.

Such tokens are what lowers the policy's entropy (arXiv 2505.22617). Which they are depends on the whole mini-batch, so
it is decided once, on the controller, by a *selection*: a function of the whole mini-batch that a policy loss's offer
names (`Algorithm.selection`). Workers get the result with the rows (`Batch.selected`), and any split into micro-batches
gives the same loss.

The selection sees the log-probs of pi_old, the recorded ones where there was no pass for them. At the first update of a
step these are the policy's own, as in the paper; at later updates of the step the policy has moved on from them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlcore.algo.loss import PolicyLossInputs, PolicyLossOutput, clip
from rlcore.config import AlgoConfig


@dataclass(frozen=True, eq=False)
class SelectionInputs:
    """The inputs of a selection, from a whole mini-batch."""

    logprobs_BT: Tensor
    """Log-probs of pi_old."""
    advantages_BT: Tensor
    mask_BT: Tensor
    """True where the token has a loss that counts."""
    seed: int
    """A function of the mini-batch's tokens: no state to keep, and the same under any schedule."""
    config: AlgoConfig


def covariances(inputs: SelectionInputs) -> Tensor:
    """(N,) float64 (log-prob less its mean) times (advantage less its mean) of the masked tokens, row by row."""
    logprobs_N = inputs.logprobs_BT[inputs.mask_BT].double()
    advantages_N = inputs.advantages_BT[inputs.mask_BT].double()
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def select_clip_cov(inputs: SelectionInputs) -> Tensor:
    """(B, T) True at `clip_cov_frac` of the tokens, drawn from those of covariance clip_cov_low to clip_cov_high.

    The number is rounded down, but at least 1; fewer where there are fewer candidates.
    """
    config, covariance_N = inputs.config, covariances(inputs)
    inside_N = (covariance_N > config.clip_cov_low) & (covariance_N < config.clip_cov_high)
    candidates = inside_N.nonzero()[:, 0].cpu().numpy()
    num = min(len(candidates), max(1, int(config.clip_cov_frac * len(covariance_N))))
    return _at(inputs, np.random.default_rng(inputs.seed).choice(candidates, num, replace=False))


def select_kl_cov(inputs: SelectionInputs) -> Tensor:
    """(B, T) True at the `kl_cov_frac` of the tokens that have the highest covariances.

    The number is rounded down, but at least 1. Ties are broken by the order of rows.
    """
    covariance_N = covariances(inputs)
    num = min(len(covariance_N), max(1, int(inputs.config.kl_cov_frac * len(covariance_N))))
    return _at(inputs, torch.argsort(-covariance_N, stable=True)[:num].cpu().numpy())


def clip_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """`clip`, with no loss at the selected tokens (Clip-Cov, arXiv 2505.22617). Metrics as of `clip`, and selected."""
    selected_BT, output = _selected(inputs, "clip_cov"), clip(inputs)
    loss_BT = torch.where(selected_BT, 0.0, output.loss_BT)
    return PolicyLossOutput(loss_BT, {**output.metrics, "selected": selected_BT.to(loss_BT.dtype)})


def kl_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-r A, and `kl_cov_coef` times |log r| added at the selected tokens (KL-Cov, arXiv 2505.22617).

    Nothing is clipped: the penalty holds back the tokens that would move most. Metrics: ratio, approx_kl, selected.
    """
    selected_BT, mask_BT = _selected(inputs, "kl_cov"), inputs.mask_BT
    log_ratio_BT = torch.where(mask_BT, inputs.logprobs_BT - inputs.old_logprobs_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    loss_BT = -ratio_BT * torch.where(mask_BT, inputs.advantages_BT, 0.0)
    loss_BT = loss_BT + inputs.config.kl_cov_coef * torch.where(selected_BT, log_ratio_BT.abs(), 0.0)
    ratios_BT, logs_BT = ratio_BT.detach(), log_ratio_BT.detach()
    metrics = {"ratio": torch.where(mask_BT, ratios_BT, 0.0), "approx_kl": ratios_BT - 1.0 - logs_BT}
    return PolicyLossOutput(loss_BT, {**metrics, "selected": selected_BT.to(loss_BT.dtype)})


def _selected(inputs: PolicyLossInputs, name: str) -> Tensor:
    if inputs.selected_BT is None:
        raise ValueError(f"{name}: needs selected_BT, which its selection makes of the whole mini-batch")
    return inputs.selected_BT & inputs.mask_BT


def _at(inputs: SelectionInputs, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """(B, T) True at the chosen of the masked tokens."""
    flags_N = torch.zeros(int(inputs.mask_BT.sum()), dtype=torch.bool)
    flags_N[torch.from_numpy(chosen)] = True
    selected_BT = torch.zeros_like(inputs.mask_BT)
    selected_BT[inputs.mask_BT] = flags_N.to(selected_BT.device)
    return selected_BT
