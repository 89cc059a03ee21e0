"""Builds reward functions' arguments: a sample as columns in TRL's style, or by the names of verl's compute_score."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rlcore.contracts.scorer import Outcome
from rlcore.errors import RewardError
from rlcore.reward.signature import SETTINGS, TRL_NAMES
from rlcore.reward.spec import FunctionSpec
from rlcore.types import Message, Prompt, RewardStatus, Trajectory

NO_COLUMNS = ("prompt", "completion", "environments", SETTINGS, *TRL_NAMES)
"""Names that mean something else in a call."""


def group_arguments(call: Callable[..., Any], trajectories: Sequence[Trajectory], spec: FunctionSpec) -> dict[str, Any]:
    """The arguments of `post_process_scores` by name, besides its first, the scores: columns, as a list signature's.

    RewardError for a column that the data does not have.
    """
    [_, *others] = inspect.signature(call).parameters.values()
    named = column_arguments(trajectories, spec)
    needed = [other for other in others if other.default is other.empty and other.kind is other.POSITIONAL_OR_KEYWORD]
    missing = sorted(name.name for name in needed if name.name not in named)
    if missing:
        raise RewardError(f"post_process_scores {no_columns(missing, named, trajectories)}")
    return _taken(others, named)


def log_arguments(
    call: Callable[..., Any], trajectory: Trajectory, outcome: Outcome, latency_s: float
) -> dict[str, Any]:
    """The arguments that `log` takes by name. `latency` is in seconds; `score` is None if the call gave none."""
    known = {
        **score_arguments(trajectory),
        "query": prompt_of(trajectory.prompt),
        "response": trajectory.text(),
        "score": outcome.score if outcome.status is RewardStatus.OK else None,
        "latency": latency_s,
        "details": outcome.info.get("details", []),
    }
    return _taken(list(inspect.signature(call).parameters.values()), known)


def _taken(parameters: Sequence[inspect.Parameter], named: Mapping[str, Any]) -> dict[str, Any]:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(named)
    return {parameter.name: named[parameter.name] for parameter in parameters if parameter.name in named}


def no_columns(missing: Sequence[str], named: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> str:
    """The error about columns that a function needs and the data does not have."""
    sources = sorted({trajectory.prompt.source for trajectory in trajectories})
    columns = sorted(named.keys() - set(NO_COLUMNS))
    return (
        f"needs the columns {', '.join(missing)}, which source {', '.join(sources)} does not have; "
        f"it has: {', '.join(columns)}"
    )


def column_arguments(trajectories: Sequence[Trajectory], spec: FunctionSpec) -> dict[str, Any]:
    """Arguments in the style of TRL: a list per column, with None for rows whose source does not have the column."""
    rows = [_columns(trajectory.prompt, spec.answer_columns) for trajectory in trajectories]
    names = dict.fromkeys(name for row in rows for name in row)
    named: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names if name not in NO_COLUMNS}
    named["prompts"] = [prompt_of(trajectory.prompt) for trajectory in trajectories]
    named["completions"] = [_completion(trajectory) for trajectory in trajectories]
    named["completion_ids"] = [trajectory.token_ids[trajectory.prompt_length :].tolist() for trajectory in trajectories]
    latest = max((version for trajectory in trajectories for _, version in trajectory.versions), default=0)
    named["trainer_state"] = SimpleNamespace(
        global_step=latest, epoch=trajectories[0].id.epoch, max_steps=spec.max_steps
    )
    return named


def score_arguments(trajectory: Trajectory) -> dict[str, Any]:
    """Arguments in the style of verl's compute_score."""
    prompt = trajectory.prompt
    model = prompt.columns.get("reward_model")
    truth = prompt.answer
    if truth is None and isinstance(model, Mapping):
        truth = model.get("ground_truth")
    extra = prompt.columns.get("extra_info")
    return {
        "data_source": prompt.columns.get("data_source", prompt.source),
        "solution_str": trajectory.text(),
        "ground_truth": truth,
        "extra_info": dict(extra) if isinstance(extra, Mapping) else _columns(prompt, {}),
    }


def _columns(prompt: Prompt, answer_columns: Mapping[str, str]) -> dict[str, Any]:
    """The row's columns; the answer goes by each of its usual names, and by the user's."""
    row = dict(prompt.columns)
    row.setdefault("source", prompt.source)
    for name in ("answer", "solution", "ground_truth", answer_columns.get(prompt.source, "")):
        if name:
            row.setdefault(name, prompt.answer)
    return row


def prompt_of(prompt: Prompt) -> str | list[dict[str, Any]]:
    """The prompt as the row had it: messages, or the string that became the last of them."""
    if prompt.conversational or not prompt.messages:
        return _thawed(prompt.messages)
    return str(prompt.messages[-1].get("content", ""))


def _completion(trajectory: Trajectory) -> str | list[dict[str, Any]]:
    """The completion: messages of an agent or a conversational row, else a string."""
    if not isinstance(trajectory.completion, str):
        return _thawed(trajectory.completion)
    if trajectory.prompt.conversational:
        return [{"role": "assistant", "content": trajectory.completion}]
    return trajectory.completion


def _thawed(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]
