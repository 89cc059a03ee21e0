"""The extension point of rewards: a scorer is a named component of the reward, called for each sample, group or batch.

A reward manager of a plugin gives its scorers to `rlcore.FunctionRewards`, which weights and sums them with
`reward.functions`. For a sample that it cannot judge, a scorer returns a failed `Outcome` with the reason; it never
raises.
"""

import inspect
import math
import reprlib
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlcore.errors import RewardError, boundary
from rlcore.types import Float32s, Lane, RewardStatus, Trajectory

LARGEST = float(np.finfo(np.float32).max)
MAX_DEPTH = 32
"""The deepest nesting of values returned with a score; a deeper one would overflow the stack of recursive code."""
MAX_BYTES = 4 << 20
"""The most bytes of values returned with a score; the run keeps them until the step ends and copies them to its
records."""
MAX_BITS = 10_000
"""The longest integer that is logged; Python refuses to write one of more than 4300 digits."""
_PLAIN = frozenset((bool, int, float, str))
SHOWN = (bool, int, float, complex, str, list, tuple, dict)
"""Types whose short repr an error may show. The repr of others may be slow or huge, or run foreign code."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A scorer's result for a sample: OK with a finite score, FAILED with an error, or SKIPPED without an opinion.

    Holds only plain values, because it may come from a child process.
    """

    status: RewardStatus
    score: float = 0.0
    error: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the score, for the metrics."""
    info: Mapping[str, Any] = field(default_factory=dict)
    token_scores: Float32s | None = None
    """(T,) an additional score for each token of the trajectory, prompt included; None without any."""


SKIPPED = Outcome(RewardStatus.SKIPPED)


def failed(error: str) -> Outcome:
    """A FAILED outcome with this error."""
    return Outcome(RewardStatus.FAILED, error=exact_text(error))


def number(value: Any) -> float | str:
    """The value as a finite float, or its problem in words. bool counts as 0 or 1; numpy and torch scalars pass."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return f"returned {shown(value)}; needs a number"
    if getattr(value, "ndim", 0):
        return f"returned an array of shape {tuple(value.shape)}; needs a number"
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError) as cause:
        return f"returned {shown(value)}, which is not a number: {cause}"
    if not math.isfinite(converted):
        return f"returned {converted}; needs a finite number"
    return converted if abs(converted) <= LARGEST else f"returned {converted}, which no float32 can hold"


def extra_value_problem(value: Any) -> str | None:
    """The problem of a value that is returned with a score: it is too deep or too large; None: none."""
    level = [value]
    num_bytes = 0
    for _ in range(MAX_DEPTH + 1):
        num_bytes += sum(map(_size, level))
        if num_bytes > MAX_BYTES:
            return f"more than {MAX_BYTES >> 20} MiB in addition to a score; needs less"
        level = [inner for value in level for inner in _inner(value)]
        if not level:
            return None
    return f"a value nested more than {MAX_DEPTH} levels deep; needs fewer"


def memory_of(value: Any) -> int:
    """Approximate bytes of a value of plain types; beyond MAX_BYTES the count may be partial."""
    level, num_bytes = [value], 0
    for _ in range(MAX_DEPTH + 2):
        num_bytes += sum(map(_size, level))
        level = [inner for value in level for inner in _inner(value)] if num_bytes <= 2 * MAX_BYTES else []
        if not level:
            break
    return num_bytes


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes, int)):
        return sys.getsizeof(value)
    if isinstance(value, Mapping):
        return 64 + 100 * len(value) + sum(sys.getsizeof(key) for key in value if isinstance(key, str))
    if isinstance(value, (list, tuple)):
        return 64 + 8 * len(value)
    if hasattr(value, "tolist") and isinstance(size := getattr(value, "nbytes", None), int):
        return 64 + 8 * size  # becomes a list of numbers
    return 32


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return list(value.flat) if isinstance(value, np.ndarray) and value.dtype.hasobject else ()


def exact_text(value: Any) -> str:
    """The value's text as a plain str, because `str` may return a subclass."""
    text = str(value)
    return text if type(text) is str else str.__str__(text)


def as_plain(value: Any) -> Any:
    """A value that pickles without its library and can be logged: scalars as they are, arrays as lists.

    A subclass of one of these types becomes that type, because its pickle would run code in the controller. An integer
    of more than MAX_BITS is replaced by its length.
    """
    if isinstance(value, int) and int.bit_length(value) > MAX_BITS:
        return f"an integer of {int.bit_length(value)} bits"
    if value is None or type(value) in _PLAIN:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return exact_text(value) if kind is str else getattr(kind, f"__{kind.__name__}__")(value)
    if hasattr(value, "tolist"):
        listed = value.tolist()
        return as_plain(listed) if type(listed) is not type(value) else exact_text(value)
    if isinstance(value, Mapping):
        return {exact_text(key): as_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(part) for part in value]
    return exact_text(value)


def task_score(judge: Callable[[str | None, dict[str, Any]], Any], answer: str, entry: dict[str, Any]) -> float:
    """The score of an answer by a task's own code; 0 for one that the code cannot read, because it raises.

    Its error is raised if it cannot read the answer of the entry, either: then entry or code is at fault.
    """
    try:
        with boundary("the answer", RewardError):
            return float(judge(answer, entry))
    except RewardError:
        right = entry["answer"]
        judge(None if right is None else str(right), entry)
        return 0.0


def shown(value: Any) -> str:
    """The text of a value in an error: its type, and the value if it is short."""
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine from a function that is not async"
    if inspect.isgenerator(value):
        return "a generator"
    if value is None:
        return "None"
    shown = type(value) in SHOWN and not (isinstance(value, int) and value.bit_length() > 64)
    text = reprlib.repr(value) if shown else ""
    return f"{type(value).__name__} {text}" if 0 < len(text) <= 60 else f"a {type(value).__name__}"


class Scorer(Protocol):
    """A named component of the reward. Subclass it: `name` and `score` are abstract, the rest has defaults."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The component's name in metrics, errors and `Reward.components`; no function of `reward.functions` may have
        the same."""
        ...

    @property
    def scope(self) -> str:
        """'sample' (the default), 'group' or 'batch': the samples that `score` gets together."""
        return "sample"

    @property
    def weight(self) -> float:
        """The factor of its score in the sum, 1 by default."""
        return 1.0

    @property
    def on_failure(self) -> str:
        """The policy for a sample without a score: 'drop_sample' (the default), 'drop_group' or 'abort'.

        Empty for a function of `reward.functions`, because its settings state the policy.
        """
        return "drop_sample"

    @property
    def post_processes(self) -> bool:
        """True if `post_process` is called with the outcomes of each whole group; for scope 'sample'. Default False."""
        return False

    @abstractmethod
    async def score(self, trajectories: Sequence[Trajectory], lane: Lane) -> list[Outcome]:
        """An outcome for each trajectory, in their order.

        Calls overlap. A call is cancelled when its scores are no longer needed.
        """
        ...

    async def post_process(
        self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome], lane: Lane
    ) -> list[Outcome]:
        """New outcomes for a complete group's samples, in the order of their ids.

        Unchanged by default. A failure stays a failure.
        """
        return list(outcomes)
