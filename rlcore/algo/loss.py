"""Policy losses: one number a token, for the engine to weigh and sum (`rlcore.algo.aggregation`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlcore.config import AlgoConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, eq=False)
class PolicyLossInputs:
    """What a policy loss sees of a micro-batch. Only `logprobs_BT` carries a gradient."""

    logprobs_BT: Tensor
    """Of the policy that is being trained."""
    old_logprobs_BT: Tensor
    """Of the policy that the ratio is measured against; without a pass for it, `logprobs_BT.detach()`."""
    advantages_BT: Tensor
    """A sample's one advantage is repeated over its tokens."""
    mask_BT: Tensor
    """True where the token has a loss."""
    config: AlgoConfig


@dataclass(frozen=True, eq=False)
class PolicyLossOutput:
    """A loss for each token, and what there is to log about it."""

    loss_BT: Tensor
    """0 outside the mask; neither weighted nor averaged."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """(B, T) detached numbers by name, 0 outside the mask; the engine averages them over the masked tokens."""


def clip(inputs: PolicyLossInputs) -> PolicyLossOutput:
    """PPO's clipped loss max(-r A, -clamp(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    arXiv 1707.06347, eq. 7; bounds of their own for each side: arXiv 2503.14476, eq. 8. With `dual_clip` = c > 1 a
    token with a negative advantage loses at most -c A (arXiv 1912.09729). Metrics: ratio, clipped_low and
    clipped_high (1 where the bound took the gradient away), dual_clipped when c is set, approx_kl = r - 1 - log r, an
    estimate of KL(old || policy). ConfigError when 0 < c <= 1, which would turn the loss round.
    """
    config, mask_BT = inputs.config, inputs.mask_BT
    if config.dual_clip != 0.0 and config.dual_clip <= 1.0:
        raise ConfigError(f"algo.dual_clip={config.dual_clip}: needs 0 (off) or a number above 1")
    # Masked before exp: what stands at other tokens may overflow, and inf * 0 in the backward pass is NaN.
    log_ratio_BT = torch.where(mask_BT, inputs.logprobs_BT - inputs.old_logprobs_BT, 0.0)
    advantages_BT = torch.where(mask_BT, inputs.advantages_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    loss_BT = torch.maximum(-ratio_BT * advantages_BT, -ratio_BT.clamp(low, high) * advantages_BT)
    ratios_BT = ratio_BT.detach()
    metrics = {
        "ratio": torch.where(mask_BT, ratios_BT, 0.0),
        "clipped_low": (advantages_BT < 0) & (ratios_BT < low),
        "clipped_high": (advantages_BT > 0) & (ratios_BT > high),
        "approx_kl": ratios_BT - 1.0 - log_ratio_BT.detach(),
    }
    if config.dual_clip:
        bound_BT = -config.dual_clip * advantages_BT
        dual_clipped_BT = (advantages_BT < 0) & (loss_BT.detach() > bound_BT)
        loss_BT = torch.where(dual_clipped_BT, bound_BT, loss_BT)
        metrics["dual_clipped"] = dual_clipped_BT
    return PolicyLossOutput(loss_BT, {name: value_BT.to(loss_BT.dtype) for name, value_BT in metrics.items()})
