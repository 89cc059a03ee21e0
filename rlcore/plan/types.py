"""What is asked for and what is offered. Plain frozen data: no torch, no process, no device.

What is decided of it stands in `rlcore.plan.decided`, what is known of machine and model in `rlcore.plan.facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlcore.config import EngineConfig, RunConfig
from rlcore.errors import OfferError
from rlcore.plan.checked import (
    check_above,
    check_call,
    check_choice,
    check_choices,
    check_distinct,
    check_flags,
    check_is,
    check_mapping,
    check_names,
    check_numbers,
    check_reference,
    check_references,
    check_settings,
    check_subclass,
    check_text_choice,
    check_texts,
    check_whole,
    refuse,
)
from rlcore.plan.facts import ModelFacts
from rlcore.plan.placement import placement_problem
from rlcore.types import SharedPrefix
from rlcore.workers import Worker, WorkerGroup

if TYPE_CHECKING:
    from rlcore.rollout import Generator
    from rlcore.tokens import Tokens
    from rlcore.workers import Children

W = TypeVar("W", bound=Worker)
W_co = TypeVar("W_co", bound=Worker, covariant=True)
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Scope(StrEnum):
    """How much of a step a function must see at once."""

    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


class Need(StrEnum):
    """What an algorithm needs beside rewards."""

    VALUES = "values"
    GREEDY_BASELINE = "greedy_baseline"
    REFERENCE = "reference"
    MINIBATCH_STATISTICS = "minibatch_statistics"
    GROUP = "group"
    """At least two samples of a prompt, because they are compared; whatever has `Scope.GROUP` needs it unsaid."""


class AlgorithmKind(StrEnum):
    """What an algorithm is."""

    ADVANTAGE = "advantage"
    POLICY_LOSS = "policy_loss"


@dataclass(frozen=True)
class Role(Generic[W]):
    """A job that needs workers, and the interface through which it is called."""

    name: str
    interface: type[W]

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_subclass(self, "interface", Worker)


@dataclass(frozen=True)
class WorkerRequest:
    """What a component needs workers for. Nobody but the component that stated it gets the workers."""

    role: Role[Any]
    backend: str
    pool: str = "main"
    replicas: int = 1
    ranks: int = 1
    """Processes per replica."""
    gpus: float = 0.0
    """Per rank."""
    cpus: float = 1.0
    """Per rank."""
    threads: int = 0
    """Compute threads per rank; 0 leaves it to `cluster.threads`."""
    inside: Role[Any] | None = None
    """Served in that role's process and thread, built with its worker as `WorkerContext.host`."""
    isolated: bool = False
    """May die and be restarted without ending the run: a process of its own."""
    references: Mapping[str, str] = field(default_factory=dict)
    """Functions for the worker, by purpose: {'loss': 'my_plugin.engine:value_loss'}."""
    device_frac: float = 0.0
    """Share of its device's memory that a rank reserves while it is awake; 0: what it needs is reckoned."""
    bytes_per_parameter: float = 0.0
    """Memory of a rank, in bytes a parameter of its model, activations left out; 0: not known, and said so."""
    model: ModelFacts | None = None
    """What is known of a model of its own; None: its model is that of `model.path`."""
    engine: EngineConfig | None = None
    """How the role trains its model: from it the planner reckons activations."""
    settings: str = ""
    """Where these settings stand in the configuration, for errors: 'plugins.mine'; empty: at the role's name."""
    shared_prefix: str = "none"
    """How it shares the prompt of a group: 'planned' leaves that to the planner, else a value of `SharedPrefix`."""
    cached_tokens: int = 0
    """Tokens whose keys and values a rank holds at most."""
    takes_adapter: bool = False
    """Of a rollout with a copy of the weights: a LoRA actor hands it the adapter alone, as files."""
    note: str = ""
    """A fact about this role that `rlcore plan` shows among its notes."""

    def __post_init__(self) -> None:
        check_is(self, "role", Role)
        check_is(self, "inside", Role, optional=True)
        check_texts(self, "backend")
        check_names(self, "pool")
        check_whole(self, 1, "replicas", "ranks")
        check_whole(self, 0, "threads", "cached_tokens")
        check_numbers(self, 0.0, "gpus", "cpus", "bytes_per_parameter")
        check_numbers(self, 0.0, "device_frac", most=1.0)
        check_flags(self, "isolated", "takes_adapter")
        check_references(self, "references")
        check_is(self, "model", ModelFacts, optional=True)
        check_is(self, "engine", EngineConfig, optional=True)
        check_is(self, "settings", str)
        check_is(self, "note", str)
        check_text_choice(self, "shared_prefix", ["planned", *SharedPrefix])
        if self.gpus > 1 and self.gpus != int(self.gpus):
            refuse(self, "gpus", "a share of one device, or a whole number of them")


