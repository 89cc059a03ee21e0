"""Advantage estimators: an advantage says how much better a sample, or one of its tokens, was than expected.

All statistics are over *samples*: the rows (segments) of one sample share its reward and its advantage and count once.
A sample that was dropped is not in the inputs and affects other advantages only by its absence. Sums run in float64
and the result has the dtype of `rewards_B`. A row left out of the loss still counts in the statistics. A number that
is not finite is never equal to another: whatever is compared with it becomes NaN.

Shape letters beyond those of `rlcore.types`: S samples, G groups, L as in `rlcore.algo.episodes`.
"""

import math
from dataclasses import dataclass
from math import comb

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlcore.algo.episodes import episodes
from rlcore.algo.token_rewards import token_rewards

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The inputs of an estimator. Rows are segments; `sample_B` is the sample of a row, `group_B` its group."""

    rewards_B: Tensor
    """The reward of the row's sample, the same in each of its segments; includes the KL penalty, if there is one."""
    group_B: Tensor
    sample_B: Tensor
    lengths_B: Tensor
    """Number of sampled tokens of each row."""
    loss_mask_BT: Tensor | None = None
    """True where the policy sampled the token. Estimators that work per token need it."""
    token_rewards_BT: Tensor | None = None
    """The whole reward, per token (`rlcore.algo.token_rewards`). None: `rewards_B` on the last token of each sample."""
    values_BT: Tensor | None = None
    """Value of the state before token t is sampled."""
    gamma: float = 1.0
    lam: float = 1.0
    baseline_B: Tensor | None = None
    """The reward of a greedy sample of the row's prompt, for estimators that need one."""
    pass_k: int = 1
    """k of pass@k."""
    scores_BF: Tensor | None = None
    """The unweighted score of each reward function, for estimators that need them; NaN where a function skipped the
    sample."""
    weights_F: Tensor | None = None
    """The weights of the functions: `rewards_B` is the weighted sum of their scores."""


def none(inputs: AdvantageInputs) -> Tensor:
    """(B,) 0: the reward teaches nothing. For runs that learn from a KL term alone (`algo.kl.placement=advantage`)."""
    return inputs.rewards_B * 0.0 + 0.0  # NaN of a reward that is not finite, and no negative zero


