"""Rules about gradients, updates, and the policy that they make."""

from rlcore_view.history import Finding, History
from rlcore_view.reward_rules import HALF, cut_off
from rlcore_view.step_facts import StepFacts

COLLAPSED_ENTROPY, COLLAPSED_LENGTH = 0.05, 0.1
"""Bounds relative to the value at the beginning of the run."""
FAR_KL = 3.0
"""Nats per token from the reference."""
DRIFT = 0.1
"""Nats per token between sampler and trainer; baseline: the first step, which samples with the actor's own weights."""
MISTAKEN = 0.3
"""The same, where sampler and trainer are one backend in half precision, which differs by less than 0.1. In float32 the
difference is 1e-5, so any that is worth a warning is a mistake."""
FAR_RATIO = 100.0
MOST_CLIPPED = 0.75
"""Share of the tokens over all updates of a step; the first update clips nothing."""
CLIPPED_TO = 0.01
"""Share of its gradient that a clipped update keeps."""
SMALL_WEIGHT = 0.02
"""A typical magnitude of a weight, to judge how much of an update survives rounding to half precision."""
HALF_BITS = {"bfloat16": 8, "float16": 11}


def no_gradient(history: History) -> Finding | None:
    if not history.steady(lambda facts: facts.metrics.get("actor/grad_norm") == 0 and facts.taught > 0):
        return None
    return Finding(
        "no gradient",
        f"actor/grad_norm is 0, though {history.now.taught} of {history.now.trained} advantages are not",
        "look at the loss and its mask",
    )


def clipped_gradient(history: History) -> Finding | None:
    limit = history.number("actor.max_grad_norm", 0.0)
    if not limit or not history.above("actor/grad_norm", limit / CLIPPED_TO):
        return None
    norm = history.now.metrics["actor/grad_norm"]
    return Finding(
        "gradients are clipped to nothing",
        f"actor/grad_norm is {norm:.3g}, of which actor.max_grad_norm={limit:g} keeps {limit / norm:.2%}",
        "raise actor.max_grad_norm, or look for rewards and advantages that are far too large",
    )


def clipped_loss(history: History) -> Finding | None:
    def clipped(facts: StepFacts) -> float:
        return facts.metrics.get("policy/clip_frac_low", 0.0) + facts.metrics.get("policy/clip_frac_high", 0.0)

    if not history.steady(lambda facts: clipped(facts) >= MOST_CLIPPED):
        return None
    return Finding(
        "the loss is clipped to nothing",
        f"{clipped(history.now):.0%} of the tokens have no gradient because their ratio is outside the clip range",
        f"lower {history.named('actor.lr')} or {history.named('actor.epochs')}, or raise algo.clip_high",
    )


def skipped_updates(history: History) -> Finding | None:
    if not history.above("actor/skipped", HALF):
        return None
    share = history.now.metrics["actor/skipped"]
    if history.setting("algo.overlong") == "mask" and cut_off(history.now):
        return Finding(
            "updates are skipped",
            f"{share:.0%} of the updates had nothing to learn from: all responses were cut off, and algo.overlong=mask "
            "leaves those out",
            f"raise {history.named('rollout.max_tokens')}, or choose another algo.overlong",
        )
    if history.now.metrics.get("completion/length_mean") == 0:
        return Finding(
            "updates are skipped",
            f"{share:.0%} of the updates had nothing to learn from: no token is marked as sampled",
            f"look at the loss_mask of rollout.agent={history.setting('rollout.agent')}",
        )
    return Finding(
        "updates are skipped",
        f"{share:.0%} of the updates changed nothing, because their loss or gradient was not finite",
        f"lower {history.named('actor.lr')}, or choose bfloat16 where actor.dtype is float16",
    )


def sampler_differs(history: History) -> Finding | None:
    backends = history.setting("rollout.backend"), history.setting("actor.backend")
    limit = history.number("rollout.warn_logprob_diff", 0.0)
    difference = history.now.metrics.get("policy/rollout_logprob_diff", 0.0)
    if not limit or difference <= limit or _draws_from_a_part(history):
        return None
    if backends[0] == backends[1]:
        return _other_logprobs(history, difference, limit)
    return Finding(
        "sampler and trainer differ",
        f"log-probs of rollout.backend={backends[0]} and of the actor differ by {difference:.3g} per token on average "
        f"(rollout.warn_logprob_diff={limit:g})",
        "the loss corrects for it up to algo.importance.cap; look at the number formats of both",
    )


