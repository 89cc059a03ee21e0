"""Components: objects that fill the slots of the trainer, and the context from which they are built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlcore.config import RunConfig
from rlcore.contracts.plugin_settings import settings_as
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors.checks.data import (
    check_above,
    check_call,
    check_choice,
    check_flags,
    check_is,
    check_numbers,
    check_texts,
)

if TYPE_CHECKING:
    from rlcore.contracts.children import Children
    from rlcore.contracts.rollout import Generator
    from rlcore.contracts.tokens import Tokens

from rlcore.contracts.offers import Scope
from rlcore.contracts.requests import Role, WorkerRequest

T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S")


def no_requests(config: RunConfig, section: Any) -> Sequence[WorkerRequest]:
    """The default `requests`: none, because the component needs no workers."""
    return ()


@dataclass(frozen=True)
class RewardComponent:
    """A named part of the reward that a reward manager adds to `reward.functions`; `rlcore plan` lists it."""

    name: str
    weight: float
    scope: Scope
    deadline_s: float
    kind: str
    """One word for the sort of scorer, such as 'judge'."""
    served_by: str
    """The address that computes the score, or the name of the component's role that does."""
    on_failure: str = ""
    """The policy for samples without a score, such as 'drop_sample'; empty where the component states none."""

    def __post_init__(self) -> None:
        check_texts(self, "name", "kind", "served_by")
        check_numbers(self, None, "weight")
        check_choice(self, "scope", Scope)
        check_above(self, 0.0, "deadline_s")
        check_is(self, "on_failure", str)


def no_components(config: RunConfig, section: Any) -> Sequence[RewardComponent]:
    """The default `reward_components`: none."""
    return ()


@dataclass(frozen=True)
class Component(Generic[T_co]):
    """An offer to fill a slot: agents, reward or critic."""

    name: str
    build: Callable[[BuildContext], T_co]
    requests: Callable[[RunConfig, Any], Sequence[WorkerRequest]] = no_requests
    reward_components: Callable[[RunConfig, Any], Sequence[RewardComponent]] = no_components
    """For a reward manager: the components of the reward that it adds; the plan lists them."""
    uses_reward_functions: bool = False
    """For a reward manager: it computes `reward.functions`. A run that configures functions needs such a manager."""

    def __post_init__(self) -> None:
        check_texts(self, "name")
        check_call(self, "build", ["context"])
        check_call(self, "requests", ["config", "section"])
        check_call(self, "reward_components", ["config", "section"])
        check_flags(self, "uses_reward_functions")


@dataclass(frozen=True)
class BuildContext:
    """The input of a component's `build`. It gives access only to the component's workers."""

    config: RunConfig
    section: object
    """The settings section of the plugin that offered the component, or None; `settings` reads it as its class."""
    workers: Callable[[Role[Any]], WorkerGroup[Any]]
    """The workers of one of the component's roles; PlanError for any other."""
    generator: Generator | None
    """The rollout service; None while the rollout's component is built."""
    reward_functions: Mapping[str, ResolvedReward]
    """`reward.functions` by name, each matched with its offer, file or module."""
    tokens: Tokens
    """The tokenizer and chat template of the run."""
    children: Children
    """Starts killable child processes."""
    run_dir: Path
    seed: int
    metrics: Callable[[str, float], None]
    """Records a metric of the current step."""
    context_length: int | None = None
    """The most tokens of a prompt with its response, from the rollout; None if unknown."""

    def settings(self, cls: type[S]) -> S:
        """The plugin's settings section; PluginError where it is not a `cls`."""
        return settings_as("the component", self.section, cls)


@dataclass(frozen=True)
class ResolvedReward:
    """A configured reward function, with its import string and the settings in force."""

    name: str
    target: str
    """'module:attr' or '/abs/file.py:attr'."""
    provided_by: str
    weight: float
    scope: Scope
    deadline_s: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    settings: object = None
    """For a function that takes `settings`: the settings section of the plugin that offers it; None without one."""
    is_factory: bool = False
    """True if its source shows that a call with `kwargs` returns the function; False while that is unknown."""
    post_process: str = ""
    """The import string of the function that replaces a group's scores; empty: none."""
