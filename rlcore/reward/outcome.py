"""What one function said of one sample, checked: a number is a finite number, and anything else is a named failure."""

import inspect
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlcore.types import Float32s, Reward, RewardStatus

ANSWERS = ("answer", "pred")
"""Entries beside the score that are what was extracted, and no measure, also where that is a number."""
LARGEST = float(np.finfo(np.float32).max)
MAX_DEPTH = 32
"""Levels of what stands beside a score; what is nested deeper would end whoever walks it by recursion."""
SHOWN = (bool, int, float, complex, str, list, tuple, dict)
"""Types of which an error may show a short repr; that of others may be slow, huge, or somebody's own code."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """A function's opinion of a sample. Plain values only: it crosses from a child process."""

    status: RewardStatus
    score: float = 0.0
    error: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Scores within the function's own, for the metrics."""
    info: Mapping[str, Any] = field(default_factory=dict)
    token_scores: Float32s | None = None


SKIPPED = Outcome(RewardStatus.SKIPPED)


TOO_DEEP = f"returned what is nested more than {MAX_DEPTH} levels deep"


def failed(error: str) -> Outcome:
    """No usable score, and why."""
    return Outcome(RewardStatus.FAILED, error=error)


def number(value: Any) -> float | str:
    """The value as a finite float, or what is wrong with it. bool counts as 0 or 1; numpy and torch scalars pass."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return f"returned {shown(value)}; a number is needed"
    if getattr(value, "ndim", 0):
        return f"returned an array of shape {tuple(value.shape)}; a number is needed"
    try:
        converted = float(value)
    except (TypeError, ValueError, OverflowError) as cause:
        return f"returned {shown(value)}, which is no number: {cause}"
    if not math.isfinite(converted):
        return f"returned {converted}; a finite number is needed"
    return converted if abs(converted) <= LARGEST else f"returned {converted}, which no float32 can hold"


def outcome_of_one(value: Any, num_tokens: int, may_skip: bool) -> Outcome:
    """What a function returned for one sample of `num_tokens` tokens, as an Outcome; never raises.

    None is SKIPPED where the signature is a list's, else a failure.
    """
    if type(value) is float and -LARGEST <= value <= LARGEST:  # what most return, at a glance
        return Outcome(RewardStatus.OK, value)
    if value is None and may_skip:
        return SKIPPED
    if isinstance(value, Reward):
        return _outcome_of_reward(value, num_tokens)
    if isinstance(value, Mapping):
        return _outcome_of_mapping(value)
    score = number(value)
    return failed(score) if isinstance(score, str) else Outcome(RewardStatus.OK, score)


def outcome_of_score(value: Any, num_tokens: int) -> Outcome:
    """`outcome_of_one` of verl's compute_score, which may also return a tuple that begins with the score.

    What follows is in info: the entries of a dict, the rest as the list `details`.
    """
    if not isinstance(value, tuple):
        return outcome_of_one(value, num_tokens, may_skip=False)
    if not value:
        return failed("returned an empty tuple; a number, or a tuple that begins with one, is needed")
    if isinstance(value[0], (Mapping, Reward)):
        return failed(f"returned a tuple that begins with a {type(value[0]).__name__}; a number is needed there")
    outcome = outcome_of_one(value[0], num_tokens, may_skip=False)
    if outcome.status is RewardStatus.FAILED:
        return failed(f"the first of the tuple: {outcome.error}")
    extra = {key: each for more in value[1:] if isinstance(more, Mapping) for key, each in more.items()}
    details = [plain(each) for each in value[1:] if not isinstance(each, Mapping)]
    with_extra = _outcome_of_mapping({**extra, "score": outcome.score})
    return replace(with_extra, info={**with_extra.info, "details": details}) if details else with_extra


def outcomes_of_many(value: Any, num_tokens: list[int], may_skip: bool = True) -> list[Outcome]:
    """What a list signature returned for one call, an Outcome for each sample; a list of another length fails all."""
    wrong = _wrong_list(value, len(num_tokens))
    if wrong:
        return [failed(wrong)] * len(num_tokens)
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    return [outcome_of_one(each, length, may_skip) for each, length in zip(values, num_tokens, strict=True)]


def _wrong_list(value: Any, wanted: int) -> str:
    is_vector = hasattr(value, "tolist") and getattr(value, "ndim", None) == 1
    if not is_vector and not isinstance(value, (list, tuple)):
        return f"returned {shown(value)}; a list of {wanted} numbers is needed"
    return "" if len(value) == wanted else f"returned a list of {len(value)} for {wanted} samples"


def _outcome_of_reward(value: Reward, num_tokens: int) -> Outcome:
    if value.status is RewardStatus.SKIPPED:
        return SKIPPED
    if too_deep(value.info):
        return failed(TOO_DEEP)
    info = {str(key): plain(each) for key, each in value.info.items()}
    if value.status is RewardStatus.FAILED:
        return failed(str(info.get("error") or "returned a Reward with status FAILED and no info['error']"))
    score = number(value.score)
    if isinstance(score, str):
        return failed(score)
    parts = {str(name): number(part) for name, part in value.components.items()}
    checked = {name: part for name, part in parts.items() if not isinstance(part, str)}
    for name, part in parts.items():
        if isinstance(part, str):
            return failed(f"part '{name}': {part}")
    if value.token_scores is None:
        return Outcome(RewardStatus.OK, score, parts=checked, info=info)
    token_scores = np.asarray(value.token_scores, dtype=np.float32)
    if token_scores.shape != (num_tokens,):
        return failed(f"token_scores have shape {token_scores.shape}; ({num_tokens},) is needed")
    if not np.isfinite(token_scores).all():
        return failed("token_scores hold numbers that are not finite")
    return Outcome(RewardStatus.OK, score, parts=checked, info=info, token_scores=token_scores)


def _outcome_of_mapping(value: Mapping[str, Any]) -> Outcome:
    if "score" not in value:
        return failed(f"returned a dict without 'score'; it has {sorted(map(str, value))[:10]}")
    score = number(value["score"])
    if isinstance(score, str):
        return failed(f"'score': {score}")
    if too_deep(value):
        return failed(TOO_DEEP)
    info = {str(key): plain(each) for key, each in value.items() if key != "score"}
    parts = {key: float(each) for key, each in info.items() if key not in ANSWERS and _is_measure(each)}
    if "answer" not in info and "pred" in info:
        info["answer"] = info["pred"]
    return Outcome(RewardStatus.OK, score, parts=parts, info=info)


def too_deep(value: Any) -> bool:
    """True where lists and mappings are nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return list(value.flat) if isinstance(value, np.ndarray) and value.dtype.hasobject else ()


def _is_measure(value: Any) -> bool:
    """Whether an entry beside the score is a number that can be averaged over samples, as verl's `acc`."""
    return isinstance(value, (bool, int, float)) and not isinstance(number(value), str)


def plain(value: Any) -> Any:
    """A value that pickles without its library and can be logged: scalars as they are, arrays as lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value)


def shown(value: Any) -> str:
    """A value in an error: its type, and itself when it is short."""
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
