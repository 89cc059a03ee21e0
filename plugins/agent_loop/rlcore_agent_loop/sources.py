"""Where tools come from: what every source of tools does, and the source of functions and classes of the config."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcore.child import load_reference
from rlcore.errors import ChildError, boundary, describe
from rlcore_agent_loop.calls import as_text
from rlcore_agent_loop.schemas import schema_of
from rlcore_agent_loop.seats import Seat, Seats
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.toolbox import OBJECTS, created, kind_of


class Source(ABC):
    """A source of tools."""

    name: str
    """How errors name it."""

    @abstractmethod
    async def start(self, describe: bool) -> None:
        """Make ready; with `describe`, schemas are wanted."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; also more than once."""

    @abstractmethod
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The tools by name, with their schemas in the form of OpenAI (empty ones if they were not wanted)."""

    @abstractmethod
    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """The result of a call as text; ChildError for whatever went wrong."""

    async def release(self, sample: str) -> None:
        """The sample has ended; ChildError when an object of it raises."""


class Functions(Source):
    """The functions and classes of `plugins.agent_loop.tools`: sync ones in child processes, async ones here."""

    name = "plugins.agent_loop.tools"

    def __init__(self, settings: AgentLoopSettings, seats: Seats) -> None:
        self._settings, self._seats = settings, seats
        self._kinds: dict[str, tuple[str, bool]] = {}
        self._async: dict[str, Any] = {}
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._objects: dict[tuple[str, str], Any] = {}
        self._places: dict[str, _Place] = {}

    async def start(self, describe: bool) -> None:
        """Learn what each tool is. The seats must have been started: what cannot be imported has failed there."""
        if not self._settings.tools:
            return
        self._kinds = await self._seats.call(self._seats.free(), "tools", 60.0, "kinds")
        for name, tool in self._settings.tools.items():
            is_async = self._kinds[name][1]
            target = await asyncio.to_thread(load_reference, tool.fn) if is_async or describe else None
            if is_async:
                self._async[name] = target
            self._schemas[name] = await asyncio.to_thread(schema_of, name, target) if describe else {}

    async def close(self) -> None:
        """The seats are their owner's to close."""

    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return self._schemas

    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """See `Source.call`."""
        tool = self._settings.tools[name]
        max_chars = tool.max_result_chars or self._settings.max_result_chars
        if name in self._async:
            value = await within(name, tool.deadline_s, self._here(name, sample, columns, arguments))
            return as_text(value, max_chars)
        if self._kinds[name][0] != OBJECTS:
            seat = self._seats.free()
            return str(await self._seats.call(seat, name, tool.deadline_s, "call", name, dict(arguments), max_chars))
        if sample not in self._places:
            seat = self._seats.free()
            self._places[sample] = _Place(seat, seat.generation)
        place = self._places[sample]
        args = (name, sample, None if name in place.names else dict(columns), dict(arguments), max_chars)
        place.names.add(name)
        return str(
            await self._seats.call(place.seat, name, tool.deadline_s, "execute", *args, generation=place.generation)
        )

    async def _here(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
        target = self._async[name]
        if kind_of(target)[0] != OBJECTS:
            return await target(**arguments)
        if (sample, name) not in self._objects:
            self._objects[sample, name] = created(target, columns)
        return await self._objects[sample, name].execute(**arguments)

    async def release(self, sample: str) -> None:
        """Let the sample's objects go, here and in its child."""
        place = self._places.pop(sample, None)
        if place is not None and place.seat.generation == place.generation and place.seat.child.alive:
            await self._seats.call(place.seat, "release", 10.0, "release", sample, generation=place.generation)
        for key in [(sample, name) for name in self._async if (sample, name) in self._objects]:
            release = getattr(self._objects.pop(key), "release", None)
            if callable(release):
                await within(f"{key[1]}.release", self._settings.tools[key[1]].deadline_s, _awaited(release))


@dataclass(eq=False)
class _Place:
    """Where the objects of a sample live: all in one child."""

    seat: Seat
    generation: int
    names: set[str] = field(default_factory=set)
    """Tools whose object was created."""


async def _awaited(release: Any) -> None:
    pending = release()
    if asyncio.iscoroutine(pending):
        await pending


async def within(who: str, deadline_s: float, work: Awaitable[Any]) -> Any:
    """What somebody's coroutine returns; ChildError naming it when it raises, exits or takes longer."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            with boundary(who, ChildError):
                return await work
    except TimeoutError as cause:
        raise ChildError(f"{who} took longer than {deadline_s:g} s") from cause
    except SystemExit as cause:  # it would end the run
        raise ChildError(f"{who}: {describe(cause)}") from cause
