"""Coordinates devices that several roles share: servers sleep while training roles use them.

A pool that is a union of others lends the devices of servers (rollout and reward replicas) to the training roles.
Servers are awake while no role trains and sleep from `train` to `serve`. The caller of `train` must call `serve` under
try/finally. A lost server is started again while servers have the devices: a start needs its whole share of them. That
also holds for servers that stay awake next to the training roles: an engine measures the free memory when it starts.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlcore.contracts.workers import ReplicaEvent, ReplicaHandle, WorkerGroup
from rlcore.errors import WorkerError, worker_call

logger = logging.getLogger(__name__)

TURN_S = 600.0
"""Seconds that servers may take to finish their requests and fall asleep, or to wake up."""


class DeviceLease:
    """Lends the shared devices to the servers or to the training roles, in turns. Without servers it does nothing."""

    def __init__(
        self,
        servers: Sequence[tuple[str, WorkerGroup[Any], type[Any]]],
        record: Callable[[str, float], None],
        on_cpu: bool = False,
        deadline_s: float = TURN_S,
        awake: Sequence[WorkerGroup[Any]] = (),
    ) -> None:
        """`servers`: role, group and the interface that defines `sleep` and `wake`; `record` receives metrics.

        `awake`: servers that share the devices without sleeping.

        On a CPU a sleeping server keeps its memory: it only finishes its requests and admits no others, and the metrics
        are named accordingly (`time/drain_s`, `time/admit_s` instead of `time/sleep_s`, `time/wake_s`).
        """
        self._servers, self._record, self._deadline_s = tuple(servers), record, deadline_s
        self._groups = [*(group for _, group, _ in self._servers), *awake]
        self._names = ("time/drain_s", "time/admit_s") if on_cpu else ("time/sleep_s", "time/wake_s")
        self._training = False
        self._turning = asyncio.Lock()
        self._starting: set[str] = set()
        """Names of lost servers that are being started again."""
        self._serving, self._none_starting = asyncio.Event(), asyncio.Event()
        self._serving.set()
        self._none_starting.set()
        for group in self._groups:
            group.before_launch(self._begin_start)
            group.on_event(self._end_start)

    @property
    def shared(self) -> bool:
        """True if servers sleep while training roles use their devices."""
        return bool(self._servers)

    async def train(self) -> None:
        """Put every server to sleep; the training roles have the devices when this returns.

        WorkerError names one that cannot. Waits for a lost server that is being started again, which needs its share of
        the devices for that.
        """
        while self._groups:
            await self._none_starting.wait()
            async with self._turning:
                if self._training:
                    return
                if self._starting:
                    continue
                self._training, began = True, time.monotonic()
                self._serving.clear()
                await self._tell("sleep")
                if self._servers:
                    self._record(self._names[0], time.monotonic() - began)
                return

    async def serve(self) -> None:
        """Wake the servers, including those that `train` did not call; WorkerError names one that fails, which is not
        called again. Lost servers are started again. Does nothing if no server had to sleep.
        """
        async with self._turning:
            if not self._training:
                return
            began = time.monotonic()
            try:
                await self._tell("wake")
            except WorkerError:
                self._end_training()  # the run ends: the next call would only wait for the same server again
                raise
            self._end_training()
            if self._servers:
                self._record(self._names[1], time.monotonic() - began)

    def _end_training(self) -> None:
        self._training = False
        self._serving.set()

    async def _tell(self, method: str) -> None:
        """Call the method on every running server; raises the first error after all have answered."""
        calls = [
            self._call(role, replica, getattr(interface, method))
            for role, group, interface in self._servers
            for replica in group.replicas
        ]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def _call(self, role: str, replica: ReplicaHandle[Any], method: Callable[..., Any]) -> None:
        what = f"{replica.name}.{method.__name__}()"
        try:
            async with asyncio.timeout(self._deadline_s):
                await replica.call(method)
        except TimeoutError as cause:
            with worker_call(role, method.__name__):
                raise WorkerError(f"{what} took longer than {self._deadline_s:g} s") from cause
        except WorkerError as error:
            if replica.alive:
                raise
            logger.warning("%s; it is started again when servers have the devices", error)

    async def _begin_start(self, replica: ReplicaHandle[Any]) -> None:
        """Called before a lost server is started again; returns when it may use its devices."""
        while True:
            await self._serving.wait()
            async with self._turning:
                if not self._training:
                    self._starting.add(replica.name)
                    self._none_starting.clear()
                    return

    def _end_start(self, event: ReplicaEvent) -> None:
        """Called when a server serves again, or is lost, also while it is being started."""
        self._starting.discard(event.name)
        if not self._starting:
            self._none_starting.set()
