"""Rules that say why nothing is learned: what the data of a run shows, in words, with the key to change.

A run and its viewer use the same rules (`rlcore_view.watch`). A rule is a function of the steps so far and of the
configuration; it says what holds at the last step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlcore_view.step_facts import StepFacts

WINDOW = 5
"""Steps whose median stands for the beginning of a run, and for its end."""
STEADY = 3
"""Steps in a row in which a metric is out of bounds before a rule says so."""
HALF, NEARLY_ALL = 0.5, 0.9
COLLAPSED_ENTROPY, COLLAPSED_LENGTH = 0.05, 0.1
"""Shares of what it was at the beginning."""
FAR_KL = 3.0
"""Nats per token from the reference."""
DRIFT = 0.1
"""Nats per token between sampler and trainer; the first step, which samples with the very weights, is the measure."""
FAR_RATIO = 100.0
MOST_CLIPPED = 0.75
"""Share of the tokens of all updates of a step; nothing is clipped in its first."""
CLIPPED_TO = 0.01
"""Share of its gradient that a clipped update keeps."""
SMALL_WEIGHT = 0.02
"""A usual size of a weight, for what rounding to half precision leaves of an update."""
HALF_BITS = {"bfloat16": 8, "float16": 11}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be, and in how many steps."""

    name: str
    evidence: str
    """The finding, with numbers, in the last of these steps."""
    advice: str
    """The key to change, or the thing to look at."""
    times: int = 1
    """Steps in which it was found."""
    of: int = 1
    """Steps that were looked at."""
    first: int = 0
    last: int = 0

    @property
    def words(self) -> str:
        """The finding without counts."""
        return f"{self.name}: {self.evidence}; {self.advice}"

    def __str__(self) -> str:
        steps = f"step {self.last}" if self.times == 1 else f"steps {self.first} to {self.last}"
        return f"{self.name} in {self.times} of {self.of} steps ({steps}): {self.evidence}; {self.advice}"


