"""Assigns work to the least loaded replica of a role, and waits while no replica serves."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from rlcore.aio import Dispatcher
from rlcore.contracts.workers import ReplicaEvent, WorkerGroup
from rlcore.errors import RlcoreError, WorkerError

REMEMBERED_HOMES = 65536
"""The most keys whose replica is remembered; beyond that, the least recently used key is forgotten."""


class ReplicaDispatcher:
    """Counts the pending units of each replica of a group, and assigns new ones to the replica with the fewest.

    Replicas are named by their index in `WorkerGroup.replicas`.
    """

    def __init__(self, workers: WorkerGroup[Any]) -> None:
        self.outstanding = [0] * len(workers.replicas)
        """Unfinished units of each replica."""
        self._workers = workers
        self._losses = [0] * len(workers.replicas)
        self._is_gone = [False] * len(workers.replicas)
        """True for replicas that will not be restarted."""
        self._last_loss: ReplicaEvent | None = None
        self._homes: OrderedDict[Hashable, int] = OrderedDict()
        self._dispatcher = Dispatcher(range(len(workers.replicas)), self._serves)
        workers.on_event(self._record_event)

    def assign(self, num: int, home: Hashable = None) -> int:
        """Assign `num` units to the serving replica with the fewest pending ones.

        Work of the same `home` goes to the same replica while that serves. If no replica serves, the choice is among
        all of them: the call will fail, and its error will name the replica.
        """
        replica = None if home is None else self._homes.get(home)
        if replica is None or not (self._serves(replica) or self._all_dead()):
            replica = self._dispatcher.choose(self.outstanding.__getitem__)
        if replica is None:
            replica = min(self._dispatcher.targets, key=self.outstanding.__getitem__)
        if home is not None:
            self._remember(home, replica)
        self.outstanding[replica] += num
        return replica

    def finish(self, replica: int, num: int) -> None:
        """Remove `num` pending units of the replica: they are finished, reassigned, or no longer needed."""
        self.outstanding[replica] -= num

    def losses(self, replica: int) -> int:
        """The number of times that the replica has died."""
        return self._losses[replica]

    def excuse(self, replica: int) -> None:
        """State that a request caused one death of the replica, so that it does not count as a restart."""
        if not self._is_gone[replica]:
            self._workers.replicas[replica].excuse()

    async def wait_for_one(self, error: RlcoreError) -> None:
        """Wait until a replica serves; raise `error`, with the reason of the last loss, when none will."""
        while self._all_dead():
            if all(self._is_gone):
                raise self._with_last_loss(error)
            await self._dispatcher.change()

    def _serves(self, replica: int) -> bool:
        return self._workers.replicas[replica].alive

    def _all_dead(self) -> bool:
        return not any(worker.alive for worker in self._workers.replicas)

    def _remember(self, home: Hashable, replica: int) -> None:
        self._homes[home] = replica
        self._homes.move_to_end(home)
        if len(self._homes) > REMEMBERED_HOMES:
            self._homes.popitem(last=False)

    def _with_last_loss(self, error: RlcoreError) -> RlcoreError:
        """The error, with the reason of the last loss unless it already contains it."""
        if self._last_loss is None or self._last_loss.reason in str(error):
            return error
        found = WorkerError(f"{error}; {self._last_loss.name}: {self._last_loss.reason}")
        found.__cause__ = error
        return found

    def _record_event(self, event: ReplicaEvent) -> None:
        if event.kind == "lost":
            self._losses[event.index] += 1
            self._is_gone[event.index] = not event.comes_back
            self._last_loss = event
        self._dispatcher.notify()
