"""The rollout service: distributes requests of agent loops to the replicas of the role `rollout`."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

import numpy as np

from rlcore.aio import Inbox, all_or_none
from rlcore.contracts.dispatch import ReplicaDispatcher
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors import RlcoreError, WorkerError, boundary, worker_call
from rlcore.errors.checks.arrays import check_answer, check_completion
from rlcore.runtime.rank_deal import RankDeal
from rlcore.runtime.sampling_clock import SamplingClock
from rlcore.runtime.suspects import RequestRecord, Suspects
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane

logger = logging.getLogger(__name__)

_Finished = Inbox[Completion | None]
"""Completions, and None from each replica that has finished."""


class RolloutService:
    """Distributes requests over replicas and checks that every completion arrives exactly once."""

    def __init__(
        self,
        replicas: WorkerGroup[RolloutWorker],
        deadline_s: float,
        vocabulary: int | None = None,
        ranks: int = 1,
    ) -> None:
        """`vocabulary`: upper bound of token ids; None: unknown. `ranks` of each replica."""
        self._replicas = replicas
        self.clock = SamplingClock(deadline_s)
        self._vocabulary = vocabulary
        self._ranks = RankDeal() if ranks > 1 else None
        self.newest_version = 0
        """Of the weights that replicas have, or are being given."""
        self._dispatcher = ReplicaDispatcher(replicas)
        self._suspects = Suspects(self._dispatcher, len(replicas.replicas))

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Samples that each replica has not finished."""
        return tuple(self._dispatcher.outstanding)

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes.

        A request goes to the replica that served its conversation before, else to the one with the fewest outstanding
        samples. Requests are distributed in canonical order, so the shares of a single call do not depend on timing. If
        a replica dies, its unfinished requests are retried on the others or on its replacement, once per death, while a
        replica serves or will be restarted. All samples of a retried request are generated again, and those that had
        already arrived are ignored. A request that kills replicas (`Suspects`) ends in completions with an error.
        The ranks of a replica take turns, and all requests of a conversation go to one rank. WorkerError if a replica
        fails, gives a wrong answer, or the deadline of the clock passes. However the call ends, including by `aclose`,
        replicas are asked to abort the rest of it.
        """
        ordered = sorted(requests, key=lambda request: request.id)
        missing = _Missing(ordered)
        finished = _Finished()
        places = {request.id: self._assign(request) for request in ordered}
        tasks = [
            asyncio.create_task(self._feed(index, share, places, missing, finished))
            for index, share in _shares(ordered, places)
        ]
        running = len(tasks)
        try:
            # one limit for all: completions that arrived by then are still yielded
            with self.clock.limit(partial(finished.fail, TimeoutError())):
                while finished or (running and (missing.left or not missing.repeated)):
                    completion = await finished.take()
                    if completion is None:
                        running -= 1
                    else:
                        yield completion
            if missing.left:
                raise WorkerError(f"rollout: {missing}, but every replica says it is done")
        except TimeoutError as cause:
            raise WorkerError(
                f"rollout: {missing} after rollout.deadline_s={self.clock.deadline_s:g} s without a sample "
                f"({lane} lane)"
            ) from cause
        finally:
            try:
                if not all(task.done() for task in tasks):
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # a task counts arrivals until it ends
                for name, _ in missing.left:
                    self._dispatcher.finish(places[name], 1)

    async def _feed(
        self,
        index: int,
        requests: Sequence[GenerateRequest],
        places: dict[str, int],
        missing: "_Missing",
        finished: "_Finished",
    ) -> None:
        """Put the completions of a replica's share, then None, or the error that ended it."""
        try:
            with boundary("rollout: a replica's requests", WorkerError):  # a bug would show only at the deadline
                await self._serve(index, requests, places, missing, finished)
            finished.put(None)
        except RlcoreError as error:
            finished.fail(error)

    async def _serve(
        self,
        index: int,
        requests: Sequence[GenerateRequest],
        places: dict[str, int],
        missing: "_Missing",
        finished: "_Finished",
        alone: bool = False,
    ) -> None:
        """Put the completions of a replica's share; if it dies, the remaining replicas serve its unfinished
        requests."""
        replica = self._replicas.replicas[index]
        async with self._suspects.serving(index, alone):
            life, was_alive = self._dispatcher.losses(index), replica.alive
            try:
                await self._stream(index, requests, places, missing, finished)
                self._suspects.record_end()
                return
            except RlcoreError as caught:
                if replica.alive and self._dispatcher.losses(index) == life:
                    raise
                error = caught
            unfinished = missing.repeat(requests)
            if was_alive and unfinished:
                self._suspects.record_death(
                    index, life, [missing.records[request.id] for request, _ in unfinished], alone
                )
        left = [(request, num) for request, num in unfinished if not missing.records[request.id].is_at_fault]
        for request, _ in unfinished:
            if missing.records[request.id].is_at_fault:
                self._fail(request, error, places, missing, finished)
        if not left:
            return
        await self._dispatcher.wait_for_one(error)
        logger.warning("%s; %d requests are asked again", error, len(left))
        await self._serve_again(left, places, missing, finished)

    async def _serve_again(
        self,
        unfinished: Sequence[tuple[GenerateRequest, int]],
        places: dict[str, int],
        missing: "_Missing",
        finished: "_Finished",
    ) -> None:
        """Serve requests of a dead replica, each with the number of its missing samples; suspects separately."""
        for request, num in unfinished:
            self._dispatcher.finish(places[request.id], num)
            places[request.id] = self._assign(request)
            self._dispatcher.finish(places[request.id], request.n - num)
        again = []
        for place, share in _shares([request for request, _ in unfinished], places):
            records = [missing.records[request.id] for request in share]
            if together := [record.request for record in records if not record.is_suspect]:
                again.append(self._serve(place, together, places, missing, finished))
            for suspects in self._suspects.shares([record for record in records if record.is_suspect]):
                again.append(
                    self._serve(place, [record.request for record in suspects], places, missing, finished, alone=True)
                )
        await all_or_none(again)

    def _fail(
        self,
        request: GenerateRequest,
        error: RlcoreError,
        places: Mapping[str, int],
        missing: "_Missing",
        finished: "_Finished",
    ) -> None:
        """Put a completion with the reason for each missing sample."""
        num_deaths = len(missing.records[request.id].deaths)
        reason = f"rollout: request '{request.id}': replicas died {num_deaths} times while it was served: {error}"
        logger.warning("%s; its samples have failed", reason)
        for sample in missing.give_up(request):
            self._dispatcher.finish(places[request.id], 1)
            finished.put(
                Completion(
                    request.id,
                    sample,
                    np.zeros(0, np.int32),
                    np.zeros(0, np.float32),
                    FinishReason.STOP,
                    0,
                    error=reason,
                )
            )

    async def _stream(
        self,
        index: int,
        requests: Sequence[GenerateRequest],
        places: Mapping[str, int],
        missing: "_Missing",
        finished: "_Finished",
    ) -> None:
        replica, loop = self._replicas.replicas[index], asyncio.get_running_loop()
        requests = requests if self._ranks is None else self._ranks.deal(requests)
        who = f"{replica.name}.generate()"
        with worker_call(ROLLOUT.name, RolloutWorker.generate.__name__):
            async with contextlib.aclosing(replica.stream(RolloutWorker.generate, requests)) as completions:
                async for completion in completions:
                    check_completion(who, completion, self._vocabulary)
                    is_new = missing.arrived(completion)
                    check_answer(who, completion, missing.records[completion.request_id].request, self.newest_version)
                    if is_new:
                        self.clock.since = loop.time()
                        self._dispatcher.finish(places[completion.request_id], 1)
                        finished.put(completion)

    def _assign(self, request: GenerateRequest) -> int:
        return self._dispatcher.assign(request.n, request.conversation or None)