def _other_logprobs(history: History, difference: float, limit: float) -> Finding | None:
    """One backend computes both, so a difference from the first step on is a mistake of what stands between them."""
    bound = MISTAKEN if history.setting("actor.dtype") in HALF_BITS else limit
    if min(difference, _first_difference(history)) <= bound:
        return None
    return Finding(
        "log-probs are not those of the policy",
        f"log-probs of the trajectories and of the actor differ by {difference:.3g} per token on average",
        "look at token_ids, logprobs and loss_mask (a token too early or too late) of "
        f"rollout.agent={history.setting('rollout.agent')}",
    )


def _draws_from_a_part(history: History) -> bool:
    """Log-probs then differ by the mass of the vocabulary that was cut off."""
    return (
        history.number("rollout.top_p", 1.0) != 1.0
        or history.number("rollout.top_k", 0.0) != 0.0
        or history.number("rollout.min_p", 0.0) != 0.0
    )


def _first_difference(history: History) -> float:
    """The least difference of the first steps, whose samples are those of the actor's own weights."""
    name = "policy/rollout_logprob_diff"
    return min((facts.metrics[name] for facts in history.early if name in facts.metrics), default=float("inf"))


def stale_sampler(history: History) -> Finding | None:
    name = "policy/rollout_logprob_diff"
    late, early = history.late(name), _first_difference(history)
    if history.start(name) is None or late is None or late < DRIFT or late < 5 * early:
        return None
    return Finding(
        "weights do not reach the sampler",
        f"{name} rose from {early:.2g} to {late:.2g} per token: sampler and trainer drift apart",
        "look at the weight sync of rollout.backend, and at the number formats of both engines",
    )


def entropy(history: History) -> Finding | None:
    start, late = history.start("policy/entropy"), history.late("policy/entropy")
    if start is None or late is None or start <= 0 or late > COLLAPSED_ENTROPY * start or not history.gain_lost():
        return None
    return Finding(
        "entropy collapsed",
        f"policy/entropy fell from {start:.2g} to {late:.2g}, and the reward with it",
        f"lower {history.named('actor.lr')}, raise algo.clip_high, or add algo.entropy_coef",
    )


def length(history: History) -> Finding | None:
    start, late = history.start("completion/length_mean"), history.late("completion/length_mean")
    if start is None or late is None or late > COLLAPSED_LENGTH * start or not history.gain_lost():
        return None
    return Finding(
        "responses have become empty",
        f"completion/length_mean fell from {start:.3g} to {late:.3g} tokens, and the reward with it",
        f"look at what the reward gives to short responses, and lower {history.named('actor.lr')}",
    )


def kl(history: History) -> Finding | None:
    if not history.above("policy/kl", FAR_KL):
        return None
    return Finding(
        "the policy left its reference",
        f"policy/kl is {history.now.metrics['policy/kl']:.3g} nats per token",
        f"raise {history.named('algo.kl.coef')} or lower {history.named('actor.lr')}",
    )


def ratio(history: History) -> Finding | None:
    if history.above("policy/ratio_max", FAR_RATIO, 2):
        value = history.now.metrics["policy/ratio_max"]
        return Finding(
            "ratios explode",
            f"policy/ratio_max is {value:.3g}: an update moves the probability of a token that far within a step",
            f"lower {history.named('actor.lr')} or {history.named('actor.epochs')}",
        )
    if history.setting("algo.importance.level") == "sequence" or not history.above(
        "policy/importance_max", FAR_RATIO, 2
    ):
        return None
    value = history.now.metrics["policy/importance_max"]
    return Finding(
        "ratios explode",
        f"policy/importance_max is {value:.3g}: the sampler's probability of a token is that far from the trainer's",
        f"lower {history.named('schedule.max_staleness')}, and look at the number formats of both engines",
    )


def rounded_away(history: History) -> Finding | None:
    dtype, lr = history.setting("actor.dtype"), history.number("actor.lr", 0.0)
    half = half_a_step(dtype)
    if half is None or history.setting("actor.rounding") != "nearest" or lr >= half:
        return None
    start, late = history.start("reward/mean"), history.late("reward/mean")
    if start is None or late is None or late > start:
        return None
    return Finding(
        "rounding keeps the weights where they are",
        f"actor.lr={lr:g} moves a weight of {SMALL_WEIGHT:g} by less than the {half:.1g} that {dtype} rounds away, and "
        f"the reward has not risen in {history.num_steps} steps",
        "set actor.rounding=stochastic, or raise actor.lr",
    )


def half_a_step(dtype: object) -> float | None:
    """The largest change of `SMALL_WEIGHT` that is rounded away (half the spacing there); None in full precision."""
    bits = HALF_BITS.get(str(dtype))
    return None if bits is None else SMALL_WEIGHT * 2.0 ** -(bits + 1)
