"""Sources of tools: their interface, and the source for functions and classes of the configuration."""

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlcore.contracts.children import ChildPool, ChildSlot
from rlcore.errors import ChildError, boundary
from rlcore.imports import import_target
from rlcore_agent_loop.settings import AgentLoopSettings
from rlcore_agent_loop.tools.calls import as_text
from rlcore_agent_loop.tools.in_child import in_child
from rlcore_agent_loop.tools.schemas import mismatch, schema_of, takes_any
from rlcore_agent_loop.tools.toolbox import FUNCTION, OBJECTS, created, kind_of

T = TypeVar("T")

logger = logging.getLogger(__name__)

CANCEL_S = 1.0
"""Seconds that a cancelled call has to end."""
_left: set[asyncio.Task[Any]] = set()
"""Cancelled calls that have not ended; the event loop keeps no task alive by itself."""


class ToolSource(ABC):
    """A source of tools."""

    name: str
    """Name of the source in errors."""

    @abstractmethod
    async def start(self, describe: bool) -> None:
        """Prepare; `describe`: schemas will be needed."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Safe to call more than once."""

    @abstractmethod
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The tools by name, with OpenAI-style schemas (empty without `describe`)."""

    @abstractmethod
    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """The result of a call as text; ChildError for any failure."""

    async def release(self, sample: str) -> None:
        """The sample has ended; ChildError when an object of it raises."""


class Functions(ToolSource):
    """The functions and classes of `plugins.agent_loop.tools`: sync ones in children, async ones in this process.

    Objects with the state of samples live in separate children, so that a hanging function does not destroy them.
    """

    name = "plugins.agent_loop.tools"

    def __init__(self, settings: AgentLoopSettings, functions: ChildPool, objects: ChildPool) -> None:
        self._settings, self._functions, self._objects = settings, functions, objects
        self._kinds: dict[str, tuple[str, bool]] = {}
        self._async: dict[str, Any] = {}
        self._schemas: dict[str, Mapping[str, Any]] = {}
        self._any: set[str] = set()
        """Tools whose schemas do not name all the arguments that they take."""
        self._held: dict[tuple[str, str], _Held] = {}
        self._places: dict[str, _Place] = {}

    async def start(self, describe: bool) -> None:
        """Find out the kind of each tool, in a child, and start the children that are needed.

        Import errors happen there.
        """
        if self._settings.tools:
            await self._objects.first()
            self._kinds = await in_child(self._objects, "tools", 60.0, "kinds")
        if self._settings.environment.fn or (OBJECTS, False) in self._kinds.values():
            await self._objects.start()
        else:
            await self._objects.close()
        if (FUNCTION, False) in self._kinds.values():
            await self._functions.start()
        for name, tool in self._settings.tools.items():
            is_async = self._kinds[name][1]
            target = await asyncio.to_thread(import_target, tool.fn) if is_async or describe else None
            if is_async:
                self._async[name] = target
            self._schemas[name] = await asyncio.to_thread(schema_of, name, target) if describe else {}
            if describe and takes_any(target):
                self._any.add(name)

    async def close(self) -> None:
        """Does nothing: the owner closes the pools."""

    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return self._schemas

    async def call(self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
        """See `ToolSource.call`."""
        if name not in self._any and (problem := mismatch(name, arguments, self._schemas[name])):
            raise ChildError(problem)
        tool = self._settings.tools[name]
        max_chars = tool.max_result_chars or self._settings.max_result_chars
        if name in self._async:
            return await within(name, tool.deadline_s, self._here(name, sample, columns, arguments, max_chars))
        if self._kinds[name][0] != OBJECTS:
            args: tuple[Any, ...] = (name, dict(arguments), max_chars)
            return str(await in_child(self._functions, name, tool.deadline_s, "call", *args))
        if sample not in self._places:
            self._places[sample] = _Place(self._objects.pick())
        place = self._places[sample]
        async with place.lock:
            if name not in place.held:
                await self._create(name, sample, place, columns)
            args = (name, sample, dict(arguments), max_chars)
            slot, held = place.slot, place.held[name]
            return str(
                await in_child(self._objects, name, tool.deadline_s, "execute", *args, slot=slot, generation=held)
            )

    async def _create(self, name: str, sample: str, place: "_Place", columns: Mapping[str, Any]) -> None:
        """Create the sample's object in the current child, even a new one: no state can have been lost yet."""
        slot, deadline_s, args = place.slot, self._settings.tools[name].deadline_s, (name, sample, dict(columns))
        await in_child(self._objects, f"{name}.create", deadline_s, "create", *args, slot=slot)
        place.held[name] = slot.generation

    async def _here(
        self, name: str, sample: str, columns: Mapping[str, Any], arguments: Mapping[str, Any], max_chars: int
    ) -> str:
        """The result as text, converted inside: a tool's own class may raise on access."""
        target = self._async[name]
        if kind_of(target)[0] != OBJECTS:
            return as_text(await target(**arguments), max_chars)
        held = self._held.setdefault((sample, name), _Held())
        async with held.lock:
            if held.made is None:
                new, pending = created(target, columns)
                await awaited(pending)
                held.made = new
        return as_text(await held.made.execute(**arguments), max_chars)

    async def release(self, sample: str) -> None:
        """Release the sample's objects, here and in its child; an error of one does not skip the others."""
        problems = []
        place = self._places.pop(sample, None)
        if place is not None and place.slot.generation in place.held.values() and place.slot.alive:
            slot, held = place.slot, place.slot.generation
            try:
                await in_child(self._objects, "release", 10.0, "release", sample, slot=slot, generation=held)
            except ChildError as error:
                problems.append(str(error))
        for key in [(sample, name) for name in self._async if (sample, name) in self._held]:
            release = getattr(self._held.pop(key).made, "release", None)
            if callable(release):
                try:
                    await within(f"{key[1]}.release", self._settings.tools[key[1]].deadline_s, _finished(release))
                except ChildError as error:
                    problems.append(str(error))
        if problems:
            raise ChildError("; ".join(problems))


@dataclass(eq=False)
class _Place:
    """The home of a sample's objects: one child, which takes one call at a time."""

    slot: ChildSlot
    held: dict[str, int] = field(default_factory=dict)
    """By tool with an object: the generation of the child that holds it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class _Held:
    """A sample's object of an async tool, once created."""

    made: Any = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _finished(release: Any) -> None:
    await awaited(release())


async def awaited(value: Any) -> Any:
    """The value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


async def within(who: str, deadline_s: float, work: Awaitable[T]) -> T:
    """The result of a foreign coroutine, in its own task; ChildError naming it when it raises, exits, takes too long,
    cancels itself, or claims to be cancelled although its task is not.

    One that ignores its cancellation is left behind after CANCEL_S, so that it holds up neither its sample nor the run.
    """

    async def bounded() -> T:
        with boundary(who, ChildError):
            return await work

    task = asyncio.create_task(bounded(), name=who)
    try:
        await asyncio.wait([task], timeout=deadline_s)
        is_late = not task.done()
    finally:
        if not task.done():
            await _cancelled(task)
    if is_late and (not task.done() or task.cancelled()):
        raise ChildError(f"{who} took longer than {deadline_s:g} s")
    if task.cancelled():
        raise ChildError(f"{who}: it cancelled itself")
    return task.result()


async def _cancelled(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    _left.add(task)
    task.add_done_callback(_forget)
    await asyncio.wait([task], timeout=CANCEL_S)
    if not task.done():
        logger.warning("%s is left behind, because it ignores its cancellation", task.get_name())


def _forget(task: "asyncio.Task[Any]") -> None:
    _left.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved, or asyncio logs it