def grpo(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the group's mean, divided by the group's standard deviation plus 1e-6 (arXiv 2402.03300, 4.1.2).

    The standard deviation is the unbiased one (denominator n - 1). Exactly 0 in a group with fewer than two samples or
    with equal rewards.
    """
    groups = _Groups(inputs)
    variance_G = groups.sum(groups.centred_S.square()) / (groups.num_samples_G - 1).clamp(min=1)
    return groups.spread(groups.centred_S / (variance_G.sqrt() + STD_EPSILON)[groups.group_S])


def dr_grpo(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the group's mean, without a divisor (arXiv 2503.20783).

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


def opo(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the mean reward of the group, weighted by length (OPO, arXiv 2505.23585).

    The length of a sample is the number of sampled tokens in all its segments. Exactly 0 in a group with fewer than two
    samples or with equal rewards.
    """
    groups = _Groups(inputs)
    lengths_S = groups.sum_segments(inputs.lengths_B)
    baseline_G = groups.sum(lengths_S * groups.centred_S) / groups.sum(lengths_S).clamp(min=1.0)
    return groups.spread(groups.centred_S - baseline_G[groups.group_S])


def gpg(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the group's mean, times (samples of the batch / samples of groups whose rewards differ).

    GPG, arXiv 2504.02546. Groups of equal rewards have no gradient but count in the loss's denominator; the factor
    corrects for them. Exactly 0 in a group with fewer than two samples or with equal rewards.
    """
    groups = _Groups(inputs)
    num_useful = torch.where(groups.equal_G, 0.0, groups.num_samples_G).sum()
    return groups.spread(groups.centred_S * groups.num_samples_G.sum() / num_useful.clamp(min=1.0))


def pass_at_k(inputs: AdvantageInputs) -> Tensor:
    """(B,) contribution of a sample to pass@k.

    Let X be the best reward of a set of k samples drawn from the group. The advantage is the mean of X over the sets
    that hold the sample, less its mean over all sets, divided by its standard deviation over all sets. For rewards 0
    and 1 this is the analytic form of arXiv 2508.10751; taking the best of k extends it to any reward. k is at most the
    group's size less 1, so a group that lost a sample can still be compared. Exactly 0 in a group with fewer than two
    samples, with equal rewards, or in which every set has the same best reward.
    """
    groups = _Groups(inputs)
    advantages_S = torch.zeros_like(groups.centred_S)
    for group in range(groups.num_groups):
        members_N = (groups.group_S == group).nonzero()[:, 0]
        if len(members_N) > 1:
            k = min(inputs.pass_k, len(members_N) - 1)
            advantages_S[members_N] = _best_of_k(groups.rewards_S[members_N], k)
    return groups.spread(advantages_S)


def turn_rloo(inputs: AdvantageInputs) -> Tensor:
    """(B, T) reward from a turn on, less its mean over the *other* samples of the group at that turn.

    RLOO (arXiv 2402.14740) for each turn. A turn is a run of tokens that the policy sampled; all its tokens have its
    advantage, and 0 is where the policy did not sample. `gamma` discounts once per turn. The mean is over the samples
    that reached the turn; where no other did, it is that of the last turn that another reached. It does not depend on
    the sample itself, so the gradient has no bias when the policy decides how many turns it takes. A baseline that sums
    the means of immediate rewards has one term per turn taken, which biases that decision (verl#7244). With one turn
    per sample it is `rloo`. Exactly 0 in a group with fewer than two samples, and at a turn from which all rewards of
    the group are equal. ValueError without a loss mask.
    """
    if inputs.loss_mask_BT is None:
        raise ValueError("turn_rloo: needs loss_mask_BT")
    groups = _Groups(inputs)
    tokens = episodes(inputs.loss_mask_BT.cpu().numpy(), inputs.sample_B.cpu().numpy())
    turn_N, sample_N = tokens.turn_N(), groups.sample_B.cpu().numpy()[tokens.rows_N]
    rewards_N = _token_rewards(inputs, inputs.loss_mask_BT).double().cpu().numpy()[tokens.rows_N, tokens.columns_N]
    returns_SK = np.zeros((len(groups.group_S), int(turn_N.max(initial=0)) + 1))
    np.add.at(returns_SK, (sample_N, turn_N), rewards_N)
    reached_SK = np.zeros(returns_SK.shape, dtype=np.bool_)
    reached_SK[sample_N, turn_N] = True
    silent_S = ~reached_SK[:, 0]  # no sampled token: compared as a single turn
    reached_SK[silent_S, 0], returns_SK[silent_S, 0] = True, groups.rewards_S.cpu().numpy()[silent_S]
    for turn in reversed(range(returns_SK.shape[1] - 1)):
        returns_SK[:, turn] += inputs.gamma * returns_SK[:, turn + 1]
    with np.errstate(invalid="ignore"):  # infinity less infinity
        advantages_SK = returns_SK - _others_mean(returns_SK, reached_SK, groups.group_S.cpu().numpy())
    advantages_BT = np.zeros(tokens.shape)
    advantages_BT[tokens.rows_N, tokens.columns_N] = advantages_SK[sample_N, turn_N]
    return torch.from_numpy(advantages_BT).to(inputs.rewards_B)


def remax(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the reward of a greedy sample of the same prompt (ReMax, arXiv 2310.10505).

    Samples of a group are not compared with each other, so a group may be a single sample. ValueError without
    baselines.
    """
    if inputs.baseline_B is None:
        raise ValueError("remax: needs baseline_B, the rewards of greedy samples")
    return (inputs.rewards_B.double() - inputs.baseline_B.double()).to(inputs.rewards_B.dtype)


def reinforce_pp_baseline(inputs: AdvantageInputs) -> Tensor:
    """(B,) reward less the group's mean, normalised over the batch (REINFORCE++-baseline, arXiv 2501.03262).

    Mean and standard deviation are over all sampled tokens of the batch, so each sample is weighted by its number of
    tokens. The standard deviation has denominator N (not N - 1) and 1e-6 added. Exactly 0 when all rewards less their
    means are equal.
    """
    groups = _Groups(inputs)
    centred_S = torch.where(groups.equal_G[groups.group_S], 0.0, groups.centred_S)
    lengths_S = groups.sum_segments(inputs.lengths_B)
    counted_S = centred_S[lengths_S > 0]
    if not len(counted_S) or _equal(float(counted_S.min()), float(counted_S.max())):
        return torch.zeros_like(inputs.rewards_B)
    mean = (lengths_S * centred_S).sum() / lengths_S.sum()
    variance = (lengths_S * (centred_S - mean).square()).sum() / lengths_S.sum()
    advantages_S = (centred_S - mean) / (variance.sqrt() + STD_EPSILON)
    return advantages_S[groups.sample_B].to(groups.dtype)


def reinforce_pp(inputs: AdvantageInputs) -> Tensor:
    """(B, T) discounted reward from token t on, normalised over the whole batch (REINFORCE++, arXiv 2501.03262).

    0 where the policy did not sample. Mean and standard deviation are over all sampled tokens of the batch. The
    standard deviation has denominator N (not N - 1) and 1e-6 added. Exactly 0 when all returns are equal. ValueError
    without a loss mask.
    """
    if inputs.loss_mask_BT is None:
        raise ValueError("reinforce_pp: needs loss_mask_BT")
    mask_BT = inputs.loss_mask_BT
    returns_BT = _discounted(inputs, mask_BT, torch.zeros_like(mask_BT, dtype=torch.float64), lam=1.0)
    returns_N = returns_BT[mask_BT]
    advantages_BT = torch.zeros_like(returns_BT)
    if len(returns_N) and not _equal(float(returns_N.min()), float(returns_N.max())):
        centred_N = returns_N - returns_N.mean()
        advantages_BT[mask_BT] = centred_N / (centred_N.square().mean().sqrt() + STD_EPSILON)
    return advantages_BT.to(inputs.rewards_B.dtype)


def gae(inputs: AdvantageInputs) -> Tensor:
    """(B, T) generalised advantage estimates (arXiv 1506.02438, eq. 16), 0 where the policy did not sample.

    Time counts sampled tokens only. Value and advantage carry over, without discount, across tokens that the policy did
    not sample: a tool's answer, the prompt of a sample's next segment. The value after a sample's last token is 0, even
    if the sample was truncated. Not normalised: advantages plus values are the critic's targets. ValueError without
    values or a loss mask.
    """
    if inputs.values_BT is None or inputs.loss_mask_BT is None:
        raise ValueError("gae: needs values_BT and loss_mask_BT")
    advantages_BT = _discounted(inputs, inputs.loss_mask_BT, inputs.values_BT, inputs.lam)
    return advantages_BT.to(inputs.rewards_B.dtype)


def whitened(advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, T) advantages less their mean, divided by their standard deviation plus 1e-6; 0 outside the mask.

    Mean and standard deviation are over the masked tokens of the given batch: that of the step, or of a streamed
    mini-batch. The standard deviation has denominator N. Exactly 0 when all are equal, NaN when one is not finite. The
    critic's targets use the advantages before whitening.
    """
    on_cpu_BT, mask_on_cpu_BT = advantages_BT.cpu().numpy(), mask_BT.cpu().numpy()
    chosen_N = on_cpu_BT[mask_on_cpu_BT].astype(np.float64)
    whitened_BT = np.zeros_like(on_cpu_BT)
    if len(chosen_N) and not _equal(chosen_N.min(), chosen_N.max()):
        with np.errstate(invalid="ignore"):  # infinity less infinity
            centred_N = chosen_N - _mean(chosen_N)
            whitened_BT[mask_on_cpu_BT] = centred_N / (math.sqrt(_mean(centred_N * centred_N)) + STD_EPSILON)
    return torch.from_numpy(whitened_BT).to(advantages_BT.device)


def _equal(lowest: float, highest: float) -> bool:
    """True if both are the same finite number: NaN differs from itself, and infinity less itself is NaN."""
    return bool(lowest == highest) and math.isfinite(lowest)


def _mean(values_N: npt.NDArray[np.float64]) -> float:
    """The mean as torch computes it: numpy sums in another order."""
    return float(torch.from_numpy(values_N).mean())


class _Groups:
    """Rewards of samples, centred by group. Only this class turns rows into samples."""

    def __init__(self, inputs: AdvantageInputs) -> None:
        self.dtype = inputs.rewards_B.dtype
        samples, self.sample_B = torch.unique(inputs.sample_B, return_inverse=True)
        rows_B = torch.arange(len(self.sample_B), device=self.sample_B.device)
        first_row_S = rows_B.new_full((len(samples),), len(rows_B))
        first_row_S.scatter_reduce_(0, self.sample_B, rows_B, reduce="amin")
        rewards_S = self.rewards_S = inputs.rewards_B.double()[first_row_S]
        groups, self.group_S = torch.unique(inputs.group_B[first_row_S], return_inverse=True)
        self.num_groups = len(groups)
        self.num_samples_G = self.sum(torch.ones_like(rewards_S))
        lowest_G, highest_G = (
            rewards_S.new_zeros(self.num_groups).scatter_reduce_(
                0, self.group_S, rewards_S, reduce=reduce, include_self=False
            )
            for reduce in ("amin", "amax")
        )
        # The mean of n equal numbers may differ from them in the last bit, so the rewards themselves are compared.
        self.equal_G = (lowest_G == highest_G) & lowest_G.isfinite()
        mean_G = self.sum(rewards_S) / self.num_samples_G
        self.centred_S = rewards_S - mean_G[self.group_S]

    def sum(self, values_S: Tensor) -> Tensor:
        """(G,) sum over the samples of each group."""
        return values_S.new_zeros(self.num_groups).index_add_(0, self.group_S, values_S)

    def sum_segments(self, counts_B: Tensor) -> Tensor:
        """(S,) float64 sum over the rows of each sample."""
        return self.centred_S.new_zeros(len(self.centred_S)).index_add_(0, self.sample_B, counts_B.double())

    def spread(self, advantages_S: Tensor) -> Tensor:
        """(B,) the advantage of each row's sample, 0 in groups of equal rewards."""
        advantages_S = torch.where(self.equal_G[self.group_S], 0.0, advantages_S)
        return advantages_S[self.sample_B].to(self.dtype)


def _best_of_k(rewards_N: Tensor, k: int) -> Tensor:
    """(N,) rise of the expected best of k rewards in sets that hold sample i, in standard deviations of the best."""
    sorted_N, order_N = rewards_N.sort()
    num, ordered = len(sorted_N), sorted_N.tolist()
    if _equal(ordered[k - 1], ordered[-1]):  # the worst set's best is the best of all
        return torch.zeros_like(rewards_N)
    # In ascending order, sample i is the best of comb(i, k - 1) sets.
    chances = [comb(i, k - 1) / comb(num, k) for i in range(num)]
    mean = math.fsum(chance * reward for chance, reward in zip(chances, ordered, strict=True))
    spread = math.sqrt(math.fsum(c * (r - mean) ** 2 for c, r in zip(chances, ordered, strict=True)))
    sets = comb(num - 1, k - 1)
    with_sample = [
        math.fsum((comb(i, k - 1) * ordered[i], *(comb(j - 1, k - 2) * ordered[j] for j in range(i + 1, num) if k > 1)))
        / sets
        for i in range(num)
    ]
    advantages_N = torch.empty_like(rewards_N)
    advantages_N[order_N] = (rewards_N.new_tensor(with_sample) - mean) / spread
    return advantages_N


def _others_mean(
    returns_SK: npt.NDArray[np.float64], reached_SK: npt.NDArray[np.bool_], group_S: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """(S, K) mean return at turn k of the group's other samples that reached it, else that of an earlier turn.

    The sample's return itself in a group of one sample.
    """
    means_SK = np.empty_like(returns_SK)
    for group in np.unique(group_S):
        members_N = (group_S == group).nonzero()[0]
        returns_NK, reached_NK = returns_SK[members_N], reached_SK[members_N]
        others_NK = reached_NK.sum(0) - reached_NK
        total_K = np.where(reached_NK, returns_NK, 0.0).sum(0)
        mean_NK = (total_K - np.where(reached_NK, returns_NK, 0.0)) / np.maximum(others_NK, 1)
        lowest_K = np.where(reached_NK, returns_NK, np.inf).min(0)
        equal_K = lowest_K == np.where(reached_NK, returns_NK, -np.inf).max(0)
        mean_NK = np.where(equal_K, lowest_K, mean_NK)  # of equal numbers a mean may differ in the last bit
        for turn in range(1, mean_NK.shape[1]):
            mean_NK[:, turn] = np.where(others_NK[:, turn] > 0, mean_NK[:, turn], mean_NK[:, turn - 1])
        means_SK[members_N] = mean_NK if len(members_N) > 1 else returns_NK
    return means_SK


def _token_rewards(inputs: AdvantageInputs, mask_BT: Tensor) -> Tensor:
    """(B, T) the whole reward, per token."""
    if inputs.token_rewards_BT is not None:
        return inputs.token_rewards_BT
    return token_rewards(inputs.rewards_B, inputs.sample_B, mask_BT)


def _discounted(inputs: AdvantageInputs, mask_BT: Tensor, values_BT: Tensor, lam: float) -> Tensor:
    """(B, T) float64: GAE of the token rewards; with values 0 and lam 1, the discounted reward to go."""
    rewards_BT = _token_rewards(inputs, mask_BT)
    tokens = episodes(mask_BT.cpu().numpy(), inputs.sample_B.cpu().numpy())
    advantages_LS, values_LS = tokens.dense(rewards_BT.cpu().numpy()), tokens.dense(values_BT.cpu().numpy())
    # Rewards and values after a sample's last token are 0, so only zeros are carried into that token.
    advantages_LS[:-1] += inputs.gamma * values_LS[1:]
    advantages_LS -= values_LS
    decay = inputs.gamma * lam
    for step in reversed(range(len(advantages_LS) - 1)):
        advantages_LS[step] += decay * advantages_LS[step + 1]
    return torch.from_numpy(tokens.spread(advantages_LS)).to(mask_BT.device)
