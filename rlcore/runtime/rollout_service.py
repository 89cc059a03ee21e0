"""The rollout service: what agent loops ask, answered by the replicas of the role `rollout`."""

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence

from rlcore.checks.arrays import check_completion
from rlcore.cluster.process import first_error
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.workers import ReplicaEvent, WorkerGroup
from rlcore.errors import RlcoreError, WorkerError
from rlcore.types import Completion, GenerateRequest, Lane

logger = logging.getLogger(__name__)

REMEMBERED_CONVERSATIONS = 65536
"""Conversations whose replica is kept in mind; of an older one the next turn goes to any replica."""


_Item = Completion | RlcoreError | TimeoutError | None
"""What came: a completion, an error that ends it, that time is up, or that a replica has no more."""


class RolloutService:
    """Spreads requests over replicas and checks that every completion comes, once."""

    def __init__(
        self,
        replicas: WorkerGroup[RolloutWorker],
        deadline_s: float,
        max_restarts: int = 0,
        vocabulary: int | None = None,
    ) -> None:
        """`max_restarts`: how often a replica that dies comes back; `vocabulary`: ids are below it, None: not known."""
        self._replicas = replicas
        self._deadline_s = deadline_s
        self._max_restarts = max_restarts
        self._vocabulary = vocabulary
        self._routes = Routes(len(replicas.replicas))
        self._losses = [0] * len(replicas.replicas)
        self._lost: ReplicaEvent | None = None
        """The latest loss."""
        self._changed = asyncio.Event()
        """A replica was lost or is back."""
        replicas.on_event(self._note)

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Samples that each replica has not finished."""
        return tuple(self._routes.outstanding)

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes.

        A request goes where its conversation has been before, else to the replica with the fewest samples outstanding;
        requests are dealt out in canonical order, so that what one call alone sends to each replica does not depend on
        timing. What a replica owes when its process dies is asked of others, or of its successor, once; of a request
        that is asked again every sample is, and those that had come are ignored. WorkerError when a replica fails,
        answers wrongly, or the deadline passes. However the call ends, also because whoever asked lost interest
        (`aclose`), the replicas are told to stop what is left of it.
        """
        ordered = sorted(requests, key=lambda request: request.id)
        missing = _Missing(ordered)
        finished = _Inbox()
        alive = self._alive()
        places = {request.id: self._routes.take(request, alive) for request in ordered}
        tasks = [
            asyncio.create_task(self._feed(index, share, places, missing, finished))
            for index, share in _shares(ordered, places)
        ]
        # one timer for all: what has come by then is still handed out
        timer = asyncio.get_running_loop().call_later(self._deadline_s, finished.put, TimeoutError())
        running, overdue = len(tasks), False
        try:
            while running and (missing.left or not missing.repeated):
                if not finished.items:
                    if overdue:
                        raise WorkerError(
                            f"rollout: {missing} after rollout.deadline_s={self._deadline_s:g} s ({lane} lane)"
                        )
                    await finished.wait()
                item = finished.items.popleft()
                if isinstance(item, RlcoreError):
                    raise item
                if isinstance(item, TimeoutError):
                    overdue = True
                    continue
                if item is None:
                    running -= 1
                    continue
                if not missing.arrived(item):
                    continue
                self._routes.give_back(places[item.request_id], 1)
                yield item
            if missing.left:
                raise WorkerError(f"rollout: {missing}, but every replica says it is done")
        finally:
            timer.cancel()
            for name, _ in missing.left:
                self._routes.give_back(places[name], 1)
            if not all(task.done() for task in tasks):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self,
        index: int,
        requests: Sequence[GenerateRequest],
        places: dict[str, int],
        missing: "_Missing",
        finished: "_Inbox",
    ) -> None:
        """Put the completions of a replica's share, then None, or the error that ended it."""
        try:
            try:
                await self._stream(index, requests, finished)
            except RlcoreError as error:
                if self._replicas.replicas[index].alive:
                    raise
                owed = missing.repeat(requests)
                logger.warning("%s; %d requests are asked again", error, len(owed))
                alive = await self._one_alive(error)
                for request, num in owed:
                    self._routes.give_back(places[request.id], num)
                    places[request.id] = self._routes.take(request, alive)
                    self._routes.give_back(places[request.id], request.n - num)
                again = _shares([request for request, _ in owed], places)
                await first_error([self._stream(place, share, finished) for place, share in again])
            finished.put(None)
        except RlcoreError as error:
            finished.put(error)

    async def _stream(self, index: int, requests: Sequence[GenerateRequest], finished: "_Inbox") -> None:
        replica = self._replicas.replicas[index]
        who = f"{replica.name}.generate()"
        async with contextlib.aclosing(replica.stream(RolloutWorker.generate, requests)) as completions:
            async for completion in completions:
                check_completion(who, completion, self._vocabulary)
                finished.put(completion)

    def _alive(self) -> list[int]:
        """The replicas that serve; all, when none does."""
        found = [index for index, replica in enumerate(self._replicas.replicas) if replica.alive]
        return found or list(range(len(self._replicas.replicas)))

    async def _one_alive(self, error: RlcoreError) -> list[int]:
        """The replicas that serve, once one does; `error` when none will."""
        while not any(replica.alive for replica in self._replicas.replicas):
            if all(losses > self._max_restarts for losses in self._losses):
                raise self._with_last_loss(error)
            self._changed.clear()
            await self._changed.wait()
        return self._alive()

    def _with_last_loss(self, error: RlcoreError) -> RlcoreError:
        """The error, with the reason for which no replica is back, where it does not tell that itself."""
        if self._lost is None or self._lost.reason in str(error):
            return error
        found = WorkerError(f"{error}; {self._lost.name}: {self._lost.reason}")
        found.__cause__ = error
        return found

    def _note(self, event: ReplicaEvent) -> None:
        if event.kind == "lost":
            self._losses[event.index] += 1
            self._lost = event
        self._changed.set()


