"""The presets of `algo.preset`: dotted defaults of the `algo` section, below plugins' defaults, files and overrides.

Every preset but `distillation` leaves the KL term off and loads no reference model; verifiable rewards do not need
one. `algo.kl.placement` turns it on. The comments name the papers that have a KL term.
"""

from collections.abc import Mapping
from typing import Any

_CLIP = {"policy_loss": "clip", "clip_low": 0.2, "clip_high": 0.2, "kl.placement": "none"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Sets nothing: the defaults of the fields apply.
    "none": {},
    # arXiv 2402.03300 with current practice: token-mean, a wider upper clip, no KL (the paper: k3 in the loss).
    "grpo": {**_CLIP, "advantage": "grpo", "aggregation": "token_mean", "clip_high": 0.28},
    # arXiv 2503.20783: no division by the group's standard deviation nor by each sample's own length.
    "dr_grpo": {
        **_CLIP,
        "advantage": "dr_grpo",
        "aggregation": "token_sum_constant",
        "aggregation_constant": "${rollout.max_tokens}",
    },
    # arXiv 2503.14476: clip-higher, token-mean, dynamic sampling, soft overlong penalty, no KL.
    "dapo": {
        **_CLIP,
        "advantage": "grpo",
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong": "penalty",
    },
    # arXiv 2507.18071: a ratio and a bound per sequence; the bounds of its section 5.1.
    "gspo": {
        **_CLIP,
        "policy_loss": "gspo",
        "advantage": "grpo",
        "aggregation": "seq_mean_token_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # arXiv 2506.13585, which sets no lower bound and does not say its upper one: 5 is arXiv 2510.13786's.
    "cispo": {
        **_CLIP,
        "policy_loss": "cispo",
        "advantage": "grpo",
        "aggregation": "token_mean",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
    # arXiv 1707.06347; gamma and lambda as for language models (arXiv 2203.02155, which has k1 in the reward).
    "ppo": {
        **_CLIP,
        "advantage": "gae",
        "aggregation": "token_mean",
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_advantages": True,
    },
    # arXiv 2402.14740: the whole response is one action, so its log-probs are summed (the paper: k1 in the reward).
    "rloo": {**_CLIP, "advantage": "rloo", "aggregation": "seq_mean_token_sum"},
    # arXiv 2310.10505: the baseline is a greedy sample's reward, the response one action.
    "remax": {**_CLIP, "advantage": "remax", "aggregation": "seq_mean_token_sum"},
    # arXiv 2501.03262: advantages normalised over the batch (the paper: k1 in the reward).
    "reinforce_pp": {**_CLIP, "advantage": "reinforce_pp", "aggregation": "token_mean", "gamma": 1.0},
    # arXiv 2501.03262: the group's mean is the baseline, the batch gives the scale (the paper: k2 in the loss).
    "reinforce_pp_baseline": {**_CLIP, "advantage": "reinforce_pp_baseline", "aggregation": "token_mean"},
    # arXiv 2601.05242: each reward function's scores are normalised, then summed.
    "gdpo": {**_CLIP, "advantage": "gdpo", "aggregation": "token_mean"},
    # arXiv 2306.13649, reverse KL on the student's samples, as a policy gradient without discount: the reference is the
    # teacher, and rewards are only logged.
    "distillation": {
        **_CLIP,
        "advantage": "none",
        "aggregation": "token_mean",
        "kl.placement": "advantage",
        "kl.coef": 1.0,
    },
}
"""Keys are relative to `algo`."""
