"""Reasons why nothing is learned: findings in a run's data, in words, with the key to change."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlcore_view.model import Run, Sample

LAST_STEPS = 5
"""Steps that a diagnosis looks at: the last ones."""
MOST, NEARLY_ALL = 0.5, 0.9


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be."""

    name: str
    evidence: str
    """The finding, with numbers."""
    advice: str
    """The key to change, or the thing to look at."""

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}; {self.advice}"


def diagnose(run: Run) -> list[Finding]:
    """The findings, most direct cause first; empty for a run that shows none."""
    recent = _recent(run)
    return [finding for check in CHECKS if (finding := check(run, recent)) is not None]


def _recent(run: Run) -> list[Sample]:
    """The training samples of the last steps."""
    samples = [sample for sample in run.samples if sample.lane == "train"]
    steps = sorted({sample.step for sample in samples})[-LAST_STEPS:]
    return [sample for sample in samples if sample.step in steps]


def _failed(run: Run, samples: Sequence[Sample]) -> Finding | None:
    failed = [sample for sample in samples if sample.status == "failed"]
    if not samples or len(failed) / len(samples) < MOST:
        return None
    error = next((str((sample.info.get("reward") or {}).get("error", "")) for sample in failed), "")
    what = f"{len(failed)} of {len(samples)} samples have no reward" + (f", such as: {error[:200]}" if error else "")
    return Finding("rewards fail", what, "call the reward function on a few recorded completions")


def _truncated(run: Run, samples: Sequence[Sample]) -> Finding | None:
    known = [sample for sample in samples if sample.truncated is not None]
    cut = sum(bool(sample.truncated) for sample in known)
    if not known or cut / len(known) < NEARLY_ALL:
        return None
    return Finding(
        "responses are cut off",
        f"{cut} of {len(known)} responses end at the token budget",
        "raise rollout.max_tokens, or ask for shorter answers in the prompt",
    )


def _equal_rewards(run: Run, samples: Sequence[Sample]) -> Finding | None:
    groups = _scored_groups(samples)
    equal = [scores for scores in groups if max(scores) == min(scores)]
    if not groups or len(equal) / len(groups) < NEARLY_ALL:
        return None
    evidence = f"in {len(equal)} of {len(groups)} groups all samples have the same reward"
    values = {scores[0] for scores in equal}
    parts = sorted({name for sample in samples for name in _varying(samples, sample)})
    if len(values) == 1 and parts:
        constant = f"{evidence}: {values.pop():g} everywhere, though {', '.join(parts)} differ"
        return Finding("rewards cancel out", constant, "look at the components and their weights")
    if len(values) == 1:
        value = values.pop()
        advice = (
            "the task is too hard for the model, or the reward cannot read its answers: look at the completions"
            if value <= 0
            else "the task is solved: take harder prompts"
        )
        return Finding("all rewards are equal", f"{evidence}: {value:g} everywhere", advice)
    return Finding(
        "groups have equal rewards",
        f"{evidence}, with different values for different prompts",
        "raise rollout.samples_per_prompt or rollout.temperature, or take prompts that are solved now and then",
    )


def _unparsed(run: Run, samples: Sequence[Sample]) -> Finding | None:
    told = [info for sample in samples if isinstance(info := sample.info.get("reward"), dict) and "answer" in info]
    empty = sum(info["answer"] in (None, "") for info in told)
    if not told or empty / len(told) < MOST:
        return None
    return Finding(
        "answers are not found",
        f"the reward found no answer in {empty} of {len(told)} responses",
        "show the wanted form in the prompt, or widen what the reward accepts",
    )


def _zero_advantages(run: Run, samples: Sequence[Sample]) -> Finding | None:
    known = [sample.advantage for sample in samples if sample.advantage is not None]
    differ = any(max(scores) > min(scores) for scores in _scored_groups(samples))
    if not known or any(known) or not differ:
        return None
    return Finding(
        "advantages are zero",
        f"rewards differ within groups, and each of {len(known)} advantages is 0",
        "look at algo.advantage and algo.normalize",
    )


def _no_gradient(run: Run, samples: Sequence[Sample]) -> Finding | None:
    norms = [value for _, value in run.curve("actor/grad_norm")][-LAST_STEPS:]
    if not norms or any(norms) or not any(sample.advantage for sample in samples):
        return None
    return Finding(
        "no gradient", f"actor/grad_norm is 0 in the last {len(norms)} steps", "look at the loss and its mask"
    )


def _skipped(run: Run, samples: Sequence[Sample]) -> Finding | None:
    skipped = [value for _, value in run.curve("actor/skipped")][-LAST_STEPS:]
    if not skipped or min(skipped) <= 0:
        return None
    return Finding(
        "updates are skipped",
        f"in each of the last {len(skipped)} steps an update was skipped, because its gradient was not finite",
        "lower actor.lr; with actor.dtype=float16 a few at the start are normal",
    )


def _stale_sampler(run: Run, samples: Sequence[Sample]) -> Finding | None:
    values = [value for _, value in run.curve("policy/rollout_logprob_diff")]
    if len(values) < 2 * LAST_STEPS:
        return None
    first, last = statistics.median(values[:LAST_STEPS]), statistics.median(values[-LAST_STEPS:])
    if last < 0.1 or last < 5 * first:
        return None
    return Finding(
        "sampler and trainer drift apart",
        f"policy/rollout_logprob_diff rose from {first:.2g} to {last:.2g} per token",
        "look at the weight sync and at the number formats of both engines",
    )


def _entropy(run: Run, samples: Sequence[Sample]) -> Finding | None:
    values = [value for _, value in run.curve("policy/entropy")]
    scores = [value for _, value in run.curve("reward/mean")]
    if len(values) < LAST_STEPS or len(scores) < LAST_STEPS or values[0] <= 0 or values[-1] > 0.05 * values[0]:
        return None
    if scores[-1] >= max(scores) - 0.1 * (max(scores) - min(scores)):
        return None  # a policy that is sure of what it solved
    return Finding(
        "entropy collapsed",
        f"policy/entropy fell from {values[0]:.2g} to {values[-1]:.2g}, and the reward is below its best",
        "lower actor.lr, raise algo.clip_high, or add algo.entropy_coef",
    )


def _kl(run: Run, samples: Sequence[Sample]) -> Finding | None:
    values = [value for _, value in run.curve("policy/kl")]
    if len(values) < 2 or values[-1] < 10:
        return None
    return Finding(
        "the policy left its reference",
        f"policy/kl is {values[-1]:.3g} nats per token after {values[0]:.2g}",
        "raise algo.kl.coef or lower actor.lr",
    )


CHECKS: Sequence[Callable[[Run, Sequence[Sample]], Finding | None]] = (
    _failed,
    _truncated,
    _unparsed,
    _equal_rewards,
    _zero_advantages,
    _no_gradient,
    _skipped,
    _stale_sampler,
    _entropy,
    _kl,
)


def _scored_groups(samples: Sequence[Sample]) -> list[list[float]]:
    """The scores of each group that has at least two."""
    ordered = sorted((sample for sample in samples if sample.score is not None), key=lambda sample: sample.group)
    groups = [
        [float(sample.score or 0) for sample in group] for _, group in groupby(ordered, lambda sample: sample.group)
    ]
    return [scores for scores in groups if len(scores) > 1]


def _varying(samples: Sequence[Sample], of: Sample) -> set[str]:
    first = samples[0].components
    return {name for name, value in of.components.items() if name in first and value != first[name]}