def as_asked(config: RunConfig, section: Any, request: WorkerRequest) -> WorkerRequest:
    """The `complete` of a class that needs what was asked for it, and no more."""
    return request


WEIGHT_SYNCS = ("files", "link")
"""The values of `rollout.weights`."""


@dataclass(frozen=True)
class WorkerClass:
    """An offer: this class implements this interface under this backend name."""

    interface: type[Worker]
    backend: str
    cls: type[Worker]
    inside: Role[Any] | None = None
    """The class is served inside this role's worker and needs it as `WorkerContext.host`: an embedded rollout says
    ACTOR. The host has the same backend. The planner gives the request the same `inside`, so nobody reads it from a
    backend's name."""
    every_rank: bool = False
    """Inside a host of several ranks there is one of it in each, and each does its share (`WorkerContext.rank`)."""
    isolated: bool = False
    """It serves, and may die and be restarted: requests that it fills are `isolated`, whoever stated them."""
    complete: Callable[[RunConfig, Any, WorkerRequest], WorkerRequest] = as_asked
    """(config, section of the offer's plugin, request) -> the request with what the class needs: replicas, ranks, gpus,
    cpus, threads, pool and memory (`device_frac`, `bytes_per_parameter`, `cached_tokens`, `engine`, `model`). Pure; the
    same for every role. A pool other than `main` that was asked for stays, and so do role, backend, references and
    `isolated`; `inside` may be set where it is None."""
    weight_sync: frozenset[str] = frozenset({"files"})
    """Of a rollout that is not served inside the actor: the values of `rollout.weights` that it can take."""

    def __post_init__(self) -> None:
        check_subclass(self, "interface", Worker)
        check_subclass(self, "cls", Worker)
        check_texts(self, "backend")
        check_is(self, "inside", Role, optional=True)
        check_flags(self, "every_rank", "isolated")
        check_call(self, "complete", ["config", "section", "request"])
        if not isinstance(self.weight_sync, frozenset) or not self.weight_sync <= set(WEIGHT_SYNCS):
            refuse(self, "weight_sync", f"a frozenset of: {', '.join(WEIGHT_SYNCS)}")