def _shares(requests: Sequence[GenerateRequest], places: Mapping[str, int]) -> list[tuple[int, list[GenerateRequest]]]:
    """The share of each replica that gets any requests."""
    shares: dict[int, list[GenerateRequest]] = {}
    for request in requests:
        shares.setdefault(places[request.id], []).append(request)
    return sorted(shares.items(), key=lambda share: share[0])


class _Missing:
    """Tracks the completions that have not arrived yet."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.left = {(request.id, sample) for request in requests for sample in range(request.n)}
        self.repeated: set[str] = set()
        """Retried requests, some of whose samples may arrive twice."""
        self.records = {request.id: RequestRecord(request) for request in requests}
        self._issued = frozenset(self.left)

    def repeat(self, requests: Sequence[GenerateRequest]) -> list[tuple[GenerateRequest, int]]:
        """The requests to retry, each with the number of its missing samples."""
        left: dict[str, int] = {}
        for name, _ in self.left:
            left[name] = left.get(name, 0) + 1
        unfinished = [(request, left[request.id]) for request in requests if request.id in left]
        self.repeated |= {request.id for request, _ in unfinished}
        return unfinished

    def give_up(self, request: GenerateRequest) -> list[int]:
        """Remove the missing samples of the request, and return them."""
        samples = [sample for sample in range(request.n) if (request.id, sample) in self.left]
        self.left -= {(request.id, sample) for sample in samples}
        return samples

    def arrived(self, completion: Completion) -> bool:
        """Record an arrival; True if it is new. WorkerError if it was not requested, or arrived before without a
        retry."""
        key = (completion.request_id, completion.sample)
        if key in self.left:
            self.left.remove(key)
            return True
        if key in self._issued and completion.request_id in self.repeated:
            return False
        raise WorkerError(f"rollout: sample {key[1]} of request '{key[0]}' came twice, or was not asked for")

    def __str__(self) -> str:
        first = ", ".join(f"{name}#{sample}" for name, sample in sorted(self.left)[:3])
        return f"{len(self.left)} of {len(self._issued)} samples are missing ({first})"
