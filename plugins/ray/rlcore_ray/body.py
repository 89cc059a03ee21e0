"""The controller's side of a replica made of actors."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError, RayTaskError

import rlcore.errors
from rlcore.cluster.kit import ANSWER_S, RankLine, answers_of_ranks, difference, merged
from rlcore.contracts.clusters import Deadlines, Shipment
from rlcore.errors import ChildError, RlcoreError, WorkerError, boundary, describe
from rlcore_ray.actor import ASIDE, CROSSING, FAILED, OK, Answer
from rlcore_ray.output import ActorOutput, ProcessPlace
from rlcore_ray.sealed import Sealed

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
"""The node address of a Ray that serves only this machine."""
LAST_WORD_S = 30.0
"""Seconds allowed for Ray to find out why an unreachable actor ended: it polls nodes every few seconds."""
ASK_AGAIN_S = 0.5


class ActorBody:
    """The actors of one replica, one per rank. Implements `rlcore.contracts.clusters.ReplicaBody`."""

    def __init__(self, name: str, actors: Sequence[Any], output: ActorOutput) -> None:
        self.name = name
        self._output = output
        self.rendezvous = ""
        self._scratch = ""
        """Address at which ranks of one machine meet."""
        self._actors = tuple(actors)
        self._number = 0
        self._places: Sequence[ProcessPlace | None] = [None] * len(self._actors)
        self._reasons: dict[int, str] = {}
        """Reasons why ranks have ended, in order of detection."""
        self._overdue: set[int] = set()
        """Ranks that were killed because a call took too long."""
        self._last_words: dict[int, str] = {}
        self._closed = False

    @property
    def alive(self) -> bool:
        """False once an actor is known to have ended."""
        return not self._reasons and not self._closed

    async def meet(self, deadline_s: float) -> None:
        """Wait until every actor runs; agree on where the ranks meet."""
        where = f"{self.name}: starting its actor"
        with _in_time(where, deadline_s):
            refs = [actor.address.remote() for actor in self._actors]
            addresses = await self._all(refs, self._ask, where, deadline_s)
        places = [ProcessPlace(host, process) for host, _, process in addresses]
        for rank, place in enumerate(places):
            self._output.expect(place, self._rank_name(rank))
        self._places = places
        if len(self._actors) > 1:
            host, port, _ = addresses[0]
            self.rendezvous = f"tcp://{host}:{port}"
            if {address for address, _, _ in addresses} == {LOOPBACK}:  # torch would listen on all interfaces
                self._scratch = tempfile.mkdtemp(prefix="rlcore-ranks-")
                self.rendezvous = f"file://{self._scratch}/meeting"

    async def build(self, ranks: Sequence[Shipment], deadline_s: float) -> None:
        """See `ReplicaBody.build`."""
        where = f"{ranks[0].name}.setup()"
        refs = [actor.build.remote(shipment) for actor, shipment in zip(self._actors, ranks, strict=True)]
        try:
            await self._all(refs, self._value, where, deadline_s)
        except WorkerError as error:
            alive = [place for rank, place in enumerate(self._places) if place and rank not in self._reasons]
            causes = [await self._output.cause(place, str(error)) for place in alive]
            if cause := next(filter(None, causes), ""):
                raise WorkerError(f"{error}{cause}") from error
            raise
        except asyncio.CancelledError:  # setup() may take minutes, and nothing is lost with it
            self.kill()
            raise

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
        """See `ReplicaBody.call`. Arguments common to all ranks are stored once; the loop keeps running meanwhile."""
        if concurrent:
            return await self._call_aside(role, method, (args, kwargs), where, deadline_s)
        with boundary(f"{where}: its arguments cannot be sent", WorkerError):
            payload = await self._payload(args, kwargs)
            number = self._number
            refs = [
                actor.call.remote(number, role, method, payload, rank == 0) for rank, actor in enumerate(self._actors)
            ]
        self._number += 1  # only now: actors wait for each number in turn
        answered = False
        try:
            values = await self._all(refs, self._value, where, deadline_s)
            answered = True
        finally:
            if not answered:
                self._cancel(number)
        return values[0]

    async def _payload(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(self._actors) == 1:
            return Sealed((args, kwargs))
        return await asyncio.to_thread(lambda: ray.put(Sealed((args, kwargs))))

    async def _call_aside(self, role: str, method: str, arguments: Any, where: str, deadline_s: float) -> Any:
        """The result of a method that answers while others compute; it has no turn, and is not cancelled."""
        with boundary(f"{where}: its arguments cannot be sent", WorkerError):
            payload = Sealed(arguments)
            refs = [
                actor.call_aside.options(concurrency_group=ASIDE).remote(role, method, payload, rank == 0)
                for rank, actor in enumerate(self._actors)
            ]
        return (await self._all(refs, self._value, where, deadline_s))[0]

    async def stream(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        """See `ReplicaBody.stream`."""
        number = self._number
        with boundary(f"{where}: its arguments cannot be sent", WorkerError):
            payload = Sealed((args, kwargs))
            calls = [
                actor.stream.options(num_returns="streaming").remote(number, role, method, payload)
                for actor in self._actors
            ]
        self._number += 1
        streams = [self._items(rank, refs, number, where, deadlines) for rank, refs in enumerate(calls)]
        async with aclosing(merged(streams)) as items:
            async for result in items:
                yield result

    async def _items(
        self, rank: int, refs: Any, number: int, where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        """The items of one rank's stream."""
        ended = False
        try:
            while True:
                try:
                    ref = await anext(refs)
                except StopAsyncIteration:
                    ended = True
                    return
                for result in await self._value(rank, ref, where, deadlines.call_s):
                    yield result
        except RayError as error:
            ended = not isinstance(error, RayTaskError)
            raise await self._failed(rank, error, where) from error
        finally:
            if not ended:
                self._actors[rank].cancel.remote(number)
                await self._drain(refs, deadlines.close_s)

    async def _drain(self, refs: Any, close_s: float) -> None:
        """Consume what still arrives, so that the worker's generator has ended when this returns."""
        try:
            async with asyncio.timeout(close_s):
                async for _ in refs:
                    pass
        except (TimeoutError, RayError):
            pass

    async def _all(self, refs: Sequence[Any], ask: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
        """The answers of all ranks. The first error ends the wait, because other ranks may wait for that rank."""
        answers = [ask(rank, ref, *args) for rank, ref in enumerate(refs)]
        return await answers_of_ranks(answers, self._reasons.__contains__)

    async def _value(self, rank: int, ref: Any, where: str, deadline_s: float) -> Any:
        """A worker's result; its exception is raised here.

        WorkerError at the deadline, after which the actor is killed, because its loop may be stuck.
        """
        try:
            return opened(await self._ask(rank, ref, where, deadline_s), where)
        except TimeoutError as cause:
            reason = f"{where} took longer than {deadline_s:g} s"
            self._reasons.setdefault(rank, reason)
            self._overdue.add(rank)
            ray.kill(self._actors[rank])
            raise WorkerError(f"{reason}; its actor was killed") from cause

    async def _ask(self, rank: int, ref: Any, where: str, deadline_s: float) -> Any:
        """The value of a reference; TimeoutError when the deadline passes, WorkerError when the rank's actor ends."""
        try:
            async with asyncio.timeout(deadline_s):
                return await ref
        except GetTimeoutError:
            raise
        except RayError as error:
            raise await self._failed(rank, error, where) from error

    async def _failed(self, rank: int, error: RayError, where: str) -> WorkerError:
        """The error of a call without an answer. After a RayTaskError the actor still runs; only the call failed."""
        if isinstance(error, RayTaskError):
            return WorkerError(f"{where}: {describe(error.cause)}")
        return WorkerError(f"{where}: {await self._lost(rank, error)}")

    async def _lost(self, rank: int, error: RayError) -> str:
        """Reason for a rank's silence. The rest of Ray's message is an excerpt of its log."""
        error = await self._last_word(rank, error)
        if self._closed and rank not in self._reasons:
            return next(iter(self._reasons.values()), "it was closed")
        if rank in self._overdue:
            return self._reasons[rank]
        several, place = len(self._actors) > 1, self._places[rank]
        whose = f"its rank {rank}, {self._rank_name(rank)}, ended" if several else "its actor ended"
        # A worker embedded in another one shares its actor.
        where = ", ".join(word for word in ("" if several else self.name, str(place or "")) if word)
        reason = f"{whose}: {describe(error).rstrip('.')}" + (where and f" ({where})")
        self._reasons.setdefault(rank, reason)
        last_words = await self._output.last_words(place)
        return self._reasons[rank] + self._last_words.setdefault(rank, last_words)

    def _rank_name(self, rank: int) -> str:
        return f"{self.name[:-1]}.{rank}]" if len(self._actors) > 1 else self.name

    async def _last_word(self, rank: int, error: RayError) -> RayError:
        """The error; if it only says that the actor is unreachable, Ray's later error with the cause."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                while isinstance(error, ActorUnavailableError) and not self._closed:
                    await asyncio.sleep(ASK_AGAIN_S)
                    try:
                        await self._actors[rank].watch.remote()
                    except RayError as later:
                        error = later
        return error

    def _cancel(self, number: int) -> None:
        for actor in self._actors:
            actor.cancel.remote(number)

    async def difference(self) -> str:
        """The ranks that do not answer or are at other lines than the rest, for a report of a call that hangs."""
        return difference(await asyncio.gather(*map(self._line, range(len(self._actors)))))

    async def _line(self, rank: int) -> RankLine:
        """The line at which a rank's workers are; a process that is stopped does not answer."""
        place = self._places[rank]
        line = ""
        with suppress(TimeoutError, RayError):
            async with asyncio.timeout(ANSWER_S):
                line = await self._actors[rank].line.options(concurrency_group=ASIDE).remote()
        return RankLine(place.process if place else 0, place.node if place else "", line)

    async def ended(self) -> str:
        """See `ReplicaBody.ended`."""
        watches = [asyncio.ensure_future(self._watch(rank)) for rank in range(len(self._actors))]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watches:
                watch.cancel()
        return done.pop().result()

    async def _watch(self, rank: int) -> str:
        """Wait until the rank ends. Returns the reason."""
        try:
            await self._actors[rank].watch.remote()
        except RayError as error:
            return await self._lost(rank, error)
        return ""

    async def close(self, deadline_s: float) -> None:
        """See `ReplicaBody.close`."""
        if self.alive:
            where = f"{self.name}.close()"
            try:
                with _in_time(where, deadline_s):
                    refs = [actor.close.remote() for actor in self._actors]
                    for problems in await self._all(refs, self._ask, where, deadline_s):
                        for problem in problems:
                            logger.warning("%s", problem)
                await self._output.until_end([place for place in self._places if place])
            except RlcoreError as error:
                logger.warning("%s", error)
        self.kill()

    def kill(self) -> None:
        """End the actors at once."""
        self._closed = True
        for actor in self._actors:
            ray.kill(actor)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


@contextmanager
def _in_time(where: str, deadline_s: float) -> Iterator[None]:
    """Turns a timeout inside into a WorkerError that names the call."""
    try:
        yield
    except TimeoutError as cause:
        raise WorkerError(f"{where} took longer than {deadline_s:g} s") from cause


def opened(answer: Answer, where: str) -> Any:
    """The value of an answer. The worker's error is raised here, with its traceback as the cause."""
    kind, value = answer
    if kind == FAILED:
        name, message, trace = value
        known: type[RlcoreError] = getattr(rlcore.errors, name, WorkerError)
        raise known(message) from ChildError(message, trace)
    if kind == CROSSING:
        raise WorkerError(f"{where}: {value}")
    with boundary(f"{where}: its result cannot be read", ChildError):
        return value.opened() if kind == OK else [sealed.opened() for sealed in value]