@dataclass(frozen=True)
class PoolSpec:
    """An offer of devices that roles share. Sizes of 0 are derived from the requests.

    With `nodes` above 1 the ranks of each role are laid out over exactly that many nodes, evenly and in order.
    """

    name: str
    gpus_per_node: int = 0
    nodes: int = 1
    union_of: tuple[str, ...] = ()
    placement: str = "pack"
    """Where Ray puts the ranks of a pool that does not say `nodes`. pack: on as few nodes as it can; spread: on as many
    as it can; strict_spread: each on a node of its own; one_node: all on one."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that Ray may take: {'ray.io/accelerator-type': 'H100'}, '!H100' or 'in(H100, H200)'."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of Ray that each bundle reserves: {'fast_network': 1}. A bundle is the place of one rank; of a
    pool with `nodes` above 1, its part of a node."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_whole(self, 0, "gpus_per_node")
        check_whole(self, 1, "nodes")
        check_distinct(self, "union_of")
        if problem := placement_problem(self.placement, self.labels, self.resources):
            raise OfferError(f"PoolSpec '{self.name}': {problem}")


def no_requests(config: RunConfig, section: Any) -> Sequence[WorkerRequest]:
    """The `requests` of a component that needs no workers."""
    return ()


@dataclass(frozen=True)
class RewardPart:
    """A named part of the reward that a reward manager brings beside `reward.functions`, for whoever reads the plan."""

    name: str
    weight: float
    scope: Scope
    deadline_s: float
    kind: str
    """What gives the score, in a word: 'judge'."""
    served_by: str
    """Where: an address, or the name of the role that the component states for it."""
    on_failure: str = ""
    """What follows when there is no score; empty where that is not said of a part."""

    def __post_init__(self) -> None:
        check_texts(self, "name", "kind", "served_by")
        check_numbers(self, None, "weight")
        check_choice(self, "scope", Scope)
        check_above(self, 0.0, "deadline_s")
        check_is(self, "on_failure", str)


def no_parts(config: RunConfig, section: Any) -> Sequence[RewardPart]:
    """The `reward_parts` of a component that brings none."""
    return ()


@dataclass(frozen=True)
class Component(Generic[T_co]):
    """An offer to fill a slot: agents, reward or critic."""

    name: str
    build: Callable[[BuildContext], T_co]
    requests: Callable[[RunConfig, Any], Sequence[WorkerRequest]] = no_requests
    reward_parts: Callable[[RunConfig, Any], Sequence[RewardPart]] = no_parts
    """Of a reward manager: the parts of the reward that it brings itself. The plan shows them."""
    uses_reward_functions: bool = False
    """Of a reward manager: it computes `reward.functions`. A run that configures them needs one that does."""

    def __post_init__(self) -> None:
        check_texts(self, "name")
        check_call(self, "build", ["context"])
        check_call(self, "requests", ["config", "section"])
        check_call(self, "reward_parts", ["config", "section"])
        check_flags(self, "uses_reward_functions")


@dataclass(frozen=True)
class RewardFunction:
    """An offer of a reward function, by reference; `reward.functions.<x>.fn` names it.

    A function, class or factory with a parameter `settings` gets the plugin's section of the configuration.
    """

    name: str
    reference: str
    """'module:attr'."""
    scope: Scope = Scope.SAMPLE
    deadline_s: float | None = None
    """Seconds a call may take, where the config does not say."""

    def __post_init__(self) -> None:
        check_texts(self, "name")
        check_reference(self, "reference")
        check_choice(self, "scope", Scope)
        if self.deadline_s is not None:
            check_above(self, 0.0, "deadline_s")


@dataclass(frozen=True)
class Algorithm:
    """An offer of an advantage estimator or policy loss, by reference; `algo.advantage`, `algo.policy_loss` name it."""

    name: str
    kind: AlgorithmKind
    reference: str
    scope: Scope
    needs: frozenset[Need] = frozenset()
    per_token: bool = False
    """An estimator that returns (B, T) advantages instead of (B,)."""
    selection: str = ""
    """Reference of a function that picks tokens out of a whole mini-batch for a policy loss that treats them
    differently: `rlcore.algo.covariance`. Such a loss needs MINIBATCH_STATISTICS."""

    def __post_init__(self) -> None:
        check_texts(self, "name")
        check_choice(self, "kind", AlgorithmKind)
        check_reference(self, "reference")
        check_choice(self, "scope", Scope)
        check_choices(self, "needs", Need)
        check_flags(self, "per_token")
        if self.selection != "":
            check_reference(self, "selection")


@dataclass(frozen=True)
class ConfigSection:
    """A section of the configuration: a frozen dataclass, and defaults that its plugin sets elsewhere in the config."""

    name: str
    """Of a plugin: the plugin's name, found at `plugins.<name>`. The core's own stand at the top level."""
    type: type[Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the main config, below the user's files: {'reward.manager': 'judges'}."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_settings(self, "type")
        check_mapping(self, "defaults")


@dataclass(frozen=True)
class Provider:
    """Who made an offer."""

    plugin: str
    distribution: str
    """The distribution's name, or the path of a plain file."""
    version: str
    kind: str = "plugin"
    """'plugin', or 'entry point' of the group rlcore.rewards."""

    def __str__(self) -> str:
        return f"{self.kind} '{self.plugin}' ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Offer(Generic[T]):
    """An offer with its provider."""

    value: T
    provider: Provider


@dataclass(frozen=True)
class BuildContext:
    """What a component is built with. It reaches its own workers only."""

    config: RunConfig
    section: Any
    """The settings section of the plugin that offered the component, or None."""
    workers: Callable[[Role[Any]], WorkerGroup[Any]]
    """The workers of one of the component's own roles; PlanError for any other."""
    generator: Generator | None
    """The rollout service; None while the rollout's own component is built."""
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
    """Tokens of a prompt and its response together, at most, as the rollout says; None when it does not."""


@dataclass(frozen=True)
class ResolvedReward:
    """A configured reward function, with where to import it from and the settings that hold."""

    name: str
    reference: str
    """'module:attr' or '/abs/file.py:attr'."""
    provided_by: str
    weight: float
    scope: Scope
    deadline_s: float
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    settings: Any = None
    """The settings section of the plugin that offers it, for a function that takes `settings`; None without one."""
    is_factory: bool = False
    """As its source says, a call of it with `kwargs` returns the function; False also where that is not known yet."""
    post_process: str = ""
    """Where to import the function from that looks at a group's scores; empty: none."""
