"""Finds out which of the requests that a dying replica was serving is at fault, at bounded cost."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from rlcore.contracts.dispatch import ReplicaDispatcher
from rlcore.types import GenerateRequest

TOGETHER = 2
"""Deaths after which a request is a suspect, which is no longer retried together with others."""
ALONE = 2
"""Deaths during which a request was served alone, after which it is failed."""
SHARE = 16
"""Number of suspects up to which each is retried alone; more are first retried in shares of this size."""
BLAMED_IN_A_ROW = 4
"""Deaths that may be blamed on suspects while no replica survives a call; further ones count against the replicas."""


@dataclass(eq=False)
class Death:
    """One death of a replica; it is excused once at most."""

    replica: int
    excused: bool = False


@dataclass(eq=False)
class RequestRecord:
    """A request, and the deaths during which it was being served."""

    request: GenerateRequest
    deaths: list[Death] = field(default_factory=list)
    is_single: bool = False
    """True if a suspect is retried alone, not in a share."""
    num_alone: int = 0
    """Deaths during which nothing else was being served."""

    @property
    def is_at_fault(self) -> bool:
        """True if it is not retried at all."""
        return self.num_alone >= ALONE

    @property
    def is_suspect(self) -> bool:
        """True if it is not retried together with others."""
        return len(self.deaths) >= TOGETHER


class Suspects:
    """Finds requests that kill their replica.

    A request that was being served at two deaths is retried while its replica serves nothing else: alone or, if there
    are many suspects, in a share of 16, whose members are retried alone if the replica dies again. A request fails if a
    replica dies twice while serving it alone. A death while only suspects were served is blamed on them: it, and the
    earlier ones that they have in common, do not count toward `cluster.max_restarts`. Replicas that always die are
    still bounded: after four blamed deaths without a call that a replica survives, further ones count.
    """

    def __init__(self, dispatcher: ReplicaDispatcher, num_replicas: int) -> None:
        self._dispatcher = dispatcher
        self._gates = [_Gate() for _ in range(num_replicas)]
        self._deaths: dict[tuple[int, int], Death] = {}
        """The latest death of each replica, by its number of losses."""
        self._in_a_row = 0

    def record_end(self) -> None:
        """Record that a replica survived a call."""
        self._in_a_row = 0

    def serving(self, replica: int, alone: bool) -> AbstractAsyncContextManager[None]:
        """A context in which the replica is asked; while that is `alone`, nothing else is."""
        return self._gates[replica].turn(alone)

    def record_death(self, replica: int, life: int, unfinished: Sequence[RequestRecord], alone: bool) -> None:
        """Record that the replica died in its `life`-th life while serving these, and nothing else if `alone`."""
        death = self._deaths.get((replica, life))
        if death is None:
            self._deaths = {place: other for place, other in self._deaths.items() if place[0] != replica}
            death = self._deaths[replica, life] = Death(replica)
        for record in unfinished:
            record.deaths.append(death)
            record.is_single = alone or len(unfinished) <= SHARE
        if alone:
            self._blame(unfinished)

    def _blame(self, unfinished: Sequence[RequestRecord]) -> None:
        """Excuse the deaths that all of these suspects have in common."""
        if len(unfinished) == 1:
            unfinished[0].num_alone += 1
        self._in_a_row += 1
        if self._in_a_row > BLAMED_IN_A_ROW:
            return
        for death in unfinished[0].deaths:
            if not death.excused and all(death in record.deaths for record in unfinished):
                death.excused = True
                self._dispatcher.excuse(death.replica)

    @staticmethod
    def shares(suspects: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
        """Divides the suspects into shares that are retried one at a time."""
        many = [record for record in suspects if not record.is_single]
        shares = [many[start : start + SHARE] for start in range(0, len(many), SHARE)]
        return [*shares, *([record] for record in suspects if record.is_single)]


class _Gate:
    """Access to one replica: shared by many calls or exclusive to one, in order of arrival."""

    def __init__(self) -> None:
        self._num_inside = 0
        self._is_alone = False
        self._waiting: deque[tuple[bool, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def turn(self, alone: bool) -> AsyncIterator[None]:
        """A context inside the gate."""
        if self._waiting or not self._has_room(alone):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((alone, place))
            try:
                await place
            except asyncio.CancelledError:
                if place.done() and not place.cancelled():
                    self._leave(alone)
                self._admit()
                raise
        else:
            self._enter(alone)
        try:
            yield
        finally:
            self._leave(alone)
            self._admit()

    def _has_room(self, alone: bool) -> bool:
        return not self._is_alone and not (alone and self._num_inside)

    def _enter(self, alone: bool) -> None:
        self._num_inside += 1
        self._is_alone = alone

    def _leave(self, alone: bool) -> None:
        self._num_inside -= 1
        self._is_alone = False

    def _admit(self) -> None:
        """Admit waiting calls in order, as many as possible."""
        while self._waiting:
            alone, place = self._waiting[0]
            if not place.done() and not self._has_room(alone):
                return
            self._waiting.popleft()
            if not place.done():
                self._enter(alone)
                place.set_result(None)
