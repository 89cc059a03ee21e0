"""The rollout service: what agent loops ask, answered by the replicas of the role `rollout`."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from rlcore.errors import RlcoreError, WorkerError
from rlcore.rollout import RolloutWorker
from rlcore.types import Completion, GenerateRequest, Lane
from rlcore.workers import ReplicaHandle, WorkerGroup

REMEMBERED_CONVERSATIONS = 65536
"""Conversations whose replica is kept in mind; of an older one the next turn goes to any replica."""


class RolloutService:
    """Spreads requests over replicas and checks that every completion comes, once."""

    def __init__(self, replicas: WorkerGroup[RolloutWorker], deadline_s: float) -> None:
        self._replicas = replicas
        self._deadline_s = deadline_s
        self._routes = Routes(len(replicas.replicas))

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Samples that each replica has not finished."""
        return tuple(self._routes.outstanding)

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes.

        A request goes where its conversation has been before, else to the replica with the fewest samples outstanding;
        requests are dealt out in canonical order, so that what one call alone sends to each replica does not depend on
        timing. WorkerError when a replica fails, answers wrongly, or the deadline passes. However the call ends, also
        because whoever asked lost interest (`aclose`), the replicas are told to stop what is left of it.
        """
        ordered = sorted(requests, key=lambda request: request.id)
        missing = _Missing(ordered)
        finished: asyncio.Queue[Completion | RlcoreError | None] = asyncio.Queue()
        places = {request.id: self._routes.take(request) for request in ordered}
        shares = [
            (replica, [request for request in ordered if places[request.id] == index])
            for index, replica in enumerate(self._replicas.replicas)
        ]
        tasks = [asyncio.create_task(_feed(replica, share, finished)) for replica, share in shares if share]
        ends_at = asyncio.get_running_loop().time() + self._deadline_s
        running = len(tasks)
        try:
            while running:
                try:
                    async with asyncio.timeout_at(ends_at):
                        item = await finished.get()
                except TimeoutError as cause:
                    raise WorkerError(
                        f"rollout: {missing} after rollout.deadline_s={self._deadline_s:g} s ({lane} lane)"
                    ) from cause
                if isinstance(item, RlcoreError):
                    raise item
                if item is None:
                    running -= 1
                    continue
                missing.arrived(item)
                self._routes.give_back(places[item.request_id], 1)
                yield item
            if missing.left:
                raise WorkerError(f"rollout: {missing}, but every replica says it is done")
        finally:
            for name, _ in missing.left:
                self._routes.give_back(places[name], 1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class Routes:
    """Which replica gets a request: sticky for each conversation, else the least loaded."""

    def __init__(self, num_replicas: int) -> None:
        self.outstanding = [0] * num_replicas
        """Samples that each replica owes."""
        self._homes: OrderedDict[str, int] = OrderedDict()

    def take(self, request: GenerateRequest) -> int:
        """The replica for a request, whose samples count there from now on; of equals the first."""
        place = self._homes.get(request.conversation) if request.conversation else None
        if place is None:
            place = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
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


async def _feed(
    replica: ReplicaHandle[RolloutWorker],
    requests: Sequence[GenerateRequest],
    finished: "asyncio.Queue[Completion | RlcoreError | None]",
) -> None:
    """Put a replica's completions, then None, or the error that ended it."""
    try:
        async with contextlib.aclosing(replica.stream(RolloutWorker.generate, requests)) as completions:
            async for completion in completions:
                finished.put_nowait(completion)
        finished.put_nowait(None)
    except RlcoreError as error:
        finished.put_nowait(error)


class _Missing:
    """Which completions have not come."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.left = {(request.id, sample) for request in requests for sample in range(request.n)}
        self._total = len(self.left)

    def arrived(self, completion: Completion) -> None:
        """Cross it off; WorkerError for one that nobody asked for or that came before."""
        key = (completion.request_id, completion.sample)
        if key not in self.left:
            raise WorkerError(f"rollout: sample {key[1]} of request '{key[0]}' came twice, or nobody asked for it")
        self.left.remove(key)

    def __str__(self) -> str:
        first = ", ".join(f"{name}#{sample}" for name, sample in sorted(self.left)[:3])
        return f"{len(self.left)} of {self._total} samples are missing ({first})"
