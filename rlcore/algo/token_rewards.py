"""Rewards for estimators: one per sample or per token, less the KL penalty if there is one.

With `algo.kl.placement=reward` the reward of a token is r_t - coef * kl_t (arXiv 2203.02155, section 3.5), where kl_t
is `rlcore.algo.kl.kl_penalty` of pi_old and the reference. Everything is masked: tokens that the policy did not sample
carry neither reward nor KL.
"""

import torch
from torch import Tensor

from rlcore.algo.episodes import episodes


def token_rewards(
    rewards_B: Tensor,
    sample_B: Tensor,
    loss_mask_BT: Tensor,
    token_scores_BT: Tensor | None = None,
    kl_BT: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """(B, T) token rewards: the sample's reward on its last sampled token, scores and KL penalty on their tokens.

    In a sample of several segments, the last sampled token of all segments gets the reward, once. A sample without
    sampled tokens has no reward here.
    """
    rewards_BT = _scores(rewards_B, loss_mask_BT, token_scores_BT, kl_BT, kl_coef)
    rows_S, columns_S = episodes(loss_mask_BT.cpu().numpy(), sample_B.cpu().numpy()).last_tokens()
    on_cpu_BT = rewards_BT.cpu().numpy()  # shares the memory of tensors on the CPU
    on_cpu_BT[rows_S, columns_S] += rewards_B.cpu().numpy()[rows_S]
    return torch.from_numpy(on_cpu_BT).to(rewards_BT.device)


def sample_rewards(
    rewards_B: Tensor,
    sample_B: Tensor,
    loss_mask_BT: Tensor,
    token_scores_BT: Tensor | None = None,
    kl_BT: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """(B,) the reward of each row's sample plus the sum of its token scores, less kl_coef times the sum of its KL.

    For estimators that give one advantage per sample. The sums run over the sampled tokens of all segments, so the
    segments of a sample have equal rewards. A sample without sampled tokens keeps its reward.
    """
    if token_scores_BT is None and kl_BT is None:
        return rewards_B + 0.0  # like the sum below: a new tensor, without negative zeros
    scores_BT = _scores(rewards_B, loss_mask_BT, token_scores_BT, kl_BT, kl_coef)
    samples, sample_index_B = torch.unique(sample_B, return_inverse=True)
    total_S = scores_BT.new_zeros(len(samples), dtype=torch.float64)
    total_S.index_add_(0, sample_index_B, scores_BT.sum(1, dtype=torch.float64))
    return (rewards_B.double() + total_S[sample_index_B]).to(rewards_B.dtype)


def _scores(
    rewards_B: Tensor, loss_mask_BT: Tensor, token_scores_BT: Tensor | None, kl_BT: Tensor | None, kl_coef: float
) -> Tensor:
    scores_BT = rewards_B.new_zeros(loss_mask_BT.shape)
    if token_scores_BT is None and kl_BT is None:
        return scores_BT
    if token_scores_BT is not None:
        scores_BT = scores_BT + token_scores_BT
    if kl_BT is not None:
        scores_BT = scores_BT - kl_coef * kl_BT
    # Not a product with the mask: values at tokens that were not sampled may be inf, and inf * 0 is NaN.
    return torch.where(loss_mask_BT, scores_BT, 0.0)