class _Inbox:
    """A queue of one reader, who takes all that has gathered in one go."""

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        self._news = asyncio.Event()

    def put(self, item: _Item) -> None:
        """One more."""
        self.items.append(item)
        self._news.set()

    async def wait(self) -> None:
        """Return when there is one; now there is none."""
        self._news.clear()
        await self._news.wait()


def _shares(requests: Sequence[GenerateRequest], places: Mapping[str, int]) -> list[tuple[int, list[GenerateRequest]]]:
    """What each replica that gets any is asked."""
    shares: dict[int, list[GenerateRequest]] = {}
    for request in requests:
        shares.setdefault(places[request.id], []).append(request)
    return sorted(shares.items(), key=lambda share: share[0])


class Routes:
    """Which replica gets a request: sticky for each conversation, else the least loaded."""

    def __init__(self, num_replicas: int) -> None:
        self.outstanding = [0] * num_replicas
        """Samples that each replica owes."""
        self._homes: OrderedDict[str, int] = OrderedDict()

    def take(self, request: GenerateRequest, alive: Sequence[int] | None = None) -> int:
        """The replica for a request, of those that serve, whose samples count there from now on; of equals the first.

        `alive` None: all serve.
        """
        place = self._homes.get(request.conversation) if request.conversation else None
        if place is None or (alive is not None and place not in alive):
            place = min(range(len(self.outstanding)) if alive is None else alive, key=self.outstanding.__getitem__)
        if request.conversation:
            self._homes[request.conversation] = place
            self._homes.move_to_end(request.conversation)
            if len(self._homes) > REMEMBERED_CONVERSATIONS:
                self._homes.popitem(last=False)
        self.outstanding[place] += request.n
        return place

    def give_back(self, place: int, num_samples: int) -> None:
        """Samples are finished, or nobody wants them any more."""
        self.outstanding[place] -= num_samples


class _Missing:
    """Which completions have not come."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.left = {(request.id, sample) for request in requests for sample in range(request.n)}
        self.repeated: set[str] = set()
        """Requests that were asked again: of their samples some may come twice."""
        self._asked = frozenset(self.left)

    def repeat(self, requests: Sequence[GenerateRequest]) -> list[tuple[GenerateRequest, int]]:
        """Those of the requests that are to be asked again, each with how many of its samples are missing."""
        left: dict[str, int] = {}
        for name, _ in self.left:
            left[name] = left.get(name, 0) + 1
        owed = [(request, left[request.id]) for request in requests if request.id in left]
        self.repeated |= {request.id for request, _ in owed}
        return owed

    def arrived(self, completion: Completion) -> bool:
        """Cross it off; whether it is new. WorkerError for one that nobody asked for, or came before and once only."""
        key = (completion.request_id, completion.sample)
        if key not in self.left and key in self._asked and completion.request_id in self.repeated:
            return False
        if key not in self.left:
            raise WorkerError(f"rollout: sample {key[1]} of request '{key[0]}' came twice, or nobody asked for it")
        self.left.remove(key)
        return True

    def __str__(self) -> str:
        first = ", ".join(f"{name}#{sample}" for name, sample in sorted(self.left)[:3])
        return f"{len(self.left)} of {len(self._asked)} samples are missing ({first})"
