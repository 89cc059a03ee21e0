"""The sections `reward` and `algo`: the rewards and the algorithm."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.config.options import option

UNDISCOUNTED = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "remax", "reinforce_pp_baseline", "gdpo", "none")
"""The core's estimators that give one advantage per sample, without a discount per token."""
WITHOUT_VALUES = (*UNDISCOUNTED, "reinforce_pp", "turn_rloo")


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One reward function."""

    fn: str = "???"
    """file.py:name, module:name, an entry point of the group rlcore.rewards, or a plugin's offer."""
    weight: float = 1.0
    """Factor of its score in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the function, of the class's constructor, or of a call that returns the function."""
    scope: Literal["declared", "sample", "group", "batch"] = "declared"
    """The samples that a call gets; declared: the scope of its offer, or sample."""
    isolation: Literal["main", "threads"] = "main"
    """For sync functions. main: one call at a time on a child's main thread; threads: many calls per child, for I/O."""
    threads: int = option(64, used_when="isolation == 'threads'", at_least=1)
    """Calls at a time in one child."""
    children: int = option(2, at_least=1)
    """Child processes."""
    concurrency: int = option(4096, at_least=1)
    """Calls of an async function at a time; it runs on the run's event loop, without children or threads."""
    deadline_s: float = option(60.0, above=0)
    """Seconds a call may take, its retries included."""
    start_s: float = option(120.0, above=0)
    """Seconds that importing the function and setting it up may take."""
    memory_gib: float = option(0.0, at_least=0)
    """Limit of a child's private memory; 0: none. A call beyond it is a failed sample. Not for async functions."""
    env: tuple[str, ...] = ()
    """Environment variables that its children get, such as OPENAI_API_KEY, in addition to basic ones such as PATH and
    HOME."""
    post_process: str = ""
    """A function, named like `fn`, that transforms the scores of a group; empty: none."""
    log_calls: bool = False
    """Keep every call in the run directory, in reward_calls.jsonl: query, response, score, latency."""
    on_failure: Literal["retry", "drop_sample", "drop_group", "value", "abort"] = "drop_sample"
    """The policy for samples without a score: docs/rewards.md."""
    tries: int = option(3, used_when="on_failure == 'retry'", at_least=1)
    """The most calls within the deadline; a sample that still fails is dropped."""
    failure_value: float = option(0.0, used_when="on_failure == 'value'")
    """The score of a failed call."""


@dataclass(frozen=True)
class RewardConfig:
    """Rewards, and the policy for failures."""

    manager: str = "functions"
    """The reward manager, by name."""
    functions: dict[str, RewardFunctionConfig] = field(default_factory=dict)
    """Named reward functions; a sample's reward is their weighted sum."""
    error_budget_frac: float = option(0.1, at_least=0, at_most=1)
    """The run stops when more than this share of a step's samples failed."""
    canary: str = ""
    """A response that must score well, with {answer} in it; empty: no check at start."""
    canary_min: float = option(0.5, used_when="canary != ''")
    """The least score of the canary."""


@dataclass(frozen=True)
class KlConfig:
    """A KL term against the reference policy."""

    placement: Literal["none", "loss", "reward", "advantage"] = "none"
    """The place of the term: none (no reference is loaded), in the loss, subtracted from each token's reward, or from
    each token's advantage. The last is on-policy distillation with the reference as the teacher."""
    estimator: Literal["k1", "k2", "k3"] = option("k3", used_when="placement in ('loss', 'reward')")
    """http://joschu.net/blog/kl-approx.html"""
    unbiased: bool = option(False, used_when="placement == 'loss'")
    """Multiply the term by pi / pi_old (arXiv 2512.02556): with k1 and k3 its gradient is then that of the
    divergence."""
    coef: float = option(0.001, used_when="placement != 'none'", at_least=0)
    """Factor of the term; the first value of the adaptive controller."""
    controller: Literal["fixed", "adaptive"] = option("fixed", used_when="placement == 'reward'")
    """adaptive: Ziegler et al., arXiv 1909.08593, section 2.2."""
    target: float = option(6.0, used_when="controller == 'adaptive'", above=0)
    """Target of the adaptive controller: KL in nats per sample."""
    horizon: int = option(10000, used_when="controller == 'adaptive'", at_least=1)
    """Samples over which the controller adapts."""


@dataclass(frozen=True)
class ImportanceConfig:
    """Correction of the difference between sampler (mu) and trainer (pi_old): docs/algorithms.md."""

    correction: Literal["truncate", "mask", "none"] = "truncate"
    """The loss is multiplied by rho = pi_old / mu. truncate: by cap at most; mask: by 0 outside floor to cap."""
    level: Literal["token", "sequence"] = option("token", used_when="correction != 'none'")
    """token: rho of each token; sequence: the product over the response."""
    cap: float = option(2.0, used_when="correction != 'none'", at_least=1)
    """The largest rho."""
    floor: float = option(0.0, used_when="correction == 'mask'", at_least=0, at_most=1)
    """The smallest rho."""


