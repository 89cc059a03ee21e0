"""Corrections for tokens that were sampled from another policy (mu) than the one the step starts from (pi_old).

The loss compares pi with pi_old. Multiplied by the detached ratio pi_old / mu, it estimates the loss over tokens of
pi_old. Ratios far from 1 make that estimate useless, so they are truncated (truncated importance sampling, arXiv
1802.01561, section 4.1) or masked (masked importance sampling, arXiv 2510.18855). The split of pi / mu into two factors
follows arXiv 2110.00641.
"""

import torch
from torch import Tensor

from rlcore.config import ImportanceConfig, RunConfig

LARGEST = 20.0
"""Largest logarithm of a ratio. It is far above any cap, and keeps means of the metrics finite."""


def sampler_differs(config: RunConfig) -> bool:
    """True if the loss has the factor pi_old / mu: mu is another engine, older weights, half precision, or truncated.

    The embedded sampler uses the weights that are trained. In half precision and TF32, decoding rounds differently from
    a whole pass, so the recorded log-probs differ from those of the trainer. Under `schedule.old_logprobs` 'behaviour'
    pi_old is mu itself, and the policy loss alone measures how far the policy has moved. With
    `rollout.allow_truncation` mu is the policy divided by the mass that was kept, and the factor is that mass.
    """
    elsewhere = config.rollout.backend != config.actor.backend
    differs = (
        elsewhere or config.schedule.max_staleness > 0 or config.rollout.truncates or not config.actor.repeats_logprobs
    )
    return differs and config.schedule.old_logprobs == "recompute"


def importance_factor(
    old_logprobs_BT: Tensor, rollout_logprobs_BT: Tensor, mask_BT: Tensor, config: ImportanceConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """(B, T) factor of each token's policy loss, and metrics; both 0 outside the mask, without gradient.

    With rho = pi_old / mu of a token, or under level 'sequence' their product over the row's loss tokens:
    truncate: min(rho, cap); mask: rho where floor <= rho <= cap, else 0; none: 1. A masked token still counts in the
    loss's denominator. Each segment (row) of a sample is a sequence. Metrics: importance (rho),
    importance_max, importance_capped_frac (1 where a bound changed rho; none has no bounds).
    """
    log_rho_BT = torch.where(mask_BT, old_logprobs_BT.detach() - rollout_logprobs_BT, 0.0)
    if config.level == "sequence":
        log_rho_BT = log_rho_BT.sum(1, keepdim=True).expand_as(log_rho_BT)
    rho_BT = log_rho_BT.clamp(max=LARGEST).exp()
    if config.correction == "none":
        factor_BT = torch.ones_like(rho_BT)
    elif config.correction == "truncate":
        factor_BT = rho_BT.clamp(max=config.cap)
    else:
        factor_BT = torch.where((rho_BT >= config.floor) & (rho_BT <= config.cap), rho_BT, 0.0)
    changed_BT = torch.zeros_like(rho_BT) if config.correction == "none" else (factor_BT != rho_BT).to(rho_BT.dtype)
    metrics = {"importance_mean": rho_BT, "importance_max": rho_BT, "importance_capped_frac": changed_BT}
    return (
        torch.where(mask_BT, factor_BT, 0.0),
        {name: torch.where(mask_BT, value_BT, 0.0) for name, value_BT in metrics.items()},
    )
