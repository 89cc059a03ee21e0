"""Clusters start the workers of a plan. A plugin offers one with the hook `rlcore_clusters`.

The planner calls two functions of the offer: `abilities` states the cluster's abilities, and `problems` the reasons why
it cannot start this plan. The run builds the class from a `ClusterContext`, awaits `open()`, awaits `start()` once per
role, and awaits `close()` at the end, even after a failure. `rlcore.cluster.kit` provides the parts of clusters:
threads, replicas that are watched and restarted, and the host of a process's workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlcore.config import RunConfig
from rlcore.contracts.plugin_settings import settings_as
from rlcore.contracts.pool_placement import PLACEMENTS
from rlcore.contracts.requests import WorkerRequest
from rlcore.contracts.workers import MemoryPlan, Worker, WorkerGroup
from rlcore.errors.checks.data import (
    check_call,
    check_choice,
    check_flags,
    check_is,
    check_names,
    check_subclass,
    refuse,
)
from rlcore.types import SharedPrefix

S = TypeVar("S")


@dataclass
class Deadlines:
    """Timeouts of the controller's calls to workers in seconds, by kind of call."""

    setup_s: float = 1800.0
    call_s: float = 21600.0
    close_s: float = 10.0
    """Becomes longer at the normal end of a run, so read it when a worker is closed."""


@dataclass(frozen=True)
class PoolPlan:
    """A pool of the run with the roles that share it. Only the planner constructs it."""

    name: str
    gpus_per_node: int
    nodes: int
    roles: tuple[str, ...]
    provided_by: str
    colocates: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    """Indices of its devices, counted over all nodes of the run; a union holds those of its members."""
    placement: str = "pack"
    """The same as in `PoolSpec`, like the next two fields."""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerPlan:
    """A role of the run with the class that fills it. Only the planner constructs it."""

    request: WorkerRequest
    cls: type[Worker]
    asked_by: str
    provided_by: str
    section: object = None
    """The settings section of the plugin that offered the class, or None."""
    shared_prefix: SharedPrefix = SharedPrefix.NONE
    """The planned method of computing a group's prompt once for all its samples."""
    skips_rows: bool = False
    """The same as in `WorkerContext`."""
    weight_sync: frozenset[str] = frozenset()
    """The same as in `WorkerClass`, like the next two fields."""
    keeps_cache: bool = False
    context_parallel: bool = False

    @property
    def offered_by(self) -> str:
        """The class and the plugin that offers it, in the form of `RlcoreError.offered_by`."""
        return f"{self.cls.__qualname__} of {self.provided_by}"


@dataclass(frozen=True)
class RunCode:
    """Digests of the Python files that a run was started with, by package or path of a plugin in a plain file."""

    machine: str
    """The controller's."""
    places: Mapping[str, str]
    """The paths of the files on that machine; on the same machine the same paths are the same files."""
    digests: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class ClusterContext:
    """The input of a cluster: the plan's pools and workers, and the run directory."""

    config: RunConfig
    section: object
    """The settings section of the plugin that offered the cluster, or None; `settings` reads it as its class."""
    pools: tuple[PoolPlan, ...]
    workers: tuple[WorkerPlan, ...]
    """In start order: an embedded worker comes after its host."""
    colocated_roles: tuple[str, ...]
    """Roles that sleep while the actor trains on their devices."""
    weights_kind: str
    """The kind of weight sync, a `WeightsHandle.kind`; '' when the rollout samples from the actor's own weights."""
    plugin_files: tuple[str, ...]
    """Paths of the enabled plugins that are plain files: another process imports them by path."""
    cpus: int
    """Cores of this machine."""
    gpus: int
    """Devices of this machine that the run may use."""
    run_dir: Path
    deadlines: Deadlines
    memory: Mapping[str, MemoryPlan] = field(default_factory=dict)
    """Memory of a rank by role, where it is known; an embedded role has the estimate of its host."""
    code: RunCode | None = None
    """Code that workers on other machines have to have; None if all workers are on this one."""

    def settings(self, cls: type[S]) -> S:
        """The plugin's settings section; PluginError where it is not a `cls`."""
        return settings_as(f"cluster {self.config.cluster.backend}", self.section, cls)

    def threads_of(self, worker: WorkerPlan) -> int:
        """Compute threads of a rank: from its request, else from the configuration, else one per core here."""
        return worker.request.threads or self.config.cluster.threads or self.cpus

    def host_of(self, worker: WorkerPlan) -> WorkerPlan:
        """The plan of the worker that hosts this one; the worker itself if it is not embedded."""
        embedded_in = worker.request.embedded_in
        if embedded_in is None:
            return worker
        return next(other for other in self.workers if other.request.role == embedded_in)


class Cluster(ABC):
    """Starts the workers of a plan, and ends them.

    The class is a thin shell, like a worker class: planning imports its module, so `open` imports heavy libraries.
    """

    def __init__(self, context: ClusterContext) -> None:
        self.context = context

    @abstractmethod
    async def open(self) -> None:
        """Acquire the resources of the plan's pools; WorkerError naming what is missing. Called once, before any
        `start`."""

    @abstractmethod
    async def start(self, worker: WorkerPlan) -> WorkerGroup[Any]:
        """The replicas of one role, set up: `worker.request.replicas` handles in order.

        Called once per role, in the order of `ClusterContext.workers`; with `ClusterAbilities.starts_together` also
        while roles on other devices are starting. WorkerError naming the replica that failed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close every worker and release all resources. Called once, even if `open` failed or was not called."""


