"""A reward function where it runs: loaded by reference, called in its own style, its results checked.

Sync functions are served like this in a child process, async ones on the run's loop. Only what a child may import is
imported here.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from rlcore.child import load_reference
from rlcore.errors import PluginError, RewardError, boundary
from rlcore.reward.outcome import Outcome, outcome_of_one, outcomes_of_many
from rlcore.reward.signature import Style, read_signature
from rlcore.types import Message, Prompt, Trajectory

NO_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state")
"""Names that mean something else in a call."""


@dataclass(frozen=True)
class FunctionSpec:
    """What is needed to load and call a function; picklable."""

    name: str
    reference: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scope: str = "sample"
    answer_columns: Mapping[str, str] = field(default_factory=dict)
    """By source, what the user calls the answer's column."""
    max_steps: int = 0

    def __str__(self) -> str:
        return f"reward function '{self.name}' ({self.reference})"


def _load(spec: FunctionSpec) -> Any:
    """What the reference names; PluginError that says whose reference it is."""
    try:
        return load_reference(spec.reference)
    except PluginError as error:
        raise PluginError(f"reward function '{spec.name}': {error}") from error


class ServedReward:
    """One loaded function. In a child, making the object also makes the function ready."""

    def __init__(self, spec: FunctionSpec) -> None:
        self.spec = spec
        with boundary(str(spec), PluginError):
            self._target = _load(spec)
        self.signature = read_signature(spec.name, self._target, spec.kwargs, spec.scope)
        self._object: Any = None
        self._call = self._target
        if not self.signature.is_async:
            self._construct()
            pending = self._life_cycle("setup")
            if inspect.isawaitable(pending):
                raise PluginError(f"{spec}: setup is async and score is not; make both one kind")

    def is_async(self) -> bool:
        """Whether the function runs on the run's loop; nothing has been set up then."""
        return self.signature.is_async

    def score(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """An outcome for each trajectory, from one call; what the function raises passes."""
        args, kwargs = self._arguments(trajectories)
        return self._outcomes(self._call(*args, **kwargs), trajectories)

    async def setup_here(self) -> None:
        """Make an async function ready."""
        self._construct()
        pending = self._life_cycle("setup")
        if inspect.isawaitable(pending):
            with boundary(f"{self.spec}: setup", PluginError):
                await pending

    async def score_here(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """`score` of an async function."""
        args, kwargs = self._arguments(trajectories)
        return self._outcomes(await self._call(*args, **kwargs), trajectories)

    async def close_here(self) -> None:
        """`close` of an async function."""
        pending = self._life_cycle("close")
        if inspect.isawaitable(pending):
            with boundary(f"{self.spec}: close", PluginError):
                await pending

    def close(self) -> None:
        """Let a class let go of what it holds."""
        self._life_cycle("close")

    def _construct(self) -> None:
        if self.signature.is_class:
            with boundary(f"{self.spec}: its constructor", PluginError):
                self._object = self._target(**self.spec.kwargs)
            self._call = self._object.score

    def _life_cycle(self, method: str) -> Any:
        """Call `setup` or `close` of a class that has it."""
        call = getattr(self._object, method, None)
        if not callable(call):
            return None
        with boundary(f"{self.spec}: {method}", PluginError):
            return call()

    def _arguments(self, trajectories: Sequence[Trajectory]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = {} if self.signature.is_class else dict(self.spec.kwargs)
        if self.signature.style is Style.TRAJECTORY:
            return (trajectories[0],), own
        if self.signature.style is Style.TRAJECTORIES:
            return (list(trajectories),), own
        if self.signature.style is Style.COMPUTE_SCORE:
            named = score_arguments(trajectories[0])
            return (), {key: value for key, value in named.items() if key in self.signature.names} | own
        named = column_arguments(trajectories, self.spec)
        missing = sorted(self.signature.required - named.keys() - own.keys())
        if missing:
            sources = sorted({each.prompt.source for each in trajectories})
            columns = sorted(named.keys() - set(NO_COLUMNS))
            raise RewardError(
                f"needs the columns {', '.join(missing)}, which source {', '.join(sources)} does not have; "
                f"it has: {', '.join(columns)}"
            )
        return (), {key: value for key, value in named.items() if self.signature.takes(key)} | own

    def _outcomes(self, value: Any, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        lengths = [len(each.token_ids) for each in trajectories]
        if self.signature.takes_many:
            return outcomes_of_many(value, lengths)
        return [outcome_of_one(value, lengths[0], may_skip=False)]


def column_arguments(trajectories: Sequence[Trajectory], spec: FunctionSpec) -> dict[str, Any]:
    """Arguments in the style of TRL: a list for each column, None where a row's source has no such column."""
    rows = [_columns(each.prompt, spec.answer_columns) for each in trajectories]
    names = dict.fromkeys(name for row in rows for name in row)
    named: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names if name not in NO_COLUMNS}
    named["prompts"] = [_prompt(each.prompt) for each in trajectories]
    named["completions"] = [_completion(each) for each in trajectories]
    named["completion_ids"] = [each.token_ids[each.prompt_length :].tolist() for each in trajectories]
    latest = max((version for each in trajectories for _, version in each.versions), default=0)
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


def _prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
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
