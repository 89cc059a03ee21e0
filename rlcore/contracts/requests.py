"""Requests of components: workers for a role, and facts about their model. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlcore.config import EngineConfig
from rlcore.contracts.workers import Worker
from rlcore.errors.checks.data import (
    check_flags,
    check_frozen,
    check_is,
    check_names,
    check_numbers,
    check_subclass,
    check_targets,
    check_text_choice,
    check_texts,
    check_whole,
    refuse,
)
from rlcore.types import SharedPrefix

W = TypeVar("W", bound=Worker)


@dataclass(frozen=True)
class Role(Generic[W]):
    """A kind of work that needs workers, and the interface through which they are called."""

    name: str
    interface: type[W]

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_subclass(self, "interface", Worker)


@dataclass(frozen=True)
class WorkerRequest:
    """Workers that a component needs for one role. Only that component reaches them."""

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
    embedded_in: Role[Any] | None = None
    """The role in whose process and thread this one is served; that role's worker is its `WorkerContext.host`."""
    isolated: bool = False
    """Each replica runs in a separate process, which may die and be restarted without ending the run."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Functions for the worker, by purpose: {'loss': 'my_plugin.engine:value_loss'}."""
    device_frac: float = 0.0
    """Share of its device's memory that a rank reserves while it is awake; 0: the planner estimates its memory."""
    asleep_bytes: int = 0
    """Memory that a rank keeps on each of its devices while asleep, such as CUDA graphs; the CUDA context of its
    process is counted separately."""
    bytes_per_parameter: float = 0.0
    """Memory of a rank in bytes per parameter of its model, without activations; 0: unknown, and the plan says so."""
    model: ModelFacts | None = None
    """Facts about the role's model; None: it is the model of `model.path`."""
    engine: EngineConfig | None = None
    """Settings with which the role trains or scores with its model; the planner estimates activations from them."""
    trains: bool = True
    """For a role with an `engine`; False: it computes passes only, without gradients and optimizer state."""
    settings: str = ""
    """The configuration key of these settings, for errors: 'plugins.mine'; empty: the role's name."""
    shared_prefix: str = "none"
    """Method of sharing a group's prompt, a value of `SharedPrefix`; 'planned' leaves the choice to the planner."""
    cached_tokens: int = 0
    """The most tokens whose keys and values a rank holds."""
    takes_adapter: bool = False
    """For a rollout with a copy of the weights: a LoRA actor syncs only the adapter, as files."""
    spec: object = None
    """Frozen data that describes the service of the workers. The role's interface defines its type, such as
    `RewardModel` for RewardReplica."""
    note: str = ""
    """A fact about this role that `rlcore plan` shows among its notes."""
    nodes_key: str = ""
    """The configuration key that gives a replica more nodes, for advice in errors; empty: a replica stays on one."""

    def __post_init__(self) -> None:
        check_is(self, "role", Role)
        check_is(self, "embedded_in", Role, optional=True)
        check_texts(self, "backend")
        check_names(self, "pool")
        check_whole(self, 1, "replicas", "ranks")
        check_whole(self, 0, "threads", "cached_tokens", "asleep_bytes")
        check_numbers(self, 0.0, "gpus", "cpus", "bytes_per_parameter")
        check_numbers(self, 0.0, "device_frac", most=1.0)
        check_flags(self, "isolated", "takes_adapter", "trains")
        check_targets(self, "targets")
        check_is(self, "model", ModelFacts, optional=True)
        check_is(self, "engine", EngineConfig, optional=True)
        check_is(self, "settings", str)
        check_frozen(self, "spec")
        check_is(self, "note", str)
        check_is(self, "nodes_key", str)
        check_text_choice(self, "shared_prefix", ["planned", *SharedPrefix])
        if self.gpus > 1 and self.gpus != int(self.gpus):
            refuse(self, "gpus", "a share of one device, or a whole number of them")


@dataclass(frozen=True)
class Experts:
    """The feed-forward layers of a decoder that are mixtures of experts."""

    number: int
    """Number of experts of a layer."""
    per_token: int
    """Number of experts that a router chooses per token."""
    inner_size: int
    """Inner size of an expert."""
    layers: int
    """Number of layers with experts."""
    shared_size: int = 0
    """Inner size of the experts of a layer that every token goes through."""
    computed: int = 0
    """Number of experts that transformers computes per token; 0: those that the router chooses."""


@dataclass(frozen=True)
class Latents:
    """Sizes of an attention that computes keys and values from latents (arXiv:2405.04434), which engines cache:
    transformers does so in recent releases."""

    query_rank: int
    """Size of the latent that queries are computed from; 0: they have none."""
    key_rank: int
    """Size of the latent that keys and values are computed from."""
    rotated: int
    """Size of the part of a key that has a position, which all heads share."""
    head_size: int
    """Size of a query and of a key."""
    value_size: int
    """Size of a value."""

    @property
    def cached_size(self) -> int:
        """Numbers per token and layer in a cache."""
        return self.key_rank + self.rotated


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder, from its config.json."""

    model_type: str
    layers: int
    hidden_size: int
    inner_size: int
    """Inner size of the feed-forward layers, other than those with experts."""
    kv_size: int
    """Number of key heads times the size of a head."""
    vocabulary: int
    full_attention: bool
    """Every layer attends to all earlier tokens: no sliding window, no recurrent state, no soft cap."""
    query_size: int = 0
    """Number of query heads times the size of a head; 0: the same as the hidden size."""
    heads: int = 0
    """Number of query heads; 0: unknown."""
    window: int = 0
    """Tokens that a layer with a sliding window or chunks attends to at most, the token itself included; 0: all."""
    windowed_layers: int = 0
    """Number of layers with a sliding window or chunks."""
    full_in_window: bool = False
    """Nothing but the sliding window limits attention, so every layer attends to all earlier tokens of short rows."""
    experts: Experts | None = None
    """The layers with experts; None: a dense model, or one whose experts are unknown."""
    latents: Latents | None = None
    """The latents of its attention; None: attention without latents."""

    @property
    def cached_size(self) -> int:
        """Numbers per token and layer in a cache: keys and values, or latents."""
        return self.latents.cached_size if self.latents else 2 * self.kv_size

    def sees_all(self, longest: int) -> bool:
        """True if every layer attends to all earlier tokens in rows of at most this many tokens; 0: of any length."""
        return self.full_attention or (self.full_in_window and 0 < longest <= self.window)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, read before it is loaded."""

    parameters: int | None = None
    """Number of parameters; None: unknown."""
    shape: ModelShape | None = None
    """Its architecture; None: unknown."""