class ProcessUse(StrEnum):
    """The workers that a cluster runs outside the controller's process."""

    ALL = "all"
    """Every worker, together with its embedded workers."""
    REQUIRED = "required"
    """Workers for which `needs_process` is True; the rest are threads."""
    NONE = "none"
    """No worker: all are threads, isolated ones too. A plan with a role of several ranks is refused."""


def needs_process(request: WorkerRequest, config: RunConfig) -> bool:
    """True for several ranks; unless `cluster.in_process` is set, also for isolated workers and those on GPUs.

    So a worker that launches kernels shares no interpreter with the controller, and a CUDA fault ends only its process.
    """
    return request.ranks > 1 or (not config.cluster.in_process and (request.isolated or request.gpus > 0))


@dataclass(frozen=True)
class ClusterAbilities:
    """A cluster's abilities under the settings of this run; the defaults are those of one machine."""

    processes: ProcessUse = ProcessUse.REQUIRED
    elsewhere: bool = False
    """Workers run on machines that the planner cannot see. It does not compare the plan with this machine's memory and
    devices."""
    several_nodes: bool = False
    """A pool may set `nodes` above 1."""
    placements: frozenset[str] = frozenset({"pack", "spread", "one_node"})
    """Supported values of `PoolSpec.placement`. On one machine the three defaults are equivalent."""
    labels: bool = False
    """Labels of a pool are supported."""
    resources: bool = False
    """Custom resources of a pool are supported."""
    starts_together: bool = False
    """`start` may be called while it starts another role. The run then starts roles that share no devices at the same
    time."""
    more_with: str = ""
    """The setting that would add a missing ability, for errors; '' if there is none."""

    def __post_init__(self) -> None:
        check_choice(self, "processes", ProcessUse)
        check_flags(self, "elsewhere", "several_nodes", "labels", "resources", "starts_together")
        check_is(self, "more_with", str)
        if not isinstance(self.placements, frozenset) or not self.placements <= set(PLACEMENTS):
            refuse(self, "placements", f"a frozenset of: {', '.join(PLACEMENTS)}")


def this_machine(config: RunConfig, section: Any) -> ClusterAbilities:
    """The default `abilities`: those of this machine, with threads and child processes."""
    return ClusterAbilities()


def no_problems(
    config: RunConfig, section: Any, pools: Sequence[PoolPlan], workers: Sequence[WorkerPlan]
) -> Sequence[str]:
    """The default `problems`: none, because the cluster can start every plan within its abilities."""
    return ()


@dataclass(frozen=True)
class ClusterOffer:
    """An offer of a cluster; `cluster.backend` names it."""

    name: str
    cls: type[Cluster]
    """Checked against `Cluster` when planning; built as `cls(context)`."""
    abilities: Callable[[RunConfig, Any], ClusterAbilities] = this_machine
    """(config, section of the offer's plugin) -> the cluster's abilities with these settings. Pure."""
    problems: Callable[[RunConfig, Any, Sequence[PoolPlan], Sequence[WorkerPlan]], Sequence[str]] = no_problems
    """(config, section, pools, workers) -> the reasons why the cluster cannot start the plan, one clause each; empty if
    it can. Pure."""

    def __post_init__(self) -> None:
        check_names(self, "name")
        check_subclass(self, "cls", Cluster)
        check_call(self, "abilities", ["config", "section"])
        check_call(self, "problems", ["config", "section", "pools", "workers"])


@dataclass(frozen=True)
class Shipment:
    """The data from which a process builds a worker. Unpickling a shipment does not import the worker's modules: its
    class and context stay pickled in `payload`."""

    name: str
    """Role and replica, as errors name them."""
    role: str
    embedded_in: str
    """The role in this process that hosts it; empty: none."""
    files: tuple[tuple[str, str], ...]
    """(name, path) of plugin modules in plain files; only the controller knows them by these names."""
    payload: bytes
    """The pickled class and context."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the controller's software, such as {'torch': '2.13.0'}; a process with another version is refused."""
    code: RunCode | None = None
    """`ClusterContext.code`; a process with other code is refused."""


class ReplicaBody(Protocol):
    """The processes of one replica, one per rank. A replica that dies and is restarted gets a new body."""

    @property
    def alive(self) -> bool:
        """False once a process has ended."""
        ...

    @property
    def rendezvous(self) -> str:
        """The address where the replica's ranks meet, as `WorkerContext.rendezvous`."""
        ...

    async def build(self, ranks: Sequence[Shipment], deadline_s: float) -> None:
        """Build the worker of each rank; WorkerError when one fails or is not ready in time."""
        ...

    async def call(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        where: str,
        deadline_s: float,
        *,
        concurrent: bool = False,
    ) -> Any:
        """The method's result on rank 0, after all ranks have returned; WorkerError that begins with `where`.

        The receiver gets arrays of the arguments and of the result read-only. Ranks other than 0 discard their results.
        `concurrent`: the method is marked with `rlcore.contracts.workers.concurrent`, and answers while others compute.
        """
        ...

    def stream(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        """The items of an async-generator method, from all ranks in order of arrival.

        Reading an item may take `call_s`; the worker's generator may take `close_s` to end.
        """
        ...

    async def ended(self) -> str:
        """Wait until one of its processes ends, and return the reason."""
        ...

    async def close(self, deadline_s: float) -> None:
        """Close the workers, then end the processes, by force when the deadline passes."""
        ...
