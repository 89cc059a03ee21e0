"""Advantage estimators: how much better than expected a sample, or a token of it, was.

All statistics are over *samples*: the rows (parts) of one sample share its reward and its advantage and count once. A
sample that was dropped is simply not in the inputs, so it changes nobody's advantage but through its absence. Sums run
in float64 and the result has the dtype of `rewards_B`. A row left out of the loss still counts in the statistics.

Shape letters beyond those of `rlcore.types`: S samples, G groups, L as in `rlcore.algo.episodes`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algo.episodes import episodes
from rlcore.algo.token_rewards import token_rewards

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """What an estimator sees. Rows are parts; `sample_B` says which sample a row belongs to, `group_B` which group."""

    rewards_B: Tensor
    """The reward of the row's sample, repeated by its parts; a KL penalty is in it already."""
    group_B: Tensor
    sample_B: Tensor
    lengths_B: Tensor
    """Number of sampled tokens of each row."""
    loss_mask_BT: Tensor | None = None
    """True where the policy sampled the token; estimators that work per token need it."""
    token_rewards_BT: Tensor | None = None
    """The whole reward by token (`rlcore.algo.token_rewards`); None: `rewards_B` on the last token of each sample."""
    values_BT: Tensor | None = None
    """Value of the state before token t is sampled."""
    gamma: float = 1.0
    lam: float = 1.0


def grpo(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the group's mean, over the group's standard deviation plus 1e-6 (arXiv 2402.03300, 4.1.2).

    The standard deviation is the unbiased one (denominator n - 1). Exactly 0 in a group with fewer than two samples or
    with equal rewards.
    """
    groups = _Groups(inputs)
    variance_G = groups.sum(groups.centred_S.square()) / (groups.num_samples_G - 1).clamp(min=1)
    return groups.spread(groups.centred_S / (variance_G.sqrt() + STD_EPSILON)[groups.group_S])


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the group's mean, not divided by anything (arXiv 2503.20783).

    Exactly 0 in a group with fewer than two samples or with equal rewards.
    """
    groups = _Groups(inputs)
    return groups.spread(groups.centred_S)


def rloo(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the mean reward of the *other* samples of the group (arXiv 2402.14740).

    Exactly 0 in a group with fewer than two samples or with equal rewards.
    """
    groups = _Groups(inputs)
    scale_G = groups.num_samples_G / (groups.num_samples_G - 1).clamp(min=1)
    return groups.spread(groups.centred_S * scale_G[groups.group_S])


def reinforce_pp(inputs: AdvantageInputs) -> Tensor:
    """(B, T) discounted reward from token t on, normalised over the whole batch (REINFORCE++, arXiv 2501.03262).

    0 where the policy did not sample. Mean and standard deviation are over all sampled tokens of the batch, the latter
    with denominator N (not N - 1) and 1e-6 added. Exactly 0 when all returns are equal. ValueError without a loss mask.
    """
    if inputs.loss_mask_BT is None:
        raise ValueError("reinforce_pp: needs loss_mask_BT")
    mask_BT = inputs.loss_mask_BT
    returns_BT = _discounted(inputs, mask_BT, torch.zeros_like(mask_BT, dtype=torch.float64), lam=1.0)
    returns_N = returns_BT[mask_BT]
    advantages_BT = torch.zeros_like(returns_BT)
    if len(returns_N) and bool(returns_N.min() < returns_N.max()):
        centred_N = returns_N - returns_N.mean()
        advantages_BT[mask_BT] = centred_N / (centred_N.square().mean().sqrt() + STD_EPSILON)
    return advantages_BT.to(inputs.rewards_B.dtype)


def gae(inputs: AdvantageInputs) -> Tensor:
    """(B, T) generalised advantage estimates (arXiv 1506.02438, eq. 16), 0 where the policy did not sample.

    Time runs over sampled tokens only: across tokens that the policy did not sample (a tool's answer, the prompt of a
    sample's next part) value and advantage carry over, without discount. The value after a sample's last token is 0,
    also when it was truncated. Not normalised, so advantages plus values are the critic's targets. ValueError without
    values or a loss mask.
    """
    if inputs.values_BT is None or inputs.loss_mask_BT is None:
        raise ValueError("gae: needs values_BT and loss_mask_BT")
    advantages_BT = _discounted(inputs, inputs.loss_mask_BT, inputs.values_BT.double(), inputs.lam)
    return advantages_BT.to(inputs.rewards_B.dtype)


class _Groups:
    """Rewards of samples, centred by group; the one place where rows become samples."""

    def __init__(self, inputs: AdvantageInputs) -> None:
        self.dtype = inputs.rewards_B.dtype
        samples, self.sample_B = torch.unique(inputs.sample_B, return_inverse=True)
        rows_B = torch.arange(len(self.sample_B), device=self.sample_B.device)
        first_row_S = rows_B.new_full((len(samples),), len(rows_B))
        first_row_S.scatter_reduce_(0, self.sample_B, rows_B, reduce="amin")
        rewards_S = inputs.rewards_B.double()[first_row_S]
        groups, self.group_S = torch.unique(inputs.group_B[first_row_S], return_inverse=True)
        self.num_groups = len(groups)
        self.num_samples_G = self.sum(torch.ones_like(rewards_S))
        lowest_G, highest_G = (
            rewards_S.new_zeros(self.num_groups).scatter_reduce_(
                0, self.group_S, rewards_S, reduce=reduce, include_self=False
            )
            for reduce in ("amin", "amax")
        )
        # The mean of n equal numbers may differ from them in the last bit: equality is asked, not computed.
        self.equal_G = lowest_G == highest_G
        mean_G = self.sum(rewards_S) / self.num_samples_G
        self.centred_S = rewards_S - mean_G[self.group_S]

    def sum(self, values_S: Tensor) -> Tensor:
        """(G,) sum over the samples of each group."""
        return values_S.new_zeros(self.num_groups).index_add_(0, self.group_S, values_S)

    def spread(self, advantages_S: Tensor) -> Tensor:
        """(B,) the advantage of each row's sample, 0 in groups that say nothing."""
        advantages_S = torch.where(self.equal_G[self.group_S], 0.0, advantages_S)
        return advantages_S[self.sample_B].to(self.dtype)


def _discounted(inputs: AdvantageInputs, mask_BT: Tensor, values_BT: Tensor, lam: float) -> Tensor:
    """(B, T) float64: GAE of the token rewards; with values 0 and lam 1, the discounted reward to go."""
    rewards_BT = inputs.token_rewards_BT
    if rewards_BT is None:
        rewards_BT = token_rewards(inputs.rewards_B, inputs.sample_B, mask_BT)
    tokens = episodes(mask_BT, inputs.sample_B)
    rewards_SL, values_SL = tokens.dense(rewards_BT.double()), tokens.dense(values_BT)
    advantages_SL = torch.zeros_like(rewards_SL)
    next_value_S = next_advantage_S = rewards_SL.new_zeros(len(rewards_SL))
    for step in reversed(range(rewards_SL.shape[1])):
        # After a sample's last token rewards and values are 0, so nothing but zeros is carried into it.
        delta_S = rewards_SL[:, step] + inputs.gamma * next_value_S - values_SL[:, step]
        next_advantage_S = delta_S + inputs.gamma * lam * next_advantage_S
        next_value_S = values_SL[:, step]
        advantages_SL[:, step] = next_advantage_S
    return tokens.spread(advantages_SL)
