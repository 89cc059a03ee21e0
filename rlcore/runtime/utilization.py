"""Measures the share of time that a pool's workers are busy, by counting the controller's calls."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from time import monotonic
from typing import Any

from rlcore.contracts.activity import CALL, current_activity
from rlcore.contracts.workers import ReplicaEvent, ReplicaHandle, WorkerGroup
from rlcore.errors import worker_call
from rlcore.plan import RunPlan
from rlcore.runtime.hang_watch import HangWatch, WatchedCall
from rlcore.types import Metrics


class BusyMeter:
    """Integrates, for each pool, how much of it is busy.

    At any moment that is the share of replicas with a call in flight, for the busiest of the roles that take turns on
    the pool. A role in a union of pools counts in each member.
    """

    def __init__(
        self, pools: Mapping[str, Sequence[str]], clock: Callable[[], float] = monotonic, watch: HangWatch | None = None
    ) -> None:
        """`pools`: the roles that work on each pool's devices. `watch` reports calls that do not return."""
        self._pools, self._clock, self._watch = pools, clock, watch
        self._num_replicas: dict[str, int] = {}
        self._num_busy: dict[str, int] = {}
        self._callbacks: dict[str, Callable[[int], None]] = {}
        self._busy_s = dict.fromkeys(pools, 0.0)
        self._began = self._seen = clock()
        self.activity = current_activity()

    def metered(self, role: str, group: WorkerGroup[Any], offered_by: str = "") -> "MeteredGroup":
        """The group with its calls counted; errors name role, method and `offered_by`."""
        self._num_replicas[role], self._num_busy[role] = len(group.replicas), 0
        metered = MeteredGroup(group, [MeteredReplica(replica, role, self, offered_by) for replica in group.replicas])
        self.activity.groups[role] = metered
        return metered

    def watching(
        self, call: str, replica: ReplicaHandle[Any], owes: str = "has not returned"
    ) -> AbstractContextManager[WatchedCall]:
        """Reports a call of a worker that does not return, such as one of ranks that wait for a slow one, which the
        report names if the replica can tell."""
        if self._watch is None:
            return nullcontext(WatchedCall(call, owes))
        return self._watch.watching(call, owes, getattr(replica, "difference", None))

    def change(self, role: str, by: int) -> None:
        """Change the number of the role's busy replicas."""
        self._advance()
        self._num_busy[role] += by
        if (callback := self._callbacks.get(role)) is not None:
            callback(by)

    def on_change(self, role: str, callback: Callable[[int], None]) -> None:
        """Call back with each change of the number of the role's busy replicas."""
        self._callbacks[role] = callback

    def take(self) -> Metrics:
        """time/pool/<name>/busy_frac since the last call."""
        self._advance()
        seconds = max(self._seen - self._began, 1e-9)
        taken = {f"time/pool/{name}/busy_frac": busy_s / seconds for name, busy_s in self._busy_s.items()}
        self._busy_s, self._began = dict.fromkeys(self._pools, 0.0), self._seen
        return taken

    def _advance(self) -> None:
        now = self._clock()
        for name, roles in self._pools.items():
            shares = [self._num_busy[role] / self._num_replicas[role] for role in roles if role in self._num_busy]
            self._busy_s[name] += max(shares, default=0.0) * (now - self._seen)
        self._seen = now


class MeteredReplica:
    """A replica that is busy while a call or stream of it is in flight; their errors name the replica."""

    def __init__(self, replica: ReplicaHandle[Any], role: str, meter: BusyMeter, offered_by: str = "") -> None:
        self.replica = replica
        self._role, self._meter, self._num_calls, self._offered_by = role, meter, 0, offered_by

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def alive(self) -> bool:
        return self.replica.alive

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `rlcore.contracts.workers.ReplicaHandle.call`."""
        self._add(1)
        key = self.begin(method)
        try:
            with self.naming(method), self._meter.watching(f"{self.name}.{method.__name__}()", self.replica):
                return await self.replica.call(method, *args, **kwargs)
        finally:
            self._meter.activity.end(key)
            self._add(-1)

    async def stream(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """See `rlcore.contracts.workers.ReplicaHandle.stream`."""
        self._add(1)
        key = self.begin(method)
        try:
            whose = f"{self.name}.{method.__name__}()"
            with self.naming(method), self._meter.watching(whose, self.replica, "has yielded nothing") as call:
                async with aclosing(self.replica.stream(method, *args, **kwargs)) as results:
                    async for result in results:  # as `pause` and `resume`, without two calls for each sample
                        call.pauses += 1
                        yield result
                        call.pauses -= 1
                        call.began, call.num_warnings = monotonic(), 0
        finally:
            self._meter.activity.end(key)
            self._add(-1)

    def excuse(self) -> None:
        """See `rlcore.contracts.workers.ReplicaHandle.excuse`."""
        self.replica.excuse()

    def restart(self, reason: str) -> None:
        """See `rlcore.contracts.workers.ReplicaHandle.restart`."""
        self.replica.restart(reason)

    def __getattr__(self, name: str) -> Any:
        """Everything else of the replica."""
        return getattr(self.replica, name)

    def naming(self, method: Callable[..., Any]) -> AbstractContextManager[None]:
        """Wraps a call of the worker: errors name role, method and the plugin of the class."""
        return worker_call(self._role, method.__name__, self._offered_by)

    def begin(self, method: Callable[..., Any]) -> int:
        """A call begins; returns the key that ends it in the meter's activity."""
        return self._meter.activity.begin(CALL, self.replica.name, method.__name__)

    def end(self, key: int) -> None:
        """The call that has this key has ended."""
        self._meter.activity.end(key)

    def _add(self, by: int) -> None:
        before, self._num_calls = self._num_calls, self._num_calls + by
        if bool(before) != bool(self._num_calls):
            self._meter.change(self._role, by)


class MeteredGroup:
    """A group whose replicas are metered."""

    def __init__(self, group: WorkerGroup[Any], replicas: Sequence[MeteredReplica]) -> None:
        self._group, self.replicas = group, tuple(replicas)

    async def each(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """See `rlcore.contracts.workers.WorkerGroup.each`."""
        for replica in self.replicas:
            replica._add(1)
        keys = [replica.begin(method) for replica in self.replicas]
        try:
            with self.replicas[0].naming(method) if self.replicas else nullcontext():
                return await self._group.each(method, *args, **kwargs)
        finally:
            for replica, key in zip(self.replicas, keys, strict=True):
                replica.end(key)
                replica._add(-1)

    def on_event(self, callback: Callable[[ReplicaEvent], None]) -> None:
        """See `rlcore.contracts.workers.WorkerGroup.on_event`."""
        self._group.on_event(callback)

    def before_launch(self, allow: Callable[[ReplicaHandle[Any]], Awaitable[None]]) -> None:
        """See `rlcore.contracts.workers.WorkerGroup.before_launch`."""
        self._group.before_launch(allow)

    def before_return(self, prepare: Callable[[ReplicaHandle[Any]], Awaitable[None]]) -> None:
        """See `rlcore.contracts.workers.WorkerGroup.before_return`."""
        self._group.before_return(prepare)


def roles_by_pool(plan: RunPlan) -> dict[str, tuple[str, ...]]:
    """The roles that work on the devices of each pool that is not a union."""
    roles: dict[str, list[str]] = {pool.name: [] for pool in plan.pools if not pool.colocates}
    for pool in plan.pools:
        for leaf in pool.colocates or (pool.name,):
            roles[leaf] += pool.roles
    return {name: tuple(found) for name, found in roles.items()}
