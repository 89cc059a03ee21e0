"""Computes the advantages of a batch and the weights of a mini-batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.algo.advantage import AdvantageInputs, whitened
from rlcore.algo.aggregation import row_weights
from rlcore.algo.covariance import SelectionInputs
from rlcore.algo.decoupled import FunctionScores
from rlcore.algo.kl import FixedKl, kl_penalty
from rlcore.algo.probe import checked_advantages, checked_selection
from rlcore.algo.reward_shaping import keeps_loss, length_penalty
from rlcore.algo.token_rewards import sample_rewards, token_rewards
from rlcore.algo.torch_state import unchanged_torch
from rlcore.config import AlgoConfig
from rlcore.errors import CALLED, PluginError, boundary
from rlcore.types import Batch, Bools, Float32s, Metrics

Estimator = Callable[[AdvantageInputs], Tensor]
Selection = Callable[[SelectionInputs], Tensor]


def with_advantages(
    batch: Batch,
    estimator: Estimator,
    per_token: bool,
    algo: AlgoConfig,
    max_tokens: int,
    kl: FixedKl,
    scores: FunctionScores | None = None,
) -> tuple[Batch, Metrics]:
    """The batch with advantages, and metrics. Advantages are per token for a `per_token` estimator and with
    `algo.kl.placement=advantage`, else per row. `scores` are for an estimator that needs those of each function.

    The reward of a sample is the sum of its score, its token scores, the soft length penalty if `algo.overlong` is
    'penalty', and minus the KL penalty if `algo.kl.placement` is 'reward'. With 'advantage' the penalty is subtracted
    from the estimator's advantages, after whitening; a critic's returns do not have it. The KL penalty compares pi_old
    with the reference; pi_old is `old_logprobs` if the batch has them, else the log-probs recorded in sampling.
    Estimators that give one advantage per row see the sum. PluginError for advantages of another shape, or that are not
    finite.
    """
    rewards_B, metrics = torch.from_numpy(_shaped_rewards(batch, algo, max_tokens)), Metrics()
    sample_B, loss_mask_BT = _tensor(batch.sample_B), _tensor(batch.tokens.loss_mask_BT)
    scores_BT = None if batch.token_scores_BT is None else _tensor(batch.token_scores_BT)
    kl_BT, coef, penalty_BT = None, kl.coef, None
    if algo.kl.placement in ("reward", "advantage"):
        of_tokens_BT = torch.where(loss_mask_BT, _kl(batch, algo), 0.0)
        metrics = _kl_metrics(of_tokens_BT, batch, kl)
        kl_BT = of_tokens_BT if algo.kl.placement == "reward" else None
        penalty_BT = coef * of_tokens_BT if algo.kl.placement == "advantage" else None
    values_BT = None if batch.values_BT is None else _tensor(batch.values_BT)
    rewards_BT = token_rewards(rewards_B, sample_B, loss_mask_BT, scores_BT, kl_BT, coef) if per_token else None
    inputs = AdvantageInputs(
        rewards_B=sample_rewards(rewards_B, sample_B, loss_mask_BT, scores_BT, kl_BT, coef),
        group_B=_tensor(batch.group_B),
        sample_B=sample_B,
        lengths_B=_tensor(batch.num_sampled_B),
        loss_mask_BT=loss_mask_BT,
        token_rewards_BT=rewards_BT,
        values_BT=values_BT,
        gamma=algo.gamma,
        lam=algo.lam,
        baseline_B=None if batch.baselines_B is None else _tensor(batch.baselines_B),
        pass_k=algo.pass_k,
        scores_BF=None if scores is None else _tensor(scores.scores_BF),
        weights_F=None if scores is None else _tensor(scores.weights_F),
    )
    who = f"algo.advantage={algo.advantage}"
    with boundary(who, PluginError, CALLED), unchanged_torch(who, this_thread_only=True):
        advantages = checked_advantages(who, estimator(inputs), per_token, loss_mask_BT.shape)
    if per_token and values_BT is not None:
        returns_BT = np.where(loss_mask_BT.numpy(), advantages.numpy() + values_BT.numpy(), np.float32(0.0))
        batch = replace(batch, returns_BT=returns_BT)
        if algo.whiten_advantages:
            advantages = whitened(advantages, loss_mask_BT)
    if penalty_BT is not None:
        rewarded_BT = advantages if per_token else advantages[:, None]
        return replace(batch, advantages_BT=torch.where(loss_mask_BT, rewarded_BT - penalty_BT, 0.0).numpy()), metrics
    if per_token:
        return replace(batch, advantages_BT=advantages.numpy()), metrics
    return replace(batch, advantages_B=advantages.numpy()), metrics


def weigh(minibatch: Batch, algo: AlgoConfig, selection: Selection | None = None) -> Batch:
    """The mini-batch with the weight of each row's token losses; that of truncated samples is 0 under overlong 'mask'.

    With the policy loss's selection, also the tokens that it picks among rows with a weight; with
    `algo.top_entropy_quantile` only among tokens with an advantage, because it leaves the others out of the loss.
    """
    num_loss_tokens_B = minibatch.num_sampled_B
    if algo.overlong == "mask" and minibatch.truncated_B is not None:
        num_loss_tokens_B = np.where(keeps_loss(minibatch.truncated_B, minibatch.sample_B), num_loss_tokens_B, 0)
    weights_B = row_weights(algo.aggregation, num_loss_tokens_B, minibatch.sample_B, algo.aggregation_constant)
    weighed = replace(minibatch, weights_B=weights_B)
    return weighed if selection is None else replace(weighed, selected_BT=_select(weighed, weights_B, selection, algo))


def _select(minibatch: Batch, weights_B: Float32s, selection: Selection, algo: AlgoConfig) -> Bools:
    """(B, T) True at the tokens that the selection picks from the whole mini-batch."""
    tokens = minibatch.tokens
    logprobs_BT = _old_logprobs(minibatch)
    if minibatch.advantages_BT is not None:
        advantages_BT = minibatch.advantages_BT
    elif minibatch.advantages_B is not None:
        advantages_BT = np.broadcast_to(minibatch.advantages_B[:, None], logprobs_BT.shape)
    else:
        raise ValueError("a selection uses advantages, and the mini-batch has none yet")
    mask_BT = tokens.loss_mask_BT & (weights_B > 0)[:, None]
    if algo.top_entropy_quantile < 1.0:
        mask_BT &= advantages_BT != 0
    inputs = SelectionInputs(
        logprobs_BT=_tensor(logprobs_BT),
        advantages_BT=_tensor(advantages_BT),
        mask_BT=_tensor(mask_BT),
        seed=crc32(np.ascontiguousarray(tokens.token_ids_BT).tobytes()),
        config=algo,
    )
    who = f"algo.policy_loss={algo.policy_loss}: its selection"
    with boundary(who, PluginError, CALLED), unchanged_torch(who, this_thread_only=True):
        selected_BT: Bools = checked_selection(who, selection(inputs), inputs.mask_BT).numpy()
    return selected_BT


def _shaped_rewards(batch: Batch, algo: AlgoConfig, max_tokens: int) -> Float32s:
    if algo.overlong != "penalty":
        return batch.rewards_B.copy()
    penalty = algo.overlong_penalty
    return batch.rewards_B + length_penalty(
        batch.num_sampled_B, batch.sample_B, max_tokens, algo.overlong_buffer, penalty
    )


def _kl(batch: Batch, algo: AlgoConfig) -> Tensor:
    if batch.reference_logprobs_BT is None:
        raise RuntimeError("a KL penalty needs the log-probs of the reference role")
    # In an advantage only k1 has the gradient of KL(policy || reference) in expectation.
    estimator = "k1" if algo.kl.placement == "advantage" else algo.kl.estimator
    return kl_penalty(_tensor(_old_logprobs(batch)), _tensor(batch.reference_logprobs_BT), estimator)


def _old_logprobs(batch: Batch) -> Float32s:
    """(B, T) log-probs of pi_old if the batch has them, else those of the sampler."""
    return batch.tokens.rollout_logprobs_BT if batch.old_logprobs_BT is None else batch.old_logprobs_BT


def _kl_metrics(kl_BT: Tensor, batch: Batch, kl: FixedKl) -> Metrics:
    """Mean KL per token and per sample, and the coefficient in use; the controller observes the KL."""
    num_samples = len(np.unique(batch.sample_B))
    total = float(kl_BT.sum(dtype=torch.float64))
    kl.observe(total, num_samples)
    return {
        "policy/kl": total / max(1, int(batch.num_sampled_B.sum())),
        "policy/kl_per_sample": total / max(1, num_samples),
        "policy/kl_coef": kl.coef,
    }


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """A copy as a tensor, because the arrays of a batch are read-only."""
    return torch.from_numpy(array.copy())
