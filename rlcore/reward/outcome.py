"""Turns the results of reward functions into checked outcomes: anything but a finite number is a named failure."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlcore.contracts.scorer import (
    LARGEST,
    SKIPPED,
    Outcome,
    as_plain,
    exact_text,
    extra_value_problem,
    failed,
    number,
    shown,
)
from rlcore.errors import CALLED, describe
from rlcore.types import Reward, RewardStatus

ANSWERS = ("answer", "pred")
"""Entries returned with the score that hold the extracted answer; they are not metrics, even if they are numbers."""


def outcome_of_one(value: Any, num_tokens: int, may_skip: bool) -> Outcome:
    """A function's result for one sample of `num_tokens` tokens, as an Outcome; never raises.

    None is SKIPPED for a list signature, else a failure.
    """
    if type(value) is float and -LARGEST <= value <= LARGEST:  # fast path for the most common result
        return Outcome(RewardStatus.OK, value)
    if value is None and may_skip:
        return SKIPPED
    try:
        return _read(value, num_tokens)
    except CALLED as cause:  # its class may have arbitrary methods
        return failed(f"returned a {type(value).__name__} that cannot be read: {describe(cause)}")


def _read(value: Any, num_tokens: int) -> Outcome:
    if isinstance(value, Reward):
        return _outcome_of_reward(value, num_tokens)
    if isinstance(value, Mapping):
        return _outcome_of_mapping(value)
    score = number(value)
    return failed(score) if isinstance(score, str) else Outcome(RewardStatus.OK, score)


def outcome_of_score(value: Any, num_tokens: int) -> Outcome:
    """`outcome_of_one` for verl's compute_score, which may also return a tuple that begins with the score.

    The rest goes to info: the entries of a dict, anything else as the list `details`.
    """
    if not isinstance(value, tuple):
        return outcome_of_one(value, num_tokens, may_skip=False)
    if not value:
        return failed("returned an empty tuple; needs a number, or a tuple that begins with one")
    if isinstance(value[0], (Mapping, Reward)):
        return failed(f"returned a tuple that begins with a {type(value[0]).__name__}; needs a number there")
    outcome = outcome_of_one(value[0], num_tokens, may_skip=False)
    if outcome.status is RewardStatus.FAILED:
        return failed(f"the first of the tuple: {outcome.error}")
    if (wrong := extra_value_problem(value)) is not None:
        return failed(f"returned {wrong}")
    extra = {key: member for more in value[1:] if isinstance(more, Mapping) for key, member in more.items()}
    details = [as_plain(part) for part in value[1:] if not isinstance(part, Mapping)]
    with_extra = _outcome_of_mapping({**extra, "score": outcome.score})
    return replace(with_extra, info={**with_extra.info, "details": details}) if details else with_extra


def outcomes_of_many(value: Any, num_tokens: list[int], may_skip: bool = True) -> list[Outcome]:
    """The result of a list signature for one call, one Outcome per sample; a list of another length fails all."""
    wrong = _wrong_list(value, len(num_tokens))
    if wrong:
        return [failed(wrong)] * len(num_tokens)
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    return [outcome_of_one(value, length, may_skip) for value, length in zip(values, num_tokens, strict=True)]


def _wrong_list(value: Any, wanted: int) -> str:
    is_vector = hasattr(value, "tolist") and getattr(value, "ndim", None) == 1
    if not is_vector and not isinstance(value, (list, tuple)):
        return f"returned {shown(value)}; needs a list of {wanted} numbers"
    return "" if len(value) == wanted else f"returned a list of {len(value)} for {wanted} samples"


def _outcome_of_reward(value: Reward, num_tokens: int) -> Outcome:
    if value.status is RewardStatus.SKIPPED:
        return SKIPPED
    if (wrong := extra_value_problem(value.info) or extra_value_problem(value.components)) is not None:
        return failed(f"returned {wrong}")
    info = {exact_text(key): as_plain(member) for key, member in value.info.items()}
    if value.status is RewardStatus.FAILED:
        return failed(str(info.get("error") or "returned a Reward with status FAILED and no info['error']"))
    score = number(value.score)
    if isinstance(score, str):
        return failed(score)
    parts = {exact_text(name): number(part) for name, part in value.components.items()}
    checked = {name: part for name, part in parts.items() if not isinstance(part, str)}
    for name, part in parts.items():
        if isinstance(part, str):
            return failed(f"part '{name}': {part}")
    if value.token_scores is None:
        return Outcome(RewardStatus.OK, score, components=checked, info=info)
    with np.errstate(over="ignore"):  # what no float32 holds is infinite, and refused below
        token_scores = np.asarray(value.token_scores, dtype=np.float32)
    if token_scores.shape != (num_tokens,):
        return failed(f"token_scores have shape {token_scores.shape}; needs ({num_tokens},)")
    if not np.isfinite(token_scores).all():
        return failed("token_scores hold numbers that are not finite")
    return Outcome(RewardStatus.OK, score, components=checked, info=info, token_scores=token_scores)


def _outcome_of_mapping(value: Mapping[str, Any]) -> Outcome:
    if "score" not in value:
        return failed(f"returned a dict without 'score'; it has {sorted(map(str, value))[:10]}")
    score = number(value["score"])
    if isinstance(score, str):
        return failed(f"'score': {score}")
    if (wrong := extra_value_problem(value)) is not None:
        return failed(f"returned {wrong}")
    info = {exact_text(key): as_plain(part) for key, part in value.items() if key != "score"}
    parts = {key: float(value) for key, value in info.items() if key not in ANSWERS and _is_measure(value)}
    if "answer" not in info and "pred" in info:
        info["answer"] = info["pred"]
    return Outcome(RewardStatus.OK, score, components=parts, info=info)


def _is_measure(value: Any) -> bool:
    """True if an entry returned with the score is a number that can be averaged over samples, such as verl's `acc`."""
    return isinstance(value, (bool, int, float)) and not isinstance(number(value), str)
