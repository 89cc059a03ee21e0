"""Checks a plugin's scorer against its contract: properties once, results on arrival."""

import math
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from numbers import Real

import numpy as np

from rlcore.contracts.offers import Scope
from rlcore.contracts.scorer import LARGEST, Outcome, Scorer
from rlcore.errors import PluginError, boundary, shown
from rlcore.errors.checks.arrays import POLICIES
from rlcore.types import Lane, RewardStatus, Trajectory

SCOPES = tuple(scope.value for scope in Scope)


class CheckedScorer(Scorer):
    """Wraps a scorer so that violations of its contract are PluginErrors that name it."""

    def __init__(self, scorer: Scorer) -> None:
        """PluginError for a property that violates `Scorer`."""
        kind = type(scorer).__name__
        with boundary(f"scorer {kind}", PluginError):
            name, scope, weight = scorer.name, scorer.scope, scorer.weight
            policy, later = scorer.on_failure, scorer.post_processes
        self._scorer, self._who = scorer, f"scorer {shown(name)} ({kind})"
        if not isinstance(name, str) or not name:
            raise PluginError(f"scorer {kind}: name is {shown(name)}; needs a text that is not empty")
        self._need(scope in SCOPES, "scope", scope, f"one of: {', '.join(SCOPES)}")
        finite = isinstance(weight, Real) and math.isfinite(weight)
        self._need(finite, "weight", weight, "a finite number")
        self._need(policy in POLICIES, "on_failure", policy, f"one of: {', '.join(POLICIES)}")
        self._need(isinstance(later, bool), "post_processes", later, "True or False")
        self._name, self._scope, self._weight, self._on_failure = name, str(scope), float(weight), policy

    def _need(self, good: bool, what: str, value: object, needs: str) -> None:
        if not good:
            raise PluginError(f"{self._who}: {what} is {shown(value)}; needs {needs}")

    @property
    def name(self) -> str:
        return self._name

    @property
    def scope(self) -> str:
        return self._scope

    @property
    def weight(self) -> float:
        return self._weight

    @property
    def on_failure(self) -> str:
        return self._on_failure

    @property
    def post_processes(self) -> bool:
        """Read each time, because it may be known only after the scorer has started."""
        return self._scorer.post_processes

    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        """See `Scorer.score`; PluginError for exceptions, and for anything but an outcome per sample."""
        return await self._checked("score()", self._scorer.score(trajectories, lane), trajectories)

    async def post_process(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane
    ) -> list[Outcome]:
        """See `score`."""
        work = self._scorer.post_process(trajectories, outcomes, lane)
        return await self._checked("post_process()", work, trajectories)

    async def _checked(
        self, method: str, work: Awaitable[list[Outcome]], trajectories: Sequence[Trajectory]
    ) -> list[Outcome]:
        with boundary(f"{self._who}: {method}", PluginError):
            outcomes = await work
        if not isinstance(outcomes, (list, tuple)) or len(outcomes) != len(trajectories):
            found = f"{len(outcomes)} outcomes" if isinstance(outcomes, (list, tuple)) else shown(outcomes)
            raise PluginError(f"{self._who}: {method} returned {found}; needs a list of {len(trajectories)} outcomes")
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if problem := problem_of(outcome, trajectory):
                raise PluginError(f"{self._who}: {method} returned {problem}, for {trajectory.id}")
        return [with_floats(outcome) for outcome in outcomes]


def with_floats(outcome: Outcome) -> Outcome:
    """The outcome with Python's floats for any others: metrics and checkpoints write them as JSON."""
    tokens, components = outcome.token_scores, outcome.components
    exact = tokens is None or tokens.dtype == np.float32
    if exact and type(outcome.score) is float and {float}.issuperset(map(type, components.values())):
        return outcome
    floats = {name: float(value) for name, value in components.items()}
    token_scores = None if tokens is None else tokens.astype(np.float32)
    return replace(outcome, score=float(outcome.score), components=floats, token_scores=token_scores)


def problem_of(outcome: object, trajectory: Trajectory) -> str:
    """The problem with one outcome; empty: none."""
    if not isinstance(outcome, Outcome) or not isinstance(outcome.status, RewardStatus):
        return f"{shown(outcome)}; needs an Outcome with a RewardStatus"
    if outcome.status is RewardStatus.FAILED:
        return "" if outcome.error else "a FAILED outcome without an error; needs to say why"
    numbers = [outcome.score, *outcome.components.values()]
    if not all(isinstance(value, Real) and abs(value) <= LARGEST for value in numbers):
        return f"the numbers {shown(numbers)}; needs finite ones that a float32 holds"
    tokens = outcome.token_scores
    if tokens is None:
        return ""
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "fiu":
        return f"token_scores that are {shown(tokens)}; needs a numpy array of numbers"
    if tokens.shape != trajectory.token_ids.shape:
        return f"token_scores of shape {tokens.shape}; needs {trajectory.token_ids.shape}"
    return ""
