"""The steps of a run in the form that rules use, and the findings of rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlcore_view.step_facts import StepFacts

WINDOW = 5
"""Steps whose median represents the beginning, and the end, of a run."""
STEADY = 3
"""Steps in a row with a metric out of bounds before a rule reports it."""


@dataclass(frozen=True)
class Finding:
    """One problem, or possible problem, and the number of steps that show it."""

    name: str
    evidence: str
    """The finding, with numbers, in the last of these steps."""
    advice: str
    """The key to change, or where to look."""
    times: int = 1
    """Steps in which it was found."""
    of: int = 1
    """Steps that were checked."""
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
    """The steps that rules use; the configuration is empty if unknown."""

    config: Mapping[str, Any] = field(default_factory=dict)
    early: list[StepFacts] = field(default_factory=list)
    """The first steps, at most `WINDOW`."""
    recent: list[StepFacts] = field(default_factory=list)
    """The last steps, as many as a rule needs."""
    num_steps: int = 0
    best_reward: float | None = None
    """The highest median reward of `WINDOW` steps in a row."""

    def add(self, facts: StepFacts) -> None:
        """Add the next step."""
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
        """True if the test holds in each of the last `steps` steps."""
        return len(self.recent) >= steps and all(test(facts) for facts in self.recent[-steps:])

    def above(self, name: str, bound: float, steps: int = STEADY) -> bool:
        """True if the metric is at least `bound` in each of the last `steps` steps."""
        return self.steady(lambda facts: facts.metrics.get(name, float("-inf")) >= bound, steps)

    def setting(self, key: str) -> Any:
        """The value of a dotted key; None if unknown."""
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float) -> float:
        """The number that a dotted key is set to."""
        value = self.setting(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def named(self, key: str) -> str:
        """The key, with its value if known."""
        value = self.setting(key)
        return key if value is None else f"{key}={value}"

    def gain_lost(self) -> bool:
        """True if the reward has lost at least half of its gain; low entropy is fine in a policy that does well."""
        start, late, best = self.start("reward/mean"), self.late("reward/mean"), self.best_reward
        return start is not None and late is not None and best is not None and late <= start + 0.5 * (best - start)


def _median(steps: Sequence[StepFacts], name: str) -> float | None:
    values = [facts.metrics[name] for facts in steps if name in facts.metrics]
    return median(values) if len(values) >= WINDOW else None
