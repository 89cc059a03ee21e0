"""The interface of a worker, and the handles through which the controller calls it.

A worker class is a thin shell: `__init__` only stores its context, `setup()` imports the heavy modules and builds the
engine. The controller never holds a worker; it holds a `WorkerGroup` of `ReplicaHandle`s. A call names the method by
the function of the interface, `await group.replicas[0].call(ActorWorker.update, batch)`, so that mypy checks it.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from rlcore.config import RunConfig
from rlcore.contracts.children import Children, NoChildren
from rlcore.contracts.plugin_settings import settings_as
from rlcore.types import SharedPrefix

W_co = TypeVar("W_co", bound="Worker", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
M = TypeVar("M", bound=Callable[..., Any])
_CONCURRENT = "_rlcore_concurrent"


def concurrent(method: M) -> M:
    """Mark an async method of a worker's interface that answers while other methods of the worker compute.

    The cluster calls it on a separate thread with an event loop, so it must not use what other methods change. An
    implementation needs no mark. Ranks may begin it in any order.
    """
    setattr(method, _CONCURRENT, True)
    return method


def is_concurrent(method: Callable[..., Any]) -> bool:
    """True for a method of an interface that is marked with `concurrent`."""
    return getattr(method, _CONCURRENT, False)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a rank, as the plan estimates it."""

    bytes: int
    remedy: str
    """Advice for lowering it, as the rest of a sentence."""
    cached_tokens: int = 0
    """For an embedded rollout: the tokens of keys and values, of live rows and finished turns together, that this
    memory has room for; 0: unknown."""


@dataclass(frozen=True, eq=False)
class WorkerContext:
    """The input of a worker, which discovers nothing by itself."""

    role: str
    replica: int
    rank: int
    """Rank within the replica."""
    num_ranks: int
    config: RunConfig
    section: object
    """The settings section of the plugin that offered the class, or None; `settings` reads it as its class."""
    targets: Mapping[str, str]
    """Functions chosen by the plan for this role, by purpose: {'policy_loss': 'rlcore.algo.loss:clip'}."""
    run_dir: Path
    seed: int
    threads: int
    device: str
    """'cpu', or 'cuda:3'."""
    shares_device: bool = False
    """Actor, critic and reference take turns on the device in separate processes, so each frees the allocator's
    cache after its turn."""
    shared_prefix: SharedPrefix = SharedPrefix.NONE
    """The planned method of computing a group's prompt once for all its samples."""
    skips_rows: bool = False
    """For an actor: its updates may skip rows whose advantages are all 0, or whose weight is 0, because they do not
    change a gradient. The plan decides this."""
    host: "Worker | None" = None
    """The worker that hosts this one, after its `setup`; None: this worker is not embedded."""
    rendezvous: str = ""
    """The address where the ranks of this replica meet: `init_method` of torch.distributed; empty with one rank."""
    weights_kind: str = ""
    """The kind of weight sync, a `WeightsHandle.kind`; '' when the rollout samples from the actor's own weights."""
    spec: object = None
    """`WorkerRequest.spec` after the class's `complete`."""
    address: str = "127.0.0.1"
    """This node's address, as the run's other nodes reach it."""
    memory: MemoryPlan | None = None
    """The planned memory of this process; None: unknown."""
    children: Children = field(default_factory=NoChildren)
    """Starts killable child processes on the worker's loop; the worker closes them."""

    def __str__(self) -> str:
        return f"{self.role}[{self.replica}.{self.rank}]"

    def settings(self, cls: type[S]) -> S:
        """The plugin's settings section; PluginError where it is not a `cls`."""
        return settings_as(str(self), self.section, cls)


class Worker(ABC):
    """A worker of the run. `async def` methods run concurrently on its loop, plain ones one at a time."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @abstractmethod
    def setup(self) -> None:
        """Import heavy libraries and build the engine; called once, in the worker's thread or process."""

    def close(self) -> None:
        """Release the resources of `setup`; called once, even after a failure."""


@dataclass(frozen=True)
class ReplicaEvent:
    """A replica that may be restarted has died, or serves again."""

    kind: Literal["lost", "restored"]
    index: int
    """Index of the replica in `WorkerGroup.replicas`."""
    name: str
    reason: str = ""
    """The reason of the loss; empty when the replica serves again."""
    comes_back: bool = False
    """True for a loss if the replica is being restarted."""


class ReplicaHandle(Protocol[W_co]):
    """One replica of a role, as the controller sees it."""

    @property
    def name(self) -> str: ...

    @property
    def alive(self) -> bool:
        """False from a replica's death until it is restarted; its calls raise WorkerError immediately."""
        ...

    @overload
    def call(
        self, method: Callable[Concatenate[W_co, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R]: ...

    @overload
    def call(self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """The result of the method on rank 0; raises WorkerError naming role, replica and cause."""
        ...

    def stream(
        self, method: Callable[Concatenate[W_co, P], AsyncIterator[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[R, None]:
        """Yields the items of an async-generator method as they come; `aclose()` also ends the method."""
        ...

    def excuse(self) -> None:
        """State that a request caused one death, so that it does not count toward `cluster.max_restarts`."""
        ...

    def restart(self, reason: str) -> None:
        """End its processes as if they had died, and log the reason; WorkerError if it has no processes."""
        ...


class WorkerGroup(Protocol[W_co]):
    """All replicas of a role."""

    @property
    def replicas(self) -> "Sequence[ReplicaHandle[W_co]]": ...

    @overload
    def each(
        self, method: Callable[Concatenate[W_co, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[list[R]]: ...

    @overload
    def each(
        self, method: Callable[Concatenate[W_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[list[R]]: ...

    def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Awaitable[list[Any]]:
        """The method's result on every replica, in order."""
        ...

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        """Call back, on the controller's loop, when a replica is lost and when it serves again.

        Only replicas whose request is `isolated` are restarted, within the limit of `cluster.max_restarts`. What
        `callback` raises is logged.
        """
        ...

    def before_launch(self, allow: "Callable[[ReplicaHandle[Any]], Awaitable[None]]") -> None:
        """Await `allow` before a lost replica is launched again: its device may be in use."""
        ...

    def before_return(self, prepare: "Callable[[ReplicaHandle[Any]], Awaitable[None]]") -> None:
        """Await `prepare` for a restarted replica before it is `alive` again, to give it the current weights."""
        ...
