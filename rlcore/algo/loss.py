"""Policy losses: one number per token, which the engine weighs and sums (`rlcore.algo.aggregation`).

r is the ratio exp(logprobs - old_logprobs) of a token, A its advantage. On policy (r = 1) every loss here has the
gradient of REINFORCE, -A * grad(logprobs), except for constant factors.

A sequence is one row, and rows are never split. Each segment of a sample is a row: a sequence with a separate ratio.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlcore.config import AlgoConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PolicyLossInputs:
    """The inputs of a policy loss, from a micro-batch. Only `logprobs_BT` carries a gradient."""

    logprobs_BT: Tensor
    """Log-probs of the policy that is being trained."""
    old_logprobs_BT: Tensor
    """Log-probs of the policy in the ratio's denominator; without a pass for it, `logprobs_BT.detach()`."""
    advantages_BT: Tensor
    """An advantage per sample is repeated over the tokens of the sample."""
    mask_BT: Tensor
    """True where the token has a loss."""
    config: AlgoConfig
    selected_BT: Tensor | None = None
    """True where the loss's selection picked the token from the whole mini-batch (`rlcore.algo.covariance`); None
    for losses without a selection."""


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """A loss per token, and its metrics."""

    loss_BT: Tensor
    """0 outside the mask; neither weighted nor averaged."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """(B, T) detached numbers by name, 0 outside the mask. The engine averages them over the masked tokens. No name may
    be in `RESERVED_METRICS`."""


RESERVED_METRICS = frozenset(
    {
        "loss",
        "entropy",
        "kl",
        "kl_per_sample",
        "kl_coef",
        "ratio_max",
        "importance_mean",
        "importance_max",
        "importance_capped_frac",
        "rollout_logprob_diff",
    }
)
"""Names that rlcore logs as policy/NAME itself."""


def clip(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """PPO's clipped loss max(-r A, -clamp(r, 1 - clip_low, 1 + clip_high) A).

    arXiv 1707.06347, eq. 7; separate bounds for each side: arXiv 2503.14476, eq. 8. With `dual_clip` = c > 1 the loss
    of a token with a negative advantage is at most -c A (arXiv 1912.09729). Metrics: ratio, clipped_low and
    clipped_high (1 where the bound removed the gradient), dual_clipped when c is set, approx_kl = r - 1 - log r, an
    estimate of KL(old || policy). ConfigError when 0 < c <= 1, which would invert the loss.
    """
    log_ratio_BT = _log_ratio(inputs)
    return _clipped(inputs, log_ratio_BT, log_ratio_BT.exp())


def gspo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """`clip` with one ratio per sequence: s = exp(mean over the row's loss tokens of log r).

    arXiv 2507.18071, in its form GSPO-token: each token's ratio has the value s and the gradient of that token's
    log-prob. With one advantage per sample the two forms of the paper have the same gradient; GSPO-token also accepts
    one advantage per token. Bounds are much narrower than those of `clip` (the paper: 3e-4 and 4e-4). Metrics: those of
    `clip`, with s as the ratio.
    """
    log_ratio_BT = _log_ratio(inputs)
    mean_B1 = _row_means(log_ratio_BT.detach(), inputs.mask_BT)
    return _clipped(inputs, log_ratio_BT, (mean_B1 + log_ratio_BT - log_ratio_BT.detach()).exp())


def cispo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-w A logprobs, with the detached weight w = clamp(r, 1 - clip_low, 1 + clip_high) (arXiv 2506.13585).

    No token loses its gradient; the bounds limit its size. The paper sets no lower bound: clip_low = 1. Metrics:
    ratio, clipped_low and clipped_high (1 where the weight is at a bound), approx_kl.
    """
    config, log_ratio_BT = inputs.config, _log_ratio(inputs)
    ratios_BT = log_ratio_BT.detach().exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    # Masked here too: -inf at a token without a loss, times 0, would be NaN.
    logprobs_BT = torch.where(inputs.mask_BT, inputs.logprobs_BT, 0.0)
    loss_BT = -ratios_BT.clamp(low, high) * _advantages(inputs) * logprobs_BT
    bounds = {"clipped_low": ratios_BT < low, "clipped_high": ratios_BT > high}
    return _output(inputs, loss_BT, log_ratio_BT, ratio=ratios_BT, **bounds)


def sapo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A (4 / tau) sigmoid(tau (r - 1)), with tau chosen by the sign of A: a smooth gate (arXiv 2511.20347).

    tau is `sapo_tau_positive` for A > 0, else `sapo_tau_negative`; the larger it is, the faster tokens far from r = 1
    lose their gradient. The gate's slope at r = 1 is 1. Metrics: ratio, approx_kl, and gate, the share of the gradient
    that remains (4 times the slope of the sigmoid).
    """
    config, log_ratio_BT, advantages_BT = inputs.config, _log_ratio(inputs), _advantages(inputs)
    positive, negative = (advantages_BT.new_tensor(tau) for tau in (config.sapo_tau_positive, config.sapo_tau_negative))
    tau_BT = torch.where(advantages_BT > 0, positive, negative)
    # Above e^20 the gate is closed in any precision, and an exponential that overflows has a NaN gradient.
    ratio_BT = log_ratio_BT.clamp(max=20.0).exp()
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1.0))
    loss_BT = -advantages_BT * gate_BT * 4.0 / tau_BT
    slope_BT = 4.0 * (gate_BT * (1.0 - gate_BT)).detach()
    return _output(inputs, loss_BT, log_ratio_BT, ratio=ratio_BT.detach(), gate=slope_BT)


def gpg(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A logprobs: the policy gradient itself, without a ratio or a bound (GPG, arXiv 2504.02546).

    The paper's scaling by the share of groups whose rewards differ is in the estimator `gpg`. Metric: approx_kl.
    """
    loss_BT = -_advantages(inputs) * torch.where(inputs.mask_BT, inputs.logprobs_BT, 0.0)
    return _output(inputs, loss_BT, _log_ratio(inputs))


def gmpo(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """-A g with one g per sequence: the geometric mean of its tokens' clipped ratios (arXiv 2507.20673).

    log g is sign(A) times the mean, over the row's loss tokens, of the smaller of sign(A) log r and
    sign(A) clamp(log r, -clip_low, clip_high). The bounds apply to the *logarithm* (the paper: 0.4 both). If
    the estimator gives one advantage per token, A is their mean over the row's loss tokens. Every token of the row has
    the loss of the row: with seq_mean_token_mean the mini-batch's loss is the mean over sequences. Metrics: ratio (g),
    clipped_low, clipped_high, approx_kl.
    """
    config, mask_BT, log_ratio_BT = inputs.config, inputs.mask_BT, _log_ratio(inputs)
    advantage_B1 = _row_means(_advantages(inputs), mask_BT)
    sign_B1 = advantage_B1.sign()
    clamped_BT = log_ratio_BT.clamp(-config.clip_low, config.clip_high)
    bounded_BT = sign_B1 * torch.minimum(sign_B1 * log_ratio_BT, sign_B1 * clamped_BT)
    mean_ratio_B1 = _row_means(bounded_BT, mask_BT).exp()
    loss_BT = torch.where(mask_BT, -advantage_B1 * mean_ratio_B1, 0.0)
    bounds = {
        "clipped_low": (sign_B1 < 0) & (log_ratio_BT < -config.clip_low),
        "clipped_high": (sign_B1 > 0) & (log_ratio_BT > config.clip_high),
    }
    return _output(inputs, loss_BT, log_ratio_BT, ratio=mean_ratio_B1.detach().expand_as(loss_BT), **bounds)


def _clipped(inputs: PolicyLossInputs, log_ratio_BT: Tensor, ratio_BT: Tensor) -> PolicyLossOutput:
    config, advantages_BT = inputs.config, _advantages(inputs)
    if config.dual_clip != 0.0 and config.dual_clip <= 1.0:
        raise ConfigError(f"algo.dual_clip={config.dual_clip}: needs 0 (off) or a number above 1")
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(low, high) * advantages_BT)
    ratios_BT = ratio_BT.detach()
    metrics = {
        "ratio": ratios_BT,
        "clipped_low": (advantages_BT < 0) & (ratios_BT < low),
        "clipped_high": (advantages_BT > 0) & (ratios_BT > high),
    }
    if config.dual_clip:
        bound_BT = -config.dual_clip * advantages_BT
        dual_clipped_BT = (advantages_BT < 0) & (loss_BT.detach() > bound_BT)
        loss_BT = torch.where(dual_clipped_BT, bound_BT, loss_BT)
        metrics["dual_clipped"] = dual_clipped_BT
    return _output(inputs, loss_BT, log_ratio_BT, **metrics)


def _output(inputs: PolicyLossInputs, loss_BT: Tensor, log_ratio_BT: Tensor, **metrics: Tensor) -> PolicyLossOutput:
    """The loss with its metrics and approx_kl, all 0 outside the mask."""
    logs_BT = log_ratio_BT.detach()
    metrics["approx_kl"] = logs_BT.exp() - 1.0 - logs_BT
    shown = {name: torch.where(inputs.mask_BT, value_BT.to(loss_BT.dtype), 0.0) for name, value_BT in metrics.items()}
    return PolicyLossOutput(loss_BT, shown)


def _log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """(B, T) log r, 0 outside the mask; masked before exp, which may overflow: inf * 0 in a backward pass is NaN."""
    return torch.where(inputs.mask_BT, inputs.logprobs_BT - inputs.old_logprobs_BT, 0.0)


def _advantages(inputs: PolicyLossInputs) -> Tensor:
    return torch.where(inputs.mask_BT, inputs.advantages_BT, 0.0)


def _row_means(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, 1) means over the masked tokens of each row; 0 for a row without masked tokens."""
    return torch.where(mask_BT, values_BT, 0.0).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
