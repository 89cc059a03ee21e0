"""Offers of plugins: worker classes, pools, reward functions, algorithms. Plain frozen data: no torch, no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlcore.config import RunConfig
from rlcore.contracts.pool_placement import placement_problem
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.workers import Worker
from rlcore.errors import OfferError
from rlcore.errors.checks.data import (
    check_above,
    check_call,
    check_choice,
    check_choices,
    check_distinct,
    check_flags,
    check_is,
    check_names,
    check_subclass,
    check_target,
    check_texts,
    check_whole,
    refuse,
)


class Scope(StrEnum):
    """The samples of a step that a function must see together."""

    SAMPLE = "sample"
    GROUP = "group"
    BATCH = "batch"


class Need(StrEnum):
    """Inputs that an algorithm needs besides rewards."""

    VALUES = "values"
    GREEDY_BASELINE = "greedy_baseline"
    REFERENCE = "reference"
    MINIBATCH_STATISTICS = "minibatch_statistics"
    GROUP = "group"
    """At least two samples per prompt, because they are compared. `Scope.GROUP` implies it."""
    FUNCTION_SCORES = "function_scores"
    """The score of each reward function, not only their sum."""


class AlgorithmKind(StrEnum):
    """The two kinds of algorithm that plugins offer."""

    ADVANTAGE = "advantage"
    POLICY_LOSS = "policy_loss"


def as_asked(config: RunConfig, section: Any, request: WorkerRequest) -> WorkerRequest:
    """The default `complete`: the class needs exactly the resources of the request."""
    return request


WEIGHT_SYNCS = ("disk", "ipc", "nccl", "shm", "tcp")
"""The values of `rollout.weight_sync`."""


@dataclass(frozen=True)
class WorkerClass:
    """An offer of a worker class, which implements an interface under a backend name."""

    interface: type[Worker]
    backend: str
    cls: type[Worker]
    embedded_in: Role[Any] | None = None
    """The role whose worker hosts this class and is its `WorkerContext.host`: ACTOR for an embedded rollout. The host
    has the same backend. The planner copies the role into the request's `embedded_in`."""
    on_every_rank: bool = False
    """In a host of several ranks, every rank has a worker, which does its share (`WorkerContext.rank`)."""
    isolated: bool = False
    """Its workers may die and be restarted: every request that it fills becomes `isolated`."""
    complete: Callable[[RunConfig, Any, WorkerRequest], WorkerRequest] = as_asked
    """(config, section of the offer's plugin, request) -> the request with the resources of the class: replicas, ranks,
    gpus, cpus, threads, pool, memory (`device_frac`, `asleep_bytes`, `bytes_per_parameter`, `cached_tokens`, `engine`,
    `model`) and `spec`. Pure; called for every role. It must keep role, backend, `targets`, `isolated` and a requested
    pool other than `main`; it may set `embedded_in` if that is None."""
    weight_sync: frozenset[str] = frozenset({"disk"})
    """For a rollout that is not served inside the actor: the supported values of `rollout.weight_sync`."""
    keeps_cache: bool = False
    """For a rollout: it supports `rollout.on_new_weights=continue`."""
    context_parallel: bool = False
    """For a class with an engine: its ranks can hold slices of each sequence (`EngineConfig.context_parallel`)."""

    def __post_init__(self) -> None:
        check_subclass(self, "interface", Worker)
        check_subclass(self, "cls", Worker)
        check_texts(self, "backend")
        check_is(self, "embedded_in", Role, optional=True)
        check_flags(self, "on_every_rank", "isolated", "keeps_cache", "context_parallel")
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
    colocates: tuple[str, ...] = ()
    placement: str = "pack"
    """Placement of ranks on a cluster of several nodes, for a pool with nodes=1. pack: on as few nodes as possible;
    spread: on as many as possible; strict_spread: one rank per node; one_node: all on one node."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that the pool may take: {'accelerator-type': 'H100'}; also '!H100' or 'in(H100, H200)'."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that each bundle reserves: {'fast_network': 1}. A bundle holds one rank; in a pool with `nodes`
    above 1, one node's share of the pool."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_whole(self, 0, "gpus_per_node")
        check_whole(self, 1, "nodes")
        check_distinct(self, "colocates")
        if problem := placement_problem(self.placement, self.labels, self.resources):
            raise OfferError(f"PoolSpec '{self.name}': {problem}")


@dataclass(frozen=True)
class RewardFunction:
    """An offer of a reward function, by its target; `reward.functions.<x>.fn` names it.

    A function, class or factory with a parameter `settings` gets the plugin's section of the configuration.
    """

    name: str
    target: str
    """'module:attr'."""
    scope: Scope = Scope.SAMPLE
    deadline_s: float | None = None
    """Seconds that a call may take, unless the configuration says otherwise."""

    def __post_init__(self) -> None:
        check_texts(self, "name")
        check_target(self, "target")
        check_choice(self, "scope", Scope)
        if self.deadline_s is not None:
            check_above(self, 0.0, "deadline_s")


@dataclass(frozen=True)
class Algorithm:
    """An offer of an advantage estimator or policy loss, by target; `algo.advantage`, `algo.policy_loss` name it."""

    name: str
    kind: AlgorithmKind
    target: str
    scope: Scope
    needs: frozenset[Need] = frozenset()
    per_token: bool = False
    """For an estimator: it returns (B, T) advantages instead of (B,)."""
    selection: str = ""
    """For a policy loss that treats some tokens differently: the target of the function that selects them from a whole
    mini-batch, as in `rlcore.algo.covariance`. Such a loss needs MINIBATCH_STATISTICS."""
    ignores_zero_advantages: bool = False
    """For a policy loss: a row whose advantages are all 0 has loss 0 and gradient 0 for any ratios. Updates then skip
    such rows."""

    def __post_init__(self) -> None:
        check_texts(self, "name")
        check_choice(self, "kind", AlgorithmKind)
        check_target(self, "target")
        check_choice(self, "scope", Scope)
        check_choices(self, "needs", Need)
        check_flags(self, "per_token", "ignores_zero_advantages")
        if self.selection != "":
            check_target(self, "selection")
