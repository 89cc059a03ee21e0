"""Facts of a training step for diagnoses: counts over its samples, and the metrics that rules use."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

METRICS = (
    "reward/mean",
    "reward/dropped_samples",
    "data/given_up",
    "completion/length_mean",
    "policy/entropy",
    "policy/kl",
    "policy/ratio_max",
    "policy/importance_max",
    "policy/clip_frac_low",
    "policy/clip_frac_high",
    "policy/rollout_logprob_diff",
    "actor/grad_norm",
    "actor/skipped",
)
"""The metrics that rules use."""


class Outcome(NamedTuple):
    """One response with its reward; each segment of a sample is one."""

    group: Hashable
    """Equal for the samples that are compared with each other."""
    sample: int
    """Within the group; the same for all segments of a sample."""
    score: float | None
    """None: the reward failed or is absent."""
    error: str | None
    """The reward's error; None: it did not fail."""
    truncated: bool | None
    """None: not recorded."""
    length: int | None
    """Sampled tokens; None: not recorded."""
    info: Mapping[str, Any]
    """Information from the reward; its key 'answer' is the answer that it read from the response."""
    components: Mapping[str, float | None]
    advantage: float | None
    """None: not trained on."""
    token_score: float = 0.0
    """The sum of the segment's token scores, which count to the sample's reward."""


@dataclass(frozen=True)
class StepFacts:
    """Counts over the responses of one step."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The finite numbers among `METRICS`."""
    responses: int = 0
    failed: int = 0
    error: str = ""
    """Error of the first reward that failed."""
    ended: int = 0
    cut: int = 0
    budget: int = 0
    """Tokens of the longest response that was cut off."""
    late_tokens: int = 0
    """Tokens that were sampled in the second half of the budget."""
    late_ends: int = 0
    """Responses that ended in that half."""
    readable: int = 0
    """Responses whose reward reports the answer that it found."""
    unread: int = 0
    """Those among them without an answer."""
    groups: int = 0
    """Groups with at least two scores."""
    equal_groups: int = 0
    """Those whose rewards, token scores included, are all equal."""
    low: float | None = None
    high: float | None = None
    """The lowest and highest reward: score and token scores."""
    varying: Sequence[str] = ()
    """Reward components that differ within some group."""
    trained: int = 0
    """Responses with an advantage."""
    taught: int = 0
    """Those whose advantage is not 0."""

    def with_metrics(self, metrics: Mapping[str, float | None]) -> "StepFacts":
        """The facts, with the metrics that are in `METRICS` and finite."""
        kept = {name: float(value) for name in METRICS if (value := metrics.get(name)) is not None and _finite(value)}
        return replace(self, metrics=kept)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values, for a checkpoint."""
        return {**asdict(self), "varying": list(self.varying)}


def facts_of(step: int, outcomes: Sequence[Outcome], metrics: Mapping[str, float | None]) -> StepFacts:
    """The facts of a step, from the responses to training prompts."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    found = [outcome.info["answer"] for outcome in outcomes if "answer" in outcome.info]
    advantages = [outcome.advantage for outcome in outcomes if outcome.advantage is not None]
    facts = StepFacts(
        step=step,
        responses=len(outcomes),
        failed=len(errors),
        error=errors[0][:200] if errors else "",
        readable=len(found),
        unread=len([answer for answer in found if answer is None or answer == ""]),
        trained=len(advantages),
        taught=len([advantage for advantage in advantages if advantage]),
        **_lengths(outcomes),
        **_groups(outcomes),
    )
    return facts.with_metrics(metrics)


def _finite(value: float) -> bool:
    return value - value == 0  # infinities and NaN minus themselves are NaN


def _lengths(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of responses that ended, were cut off, and ended in the second half of the budget."""
    cut = [outcome.length or 0 for outcome in outcomes if outcome.truncated]
    ended = [outcome.length or 0 for outcome in outcomes if outcome.truncated is False]
    budget = max(cut, default=0)
    half = budget // 2
    return {
        "ended": len(ended),
        "cut": len(cut),
        "budget": budget,
        "late_tokens": sum([length - half for length in (*cut, *ended) if half < length <= budget]),
        "late_ends": len([length for length in ended if half < length <= budget]),
    }


def _groups(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Groups with their rewards; segments of a sample count once, with the token scores of all of them."""
    scored: dict[Hashable, dict[int, Outcome]] = defaultdict(dict)
    for outcome in outcomes:
        if outcome.score is not None:
            samples = scored[outcome.group]
            before = samples[outcome.sample].score if outcome.sample in samples else outcome.score
            samples[outcome.sample] = outcome._replace(score=(before or 0.0) + outcome.token_score)
    scores = [[outcome.score or 0.0 for outcome in group.values()] for group in scored.values()]
    several = [group for group in scores if len(group) > 1]
    flat = [score for group in scores for score in group]
    return {
        "groups": len(several),
        "equal_groups": len([group for group in several if min(group) == max(group)]),
        "low": min(flat, default=None),
        "high": max(flat, default=None),
        "varying": tuple(sorted(_varying(list(scored.values())))),
    }


def _varying(groups: Sequence[Mapping[int, Outcome]]) -> set[str]:
    """The components that differ within some group whose scores are all equal."""
    found = set[str]()
    for group in groups:
        samples = list(group.values())
        if len({sample.score for sample in samples}) == 1:
            first = samples[0].components
            for sample in samples:
                found.update([name for name, value in sample.components.items() if value != first.get(name)])
    return found
