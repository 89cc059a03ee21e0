"""Requests of components: workers for a role, and what is known of their model. Plain frozen data."""

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
    check_references,
    check_subclass,
    check_text_choice,
    check_texts,
    check_whole,
    refuse,
)
from rlcore.types import SharedPrefix

W = TypeVar("W", bound=Worker)


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
    embedded_in: Role[Any] | None = None
    """Served in that role's process and thread, built with its worker as `WorkerContext.host`."""
    isolated: bool = False
    """May die and be restarted without ending the run: a process of its own."""
    targets: Mapping[str, str] = field(default_factory=dict)
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
    spec: object = None
    """What the workers serve, as frozen data that the role's interface defines: a `RewardModel` for a RewardReplica."""
    note: str = ""
    """A fact about this role that `rlcore plan` shows among its notes."""

    def __post_init__(self) -> None:
        check_is(self, "role", Role)
        check_is(self, "embedded_in", Role, optional=True)
        check_texts(self, "backend")
        check_names(self, "pool")
        check_whole(self, 1, "replicas", "ranks")
        check_whole(self, 0, "threads", "cached_tokens")
        check_numbers(self, 0.0, "gpus", "cpus", "bytes_per_parameter")
        check_numbers(self, 0.0, "device_frac", most=1.0)
        check_flags(self, "isolated", "takes_adapter")
        check_references(self, "targets")
        check_is(self, "model", ModelFacts, optional=True)
        check_is(self, "engine", EngineConfig, optional=True)
        check_is(self, "settings", str)
        check_frozen(self, "spec")
        check_is(self, "note", str)
        check_text_choice(self, "shared_prefix", ["planned", *SharedPrefix])
        if self.gpus > 1 and self.gpus != int(self.gpus):
            refuse(self, "gpus", "a share of one device, or a whole number of them")


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder, as its config.json tells it."""

    model_type: str
    layers: int
    hidden_size: int
    inner_size: int
    """Of the feed-forward layers."""
    kv_size: int
    """Heads of keys times the size of a head."""
    vocabulary: int
    full_attention: bool
    """Every layer sees all tokens before: no sliding window, no recurrent state, no soft cap in attention."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is loaded."""

    parameters: int | None = None
    """Their number; None: unknown."""
    shape: ModelShape | None = None
    """Its architecture; None: unknown."""
