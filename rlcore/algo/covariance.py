"""Losses that treat tokens with a high covariance of log-prob and advantage differently from the others.

These tokens lower the policy's entropy (arXiv 2505.22617). Choosing them takes the whole mini-batch, so the controller
does it once, with a *selection*: a function of the whole mini-batch, named by the policy loss's offer
(`Algorithm.selection`). Workers get the result with the rows (`Batch.selected_BT`), and any split into micro-batches
gives the same loss.

The selection sees the log-probs of pi_old, or the recorded ones if no pass computed them. At the first update of a step
they are those of the policy, as in the paper; at later updates of the step the policy has moved away from them.
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
    """A function of the mini-batch's tokens: stateless, and the same under every schedule."""
    config: AlgoConfig


def covariances(inputs: SelectionInputs) -> Tensor:
    """(N,) float64 (log-prob less its mean) times (advantage less its mean) of the masked tokens, in row order."""
    logprobs_N = inputs.logprobs_BT[inputs.mask_BT].double()
    advantages_N = inputs.advantages_BT[inputs.mask_BT].double()
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def select_clip_cov(inputs: SelectionInputs) -> Tensor:
    """(B, T) True at `clip_cov_frac` of the tokens, drawn from those with covariance clip_cov_low to clip_cov_high.

    The number of tokens is rounded down and is at least 1, unless there are fewer candidates.
    """
    config, covariance_N = inputs.config, covariances(inputs)
    inside_N = (covariance_N > config.clip_cov_low) & (covariance_N < config.clip_cov_high)
    candidates = inside_N.nonzero()[:, 0].cpu().numpy()
    num = min(len(candidates), max(1, int(config.clip_cov_frac * len(covariance_N))))
    return _at(inputs, np.random.default_rng(inputs.seed).choice(candidates, num, replace=False))


def select_kl_cov(inputs: SelectionInputs) -> Tensor:
    """(B, T) True at the `kl_cov_frac` of the tokens with the highest covariances.

    The number of tokens is rounded down and is at least 1. Row order breaks ties.
    """
    covariance_N = covariances(inputs)
    num = min(len(covariance_N), max(1, int(inputs.config.kl_cov_frac * len(covariance_N))))
    return _at(inputs, torch.argsort(-covariance_N, stable=True)[:num].cpu().numpy())


def clip_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """`clip` without a loss at the selected tokens (Clip-Cov, arXiv 2505.22617). Metrics: those of `clip`, selected."""
    selected_BT, output = _selected(inputs, "clip_cov"), clip(inputs)
    loss_BT = torch.where(selected_BT, 0.0, output.loss_BT)
    return PolicyLossOutput(loss_BT, {**output.metrics, "selected": selected_BT.to(loss_BT.dtype)})


def kl_cov(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-r A, plus `kl_cov_coef` times |log r| at the selected tokens (KL-Cov, arXiv 2505.22617).

    Nothing is clipped: the penalty restrains the tokens that would move most. Metrics: ratio, approx_kl, selected.
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
        raise ValueError(f"{name}: needs selected_BT, the result of its selection for the whole mini-batch")
    return inputs.selected_BT & inputs.mask_BT


def _at(inputs: SelectionInputs, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
    """(B, T) True at the chosen ones of the masked tokens."""
    flags_N = torch.zeros(int(inputs.mask_BT.sum()), dtype=torch.bool)
    flags_N[torch.from_numpy(chosen)] = True
    selected_BT = torch.zeros_like(inputs.mask_BT)
    selected_BT[inputs.mask_BT] = flags_N.to(selected_BT.device)
    return selected_BT
