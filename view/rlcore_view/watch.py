"""Watches a run step by step: reports each finding once, and at the end its frequency and whether the reward rose."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import sqrt
from statistics import fmean, variance
from typing import Any, TypeVar

from rlcore_view.diagnosis import findings_now
from rlcore_view.history import WINDOW, Finding, History
from rlcore_view.json_lines import number_or_none
from rlcore_view.model import Run, Sample
from rlcore_view.step_facts import METRICS, Outcome, StepFacts, facts_of

T = TypeVar("T", StepFacts, Finding)

ROSE = "the reward rose"
UNEXPLAINED = "none of the known causes shows in the data: read completions, take more steps, or raise actor.lr"


class Watch:
    """The findings of a run as its steps arrive; its state is JSON."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        """`config`: the run's configuration as JSON, for the values of keys; empty if unknown."""
        self._history = History(config or {})
        self._found: dict[str, Finding] = {}

    def step(self, facts: StepFacts) -> list[Finding]:
        """Add a step. Returns the findings that no earlier step had."""
        self._history.add(facts)
        new = []
        for finding in findings_now(self._history):
            before = self._found.get(finding.name)
            times, first = (before.times + 1, before.first) if before else (1, facts.step)
            self._found[finding.name] = replace(finding, times=times, first=first, last=facts.step)
            if before is None:
                new.append(finding)
        return new

    def findings(self) -> list[Finding]:
        """Everything found so far, the most frequent first."""
        counted = [replace(finding, of=self._history.num_steps) for finding in self._found.values()]
        return sorted(counted, key=lambda finding: -finding.times)

    def learning(self) -> str:
        """A sentence on the reward over the run; empty if there were too few steps."""
        steps, late = self._history.num_steps, self._history.recent[-WINDOW:]
        start, end = (
            [facts.metrics["reward/mean"] for facts in part if "reward/mean" in facts.metrics]
            for part in (self._history.early, late)
        )
        if steps < 2 * WINDOW or len(start) < WINDOW or len(end) < WINDOW:
            return ""
        change, noise = fmean(end) - fmean(start), 2 * sqrt((variance(start) + variance(end)) / WINDOW)
        moved = "the reward did not move" if abs(change) <= noise else ROSE if change > 0 else "the reward fell"
        return (
            f"learning: {moved}: {fmean(start):.3g} in the first {WINDOW} steps, {fmean(end):.3g} in the "
            f"last {WINDOW} of {steps}"
        )

    def last_words(self) -> list[str]:
        """Findings on learning at the end of a run, one per line."""
        found, learning = self.findings(), self.learning()
        lines = [learning] if learning else []
        if learning and ROSE not in learning and not found:
            lines.append(UNEXPLAINED)
        return [*lines, *(str(finding) for finding in found)]

    def state(self) -> dict[str, Any]:
        """The state without the configuration, as JSON."""
        history = self._history
        return {
            "early": [facts.to_json() for facts in history.early],
            "recent": [facts.to_json() for facts in history.recent],
            "num_steps": history.num_steps,
            "best_reward": history.best_reward,
            "found": [asdict(finding) for finding in self._found.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; ValueError when it is something else."""
        try:
            early, recent = ([_facts(facts) for facts in _listed(state, name)] for name in ("early", "recent"))
            found = {finding["name"]: _whole(Finding(**finding)) for finding in _listed(state, "found")}
            best, num_steps = state["best_reward"], state["num_steps"]
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the state of the diagnosis is not whole: {error}") from error
        if type(num_steps) is not int or not (best is None or isinstance(best, float)):
            raise ValueError("the state of the diagnosis is not whole: num_steps or best_reward is not a number")
        self._history = History(self._history.config, early, recent, num_steps, best)
        self._found = found


def _listed(state: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(state[name], list):
        raise TypeError(f"{name} is not a list")
    return list(state[name])


def _facts(values: Mapping[str, Any]) -> StepFacts:
    known = {entry.name for entry in fields(StepFacts)}
    facts = _whole(StepFacts(**{name: value for name, value in values.items() if name in known}))
    numbers = [*facts.metrics.values(), *(bound for bound in (facts.low, facts.high) if bound is not None)]
    if not all(isinstance(number, float) for number in numbers) or isinstance(facts.varying, str):
        raise TypeError(f"step {facts.step} has {numbers}; needs numbers")
    return replace(facts, varying=tuple(map(str, facts.varying)))


def _whole(values: T) -> T:
    """The same, if every count is an integer and every text a string; TypeError otherwise."""
    for entry in fields(values):
        if entry.type in (int, str) and type(getattr(values, entry.name)) is not entry.type:
            raise TypeError(f"{entry.name} is {getattr(values, entry.name)!r}")
    return values


def watched(run: Run) -> Watch:
    """A watch that has seen the recorded run, with the same findings as the run itself."""
    config = run.plan.get("config")
    watch = Watch(config if isinstance(config, Mapping) else None)
    samples, metrics = defaultdict[int, list[Sample]](list), defaultdict[int, dict[str, float | None]](dict)
    for sample in run.samples:
        if sample.lane == "train":
            samples[sample.step].append(sample)
    for record in run.metrics:
        metrics[int(record.get("step") or 0)] |= record
    steps = {*samples, *(step for step, record in metrics.items() if not record.keys().isdisjoint(METRICS))}
    for step in sorted(steps):
        watch.step(facts_of(step, [_outcome(sample) for sample in samples[step]], metrics[step]))
    return watch


def diagnose(run: Run) -> Sequence[Finding]:
    """The findings of a recorded run, the most frequent first; empty for a run that shows none."""
    return watched(run).findings()


def _outcome(sample: Sample) -> Outcome:
    info = sample.info.get("reward")
    info = info if isinstance(info, Mapping) else {}
    error = str(info.get("error", "")) if sample.status == "failed" else None
    return Outcome(
        group=(sample.prompt_id, sample.epoch),
        sample=sample.sample,
        score=sample.score,
        error=error,
        truncated=sample.truncated,
        length=sample.num_sampled,
        info=info,
        components=sample.components,
        advantage=sample.advantage,
        token_score=number_or_none(sample.info.get("token_score")) or 0.0,
    )