@dataclass
class History:
    """The steps that rules look at; the configuration is empty where it is not known."""

    config: Mapping[str, Any] = field(default_factory=dict)
    early: list[StepFacts] = field(default_factory=list)
    """The first steps, at most `WINDOW`."""
    recent: list[StepFacts] = field(default_factory=list)
    """The last steps, as many as a rule looks at."""
    num_steps: int = 0
    best_reward: float | None = None
    """The highest median reward of `WINDOW` steps in a row."""

    def add(self, facts: StepFacts) -> None:
        """Take in the next step."""
        self.num_steps += 1
        if len(self.early) < WINDOW:
            self.early.append(facts)
        kept = max(2 * WINDOW, int(self.number("algo.equal_rewards_warn_steps", 0)))
        self.recent = [*self.recent, facts][-kept:]
        reward = self.late("reward/mean")
        if reward is not None:
            self.best_reward = reward if self.best_reward is None else max(self.best_reward, reward)

    @property
    def now(self) -> StepFacts:
        """The last step."""
        return self.recent[-1]

    def late(self, name: str) -> float | None:
        """The median of a metric over the last steps; None before there are enough."""
        return _median(self.recent[-WINDOW:], name)

    def start(self, name: str) -> float | None:
        """The median of a metric over the first steps; None while the last steps are among them."""
        return _median(self.early, name) if self.num_steps >= 2 * WINDOW else None

    def steady(self, test: Callable[[StepFacts], bool], steps: int = STEADY) -> bool:
        """True if the test holds in each of so many last steps."""
        return len(self.recent) >= steps and all(test(facts) for facts in self.recent[-steps:])

    def above(self, name: str, bound: float, steps: int = STEADY) -> bool:
        """True if the metric is at least `bound` in each of so many last steps."""
        return self.steady(lambda facts: facts.metrics.get(name, float("-inf")) >= bound, steps)

    def setting(self, key: str) -> Any:
        """The value of a dotted key; None where it is not known."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float) -> float:
        """The number that a dotted key is set to."""
        value = self.setting(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def named(self, key: str) -> str:
        """The key, with its value where that is known."""
        value = self.setting(key)
        return key if value is None else f"{key}={value}"

    def gain_lost(self) -> bool:
        """True if the reward has lost at least half of what it had gained; a policy that does well may be sure."""
        start, late, best = self.start("reward/mean"), self.late("reward/mean"), self.best_reward
        return start is not None and late is not None and best is not None and late <= start + 0.5 * (best - start)


def _median(steps: Sequence[StepFacts], name: str) -> float | None:
    values = [facts.metrics[name] for facts in steps if name in facts.metrics]
    return median(values) if len(values) >= WINDOW else None


def _failed(history: History) -> Finding | None:
    now = history.now
    if not now.responses or now.failed / now.responses < HALF:
        return None
    what = f"{now.failed} of {now.responses} samples have no reward" + (f", such as: {now.error}" if now.error else "")
    return Finding("rewards fail", what, "call the reward function on a few recorded completions")


def _dropped(history: History) -> Finding | None:
    now, dropped = history.now, history.now.metrics.get("reward/dropped_samples", 0.0)
    if not now.responses or dropped / now.responses < HALF:
        return None
    return Finding(
        "samples are dropped",
        f"{dropped:g} of {now.responses} samples were left out because a reward failed, {now.failed} of them their own",
        "mend the reward function, or set on_failure=drop_sample, which keeps the other samples of a group",
    )


def _given_up(history: History) -> Finding | None:
    per_step = history.number("train.prompts_per_step", 0.0)
    if not per_step or len(history.recent) <= STEADY:
        return None
    before, now = (facts.metrics.get("data/given_up", 0.0) for facts in (history.recent[-1 - STEADY], history.now))
    if (now - before) / (STEADY * per_step) < HALF:
        return None
    return Finding(
        "prompts are given up",
        f"{now - before:g} prompts were too old in the last {STEADY} steps, which trained on {STEADY * per_step:g}",
        f"raise {history.named('schedule.max_staleness')}, or wait for them with schedule.on_stale=wait",
    )


def _cut_off(facts: StepFacts) -> bool:
    known = facts.cut + facts.ended
    return known > 0 and facts.cut / known >= NEARLY_ALL


def _truncated(history: History) -> Finding | None:
    now = history.now
    if not _cut_off(now):
        return None
    evidence = f"{now.cut} of {now.cut + now.ended} responses end at a token budget"
    if now.budget:
        evidence += f", the longest after {now.budget} tokens; {_with_more(now)}"
    advice = f"raise {history.named('rollout.max_tokens')}, or ask for shorter answers in the prompt"
    if 0 < now.budget < history.number("rollout.max_tokens", 0):
        advice = f"raise {history.named('rollout.max_tokens')} or what else ends a conversation (agent/ended/*)"
    if differ := now.groups - now.equal_groups:
        evidence += f"; rewards differ in {differ} of {now.groups} groups all the same"
        advice += ", if the reward needs the end of a response"
    elif now.groups:
        evidence += f"; no rewards differ within the {now.groups} groups, so nothing is learned"
    return Finding("responses are cut off", evidence, advice)


def _with_more(facts: StepFacts) -> str:
    """An estimate: responses go on to end at the rate of the second half of the budget."""
    if not facts.late_ends or not facts.late_tokens:
        return "none ends in its second half, so nothing shows how many tokens would do"
    share = 1.0 - (1.0 - facts.late_ends / facts.late_tokens) ** facts.budget
    return f"at the rate at which they end in its second half, {share:.0%} of these would end within twice as many"


def _unread(history: History) -> Finding | None:
    now = history.now
    if not now.readable or now.unread / now.readable < NEARLY_ALL:
        return None
    return Finding(
        "answers are not found",
        f"the reward found no answer in {now.unread} of {now.readable} responses",
        "show the wanted form in the prompt, or widen what the reward accepts",
    )


def _equal(history: History) -> Finding | None:
    steps = int(history.number("algo.equal_rewards_warn_steps", 1))  # files of another trainer may have one step
    if not history.steady(lambda facts: 0 < facts.groups == facts.equal_groups, steps):
        return None
    now = history.now
    evidence = f"nothing is learned: all rewards of every group were equal, in {now.groups} of {now.groups} groups"
    varying, value = ", ".join(now.varying), now.low
    if now.varying and value == now.high:
        constant = f"{evidence} {value:g}, though {varying} differ"
        return Finding("rewards cancel out", constant, "look at the components and their weights")
    if value is None or value != now.high:
        return Finding(
            "groups have equal rewards",
            f"{evidence}, with different values for different prompts",
            f"raise {history.named('rollout.samples_per_prompt')} or {history.named('rollout.temperature')}, or take "
            "prompts that are solved now and then",
        )
    evidence = f"{evidence} {value:g}"
    if value <= 0:
        advice = "the task is too hard for the model, or the reward cannot read its answers: look at the completions"
        return Finding("all rewards are equal", evidence, advice)
    if value == 1:
        return Finding("all rewards are equal", evidence, "the task is solved: take harder prompts")
    return Finding("all rewards are equal", evidence, "the reward does not tell responses apart: look at its code")


def _zero_advantages(history: History) -> Finding | None:
    def zero(facts: StepFacts) -> bool:
        return facts.trained > 0 and not facts.taught and facts.equal_groups < facts.groups

    if not history.steady(zero):
        return None
    now = history.now
    return Finding(
        "advantages are zero",
        f"rewards differ in {now.groups - now.equal_groups} of {now.groups} groups, and each of {now.trained} "
        "advantages is 0",
        "look at algo.advantage, and at what algo.overlong and dropped samples leave of the groups",
    )


def _no_gradient(history: History) -> Finding | None:
    if not history.steady(lambda facts: facts.metrics.get("actor/grad_norm") == 0 and facts.taught > 0):
        return None
    return Finding(
        "no gradient",
        f"actor/grad_norm is 0, though {history.now.taught} of {history.now.trained} advantages are not",
        "look at the loss and its mask",
    )


def _clipped_gradient(history: History) -> Finding | None:
    limit = history.number("actor.max_grad_norm", 0.0)
    if not limit or not history.above("actor/grad_norm", limit / CLIPPED_TO):
        return None
    norm = history.now.metrics["actor/grad_norm"]
    return Finding(
        "gradients are clipped to nothing",
        f"actor/grad_norm is {norm:.3g}, of which actor.max_grad_norm={limit:g} keeps {limit / norm:.2%}",
        "raise actor.max_grad_norm, or look for rewards and advantages that are far too large",
    )


def _clipped_loss(history: History) -> Finding | None:
    def clipped(facts: StepFacts) -> float:
        return facts.metrics.get("policy/clip_frac_low", 0.0) + facts.metrics.get("policy/clip_frac_high", 0.0)

    if not history.steady(lambda facts: clipped(facts) >= MOST_CLIPPED):
        return None
    return Finding(
        "the loss is clipped to nothing",
        f"{clipped(history.now):.0%} of the tokens have no gradient because their ratio is outside the clip range",
        f"lower {history.named('actor.lr')} or {history.named('actor.epochs')}, or raise algo.clip_high",
    )


def _skipped(history: History) -> Finding | None:
    if not history.above("actor/skipped", HALF):
        return None
    share = history.now.metrics["actor/skipped"]
    if history.setting("algo.overlong") == "mask" and _cut_off(history.now):
        return Finding(
            "updates are skipped",
            f"{share:.0%} of the updates had nothing to learn from: all responses were cut off, and algo.overlong=mask "
            "leaves those out",
            f"raise {history.named('rollout.max_tokens')}, or choose another algo.overlong",
        )
    return Finding(
        "updates are skipped",
        f"{share:.0%} of the updates changed nothing, because their loss or gradient was not finite",
        f"lower {history.named('actor.lr')}, or choose bfloat16 where actor.dtype is float16",
    )


def _sampler_differs(history: History) -> Finding | None:
    backends = history.setting("rollout.backend"), history.setting("actor.backend")
    limit = history.number("rollout.warn_logprob_diff", 0.0)
    difference = history.now.metrics.get("policy/rollout_logprob_diff", 0.0)
    if not limit or backends[0] == backends[1] or difference <= limit or _draws_from_a_part(history):
        return None
    return Finding(
        "sampler and trainer differ",
        f"log-probs of rollout.backend={backends[0]} and of the actor differ by {difference:.3g} per token in the mean "
        f"(rollout.warn_logprob_diff={limit:g})",
        "the loss corrects for it up to algo.importance.cap; look at the number formats of both",
    )


def _draws_from_a_part(history: History) -> bool:
    """Log-probs then differ by the mass of the vocabulary that was cut off."""
    return (
        history.number("rollout.top_p", 1.0) != 1.0
        or history.number("rollout.top_k", 0.0) != 0.0
        or history.number("rollout.min_p", 0.0) != 0.0
    )


def _stale_sampler(history: History) -> Finding | None:
    name = "policy/rollout_logprob_diff"
    late, early = history.late(name), [facts.metrics[name] for facts in history.early if name in facts.metrics]
    if history.start(name) is None or late is None or late < DRIFT or late < 5 * min(early):
        return None
    return Finding(
        "weights do not reach the sampler",
        f"{name} rose from {min(early):.2g} to {late:.2g} per token: sampler and trainer drift apart",
        "look at the weight sync of rollout.backend, and at the number formats of both engines",
    )


def _entropy(history: History) -> Finding | None:
    start, late = history.start("policy/entropy"), history.late("policy/entropy")
    if start is None or late is None or start <= 0 or late > COLLAPSED_ENTROPY * start or not history.gain_lost():
        return None
    return Finding(
        "entropy collapsed",
        f"policy/entropy fell from {start:.2g} to {late:.2g}, and the reward with it",
        f"lower {history.named('actor.lr')}, raise algo.clip_high, or add algo.entropy_coef",
    )


def _length(history: History) -> Finding | None:
    start, late = history.start("completion/length_mean"), history.late("completion/length_mean")
    if start is None or late is None or late > COLLAPSED_LENGTH * start or not history.gain_lost():
        return None
    return Finding(
        "responses have become empty",
        f"completion/length_mean fell from {start:.3g} to {late:.3g} tokens, and the reward with it",
        f"look at what the reward gives to short responses, and lower {history.named('actor.lr')}",
    )


def _kl(history: History) -> Finding | None:
    if not history.above("policy/kl", FAR_KL):
        return None
    return Finding(
        "the policy left its reference",
        f"policy/kl is {history.now.metrics['policy/kl']:.3g} nats per token",
        f"raise {history.named('algo.kl.coef')} or lower {history.named('actor.lr')}",
    )


def _ratio(history: History) -> Finding | None:
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


def _rounded_away(history: History) -> Finding | None:
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
    """The most of `SMALL_WEIGHT` that is rounded away, half the distance of its neighbours; None in full precision."""
    bits = HALF_BITS.get(str(dtype))
    return None if bits is None else SMALL_WEIGHT * 2.0 ** -(bits + 1)


Rule = Callable[[History], Finding | None]

REASONS: Sequence[Rule] = (_failed, _dropped, _truncated, _unread)
"""Reasons why rewards are missing, or are what a response without an answer gets; the first that holds is said."""
OTHERS: Sequence[Rule] = (
    _given_up,
    _zero_advantages,
    _no_gradient,
    _clipped_gradient,
    _clipped_loss,
    _skipped,
    _sampler_differs,
    _stale_sampler,
    _entropy,
    _length,
    _kl,
    _ratio,
    _rounded_away,
)


def findings_now(history: History) -> list[Finding]:
    """Findings that hold at the last step, most direct cause first."""
    reasons = (finding for rule in REASONS if (finding := rule(history)) is not None)
    reason, high = next(reasons, None), history.now.high
    explained = reason is not None and high is not None and high <= 0
    found = [reason, None if explained else _equal(history), *(rule(history) for rule in OTHERS)]
    return [finding for finding in found if finding is not None]