@dataclass(frozen=True)
class AlgoConfig:
    """The algorithm. A preset sets defaults below files and overrides."""

    preset: Literal[
        "none",
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "ppo",
        "rloo",
        "remax",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gdpo",
        "distillation",
    ] = "grpo"
    """Sets advantage, policy_loss, aggregation, clipping and KL together: docs/algorithms.md."""
    advantage: str = "grpo"
    """The advantage estimator, by name."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the estimator, such as one of a plugin."""
    policy_loss: str = "clip"
    """The policy loss, by name."""
    policy_loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the policy loss, such as one of a plugin."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_constant"] = "token_mean"
    """Aggregation of token losses to the loss of a mini-batch."""
    aggregation_constant: float = option(1024.0, used_when="aggregation == 'token_sum_constant'", above=0)
    """Tokens per sample that the sum is divided by."""
    clip_low: float = option(0.2, used_when="policy_loss not in ('sapo', 'gpg', 'kl_cov')", at_least=0, at_most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = option(0.28, used_when="policy_loss not in ('sapo', 'gpg', 'kl_cov')", at_least=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = option(
        0.0, used_when="policy_loss not in ('cispo', 'sapo', 'gpg', 'gmpo', 'kl_cov')", at_least=0
    )
    """Bound c of the dual clip for negative advantages (arXiv 1912.09729); 0: off."""
    sapo_tau_positive: float = option(1.0, used_when="policy_loss == 'sapo'", above=0)
    """Rate at which the gate of tokens with A > 0 closes."""
    sapo_tau_negative: float = option(1.05, used_when="policy_loss == 'sapo'", above=0)
    """Rate at which the gate of tokens with A <= 0 closes."""
    clip_cov_frac: float = option(2e-4, used_when="policy_loss == 'clip_cov'", above=0, at_most=1)
    """Share of a mini-batch's tokens that lose their gradient."""
    clip_cov_low: float = option(1.0, used_when="policy_loss == 'clip_cov'")
    """They are drawn from tokens whose covariance of log-prob and advantage is above this bound."""
    clip_cov_high: float = option(5.0, used_when="policy_loss == 'clip_cov'")
    """They are drawn from tokens whose covariance is below this bound."""
    kl_cov_frac: float = option(2e-3, used_when="policy_loss == 'kl_cov'", above=0, at_most=1)
    """Share of a mini-batch's tokens, those with the highest covariances, that get a KL penalty."""
    kl_cov_coef: float = option(1.0, used_when="policy_loss == 'kl_cov'", at_least=0)
    """Factor of that penalty."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Correction for tokens that were sampled from a policy other than the trainer's."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus in the loss; 0: off."""
    gamma: float = option(1.0, used_when=f"advantage not in {UNDISCOUNTED}", at_least=0, at_most=1)
    """Discount per token; with turn_rloo, per turn."""
    lam: float = option(1.0, used_when=f"advantage not in {WITHOUT_VALUES}", at_least=0, at_most=1)
    """GAE's lambda, for estimators that use values."""
    whiten_advantages: bool = option(False, used_when="critic.engine != 'none'")
    """Shift and scale a step's (streamed: a mini-batch's) token advantages to mean 0, deviation 1; not the targets."""
    pass_k: int = option(4, used_when="advantage == 'pass_at_k'", at_least=1)
    """k of the estimator pass_at_k, less than `rollout.samples_per_prompt`."""
    kl: KlConfig = field(default_factory=KlConfig)
    """A KL term against the reference policy."""
    overlong: Literal["none", "mask", "penalty"] = "none"
    """Truncated responses. mask: left out of the loss; penalty: soft length penalty (DAPO, arXiv 2503.14476)."""
    overlong_buffer: int = option(64, used_when="overlong == 'penalty'", at_least=1)
    """Tokens before max_tokens over which the penalty grows from 0 to its full size."""
    overlong_penalty: float = option(1.0, used_when="overlong == 'penalty'", at_least=0)
    """The full penalty, subtracted from the reward."""
    top_entropy_quantile: float = option(1.0, above=0, at_most=1)
    """Share of a step's (streamed: a mini-batch's) tokens, those of the highest entropy, that the policy loss trains
    (arXiv 2506.01939); 1: all."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal (arXiv 2503.14476); for estimators that compare the samples of a
    group."""
    max_resample_rounds: int = option(3, used_when="dynamic_sampling == True", at_least=1)
    """The most rounds of replacement per step."""
    equal_rewards_warn_steps: int = option(3, at_least=1)
    """Warn after this many steps in which every group's rewards were equal."""
