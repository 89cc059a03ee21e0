"""The result of every reader: a run as steps, prompts and samples, whichever trainer wrote it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class ViewError(Exception):
    """The path cannot be shown; one line that says what was found and what is needed."""


@dataclass(frozen=True)
class Tokens:
    """The recorded tokens of a sample, one entry per token in each list."""

    pieces: Sequence[str]
    """Their texts."""
    arrays: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """`logprob`, `advantage`, `old_logprob`, ... by name; None, or in an `array` NaN, where a token has none."""
    sampled: Sequence[bool] = ()
    """False if the policy did not sample the token; empty: it sampled all tokens."""
    turn: Sequence[int] = ()
    """Index of the sampled stretch that the token belongs to; empty: there is only one."""


@dataclass(frozen=True)
class Sample:
    """One response to a prompt."""

    step: int
    prompt_id: str
    """Unique within the run; samples with the same step, lane, prompt and epoch are a group."""
    prompt: Sequence[Mapping[str, Any]]
    """Messages."""
    completion: str | Sequence[Mapping[str, Any]]
    """Text, or messages."""
    score: float | None
    lane: str = "train"
    epoch: int = 0
    sample: int = 0
    segment: int = 0
    source: str = ""
    answer: Any = None
    components: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    num_sampled: int | None = None
    """Tokens that the policy sampled; None: not recorded."""
    truncated: bool | None = None
    """True if a token budget ended the response; None: not recorded."""
    status: str = "ok"
    versions: Sequence[Sequence[int]] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that was recorded."""
    tokens: Tokens | None = None

    @property
    def group(self) -> tuple[int, str, str, int]:
        """The key of the sample's group."""
        return self.step, self.lane, self.prompt_id, self.epoch

    def text(self) -> str:
        """The response as one string; for messages, the assistant's contents."""
        if isinstance(self.completion, str):
            return self.completion
        return "\n".join(str(m.get("content") or "") for m in self.completion if m.get("role") == "assistant")


@dataclass(frozen=True)
class Event:
    """Something that took time: a bar of the timeline."""

    name: str
    kind: str
    """`generate`, `tool`, `reward`, `train`, `weights`, or any other word."""
    start_s: float
    length_s: float
    row: str
    """Events with the same row share a line: those of a sample, or of a worker."""
    step: int | None = None
    sample: tuple[str, int, int, int] | None = None
    """Prompt, epoch, sample and segment, if the event belongs to one."""
    version: int | None = None
    """Version of the weights, for sampling."""


@dataclass(frozen=True)
class Run:
    """A run, or what exists of it on disk."""

    name: str
    format: str
    """The trainer that wrote the files, as displayed."""
    samples: Sequence[Sample]
    metrics: Sequence[Mapping[str, float | None]] = ()
    """One record per step or evaluation, including 'step'."""
    config: str = ""
    """The configuration as text."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Event] = ()
    alerts: Sequence[str] = ()
    """The last warnings and errors that the run logged."""
    notes: Sequence[str] = ()
    """One sentence per item that a reader left out or could not read."""

    @property
    def num_steps(self) -> int:
        """Steps with training samples; those of any samples if there are none."""
        trained = {sample.step for sample in self.samples if sample.lane == "train"}
        return len(trained or {sample.step for sample in self.samples})

    def groups(self, lane: str = "train") -> Iterator[list[Sample]]:
        """The samples of each group, in the order of recording."""
        groups: dict[tuple[int, str, str, int], list[Sample]] = {}
        for sample in self.samples:
            if sample.lane == lane:
                groups.setdefault(sample.group, []).append(sample)
        yield from groups.values()

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) pairs of a metric, where the value is a number."""
        found = [(record.get("step"), record.get(name)) for record in self.metrics]
        return [(int(step), float(value)) for step, value in found if step is not None and value is not None]
