"""Environments answer the policy's turns without a tool call: user simulators, games and the like."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.contracts.children import ChildPool, ChildSlot
from rlcore.contracts.scorer import as_plain, number
from rlcore.errors import ChildError, boundary, shown
from rlcore.imports import import_target
from rlcore.types import Message, Prompt
from rlcore_agent_loop.settings import EnvironmentSettings
from rlcore_agent_loop.tools.calls import check_size, encodable
from rlcore_agent_loop.tools.in_child import in_child
from rlcore_agent_loop.tools.sources import awaited, within

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn."""

    messages: Sequence[Message] = ()
    """Messages to the policy, each with role and content: a text, or parts of the type text. May be empty only with
    `done`."""
    done: bool = False
    """The sample ends here."""
    reward: float = 0.0
    """Added to the sample's `environment_reward`."""
    restart: bool = False
    """`messages` are a new conversation: the sample continues in a separate part without the earlier turns."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Kept with the trajectory, as `info['environment']`; plain values."""


class Environment(ABC):
    """One object per sample. Subclasses implement `step`, sync (in a child process) or async (on the loop).

    A class may not mix sync and async methods.
    """

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """The opening messages; by default those of the prompt.

        All samples of a prompt get the same seed, because their rewards are compared; it differs between epochs.
        """
        return prompt.messages

    @abstractmethod
    def step(self, messages: Sequence[Message]) -> Any:
        """The answer (a `Step`) to a conversation that ends with the policy's turn."""

    def close(self) -> Any:
        """The sample has ended."""


class Environments:
    """Makes the environment of each sample."""

    def __init__(self, settings: EnvironmentSettings, pool: ChildPool) -> None:
        self._settings, self._pool = settings, pool
        self._class: Any = None
        self.name = settings.fn.rpartition(":")[2]
        """Name in the trace and in `rlcore where`."""

    async def start(self) -> None:
        """Find out whether the class is async. The pool must have been started."""
        if await in_child(self._pool, "environment", 60.0, "environment_is_async", Environment):
            self._class = await asyncio.to_thread(import_target, self._settings.fn)

    def open(self, sample: str) -> "SampleEnvironment":
        """The environment of one sample, not yet reset."""
        if self._class is not None:
            return Here(self._class, self._settings)
        return InChild(sample, self._settings, self._pool)


class SampleEnvironment(ABC):
    """An environment as the loop sees it; every method raises ChildError for any failure."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._limits = settings.max_messages, settings.max_chars

    @abstractmethod
    async def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The opening messages."""

    @abstractmethod
    async def step(self, messages: Sequence[Message]) -> Step:
        """The answer to a conversation that ends with the policy's turn."""

    @abstractmethod
    async def close(self) -> None:
        """The sample has ended. Errors are logged."""


class InChild(SampleEnvironment):
    """A sync environment, in a child process."""

    def __init__(self, sample: str, settings: EnvironmentSettings, pool: ChildPool) -> None:
        super().__init__(settings)
        self._sample, self._pool = sample, pool
        self._slot = pool.pick()
        self._generation = -1

    async def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        found = await self._call("reset", self._sample, prompt, seed, *self._limits)
        with boundary("environment.reset", ChildError):
            return opening(found, *self._limits)

    async def step(self, messages: Sequence[Message]) -> Step:
        plain = [dict(message) for message in messages]
        found = await self._call("step", self._sample, plain, *self._limits)
        with boundary("environment.step", ChildError):
            return checked(found, *self._limits)

    async def _call(self, method: str, *args: Any) -> Any:
        who, deadline_s = f"environment.{method}", self._settings.deadline_s
        if method == "reset":
            return await in_child(self._pool, who, deadline_s, method, *args, slot=self._slot, began=self._began)
        held = self._generation
        return await in_child(self._pool, who, deadline_s, method, *args, slot=self._slot, generation=held)

    def _began(self, slot: ChildSlot) -> None:
        """From here on the child holds an object that must be released, even if `reset` raises."""
        self._generation = slot.generation

    async def close(self) -> None:
        if self._slot.generation != self._generation or not self._slot.alive:
            return
        try:
            await self._call("release", self._sample)
        except ChildError as error:
            logger.warning("sample %s: %s", self._sample, error)


class Here(SampleEnvironment):
    """An async environment, on the loop."""

    def __init__(self, cls: Any, settings: EnvironmentSettings) -> None:
        super().__init__(settings)
        self._class = cls
        self._environment: Any = None

    async def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        async def work() -> Any:
            self._environment = self._class(**self._settings.kwargs)
            return await awaited(self._environment.reset(prompt, seed))

        found = await within("environment.reset", self._settings.deadline_s, work())
        with boundary("environment.reset", ChildError):  # its values may run foreign code
            return opening(found, *self._limits)

    async def step(self, messages: Sequence[Message]) -> Step:
        async def work() -> Any:
            copies = [dict(message) for message in messages]  # the recorded ones belong to the sample
            return await awaited(self._environment.step(copies))

        found = await within("environment.step", self._settings.deadline_s, work())
        with boundary("environment.step", ChildError):
            return checked(found, *self._limits)

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if not callable(close):
            return

        async def work() -> None:
            await awaited(close())

        try:
            await within("environment.close", self._settings.deadline_s, work())
        except ChildError as error:
            logger.warning("%s", error)


def opening(messages: Any, max_messages: int, max_chars: int) -> list[Message]:
    """The result of `reset`; ChildError if it does not open a conversation."""
    check_size("reset returned", messages, None, max_messages, max_chars)
    found = readable("reset returned", messages)
    if not found:
        raise ChildError("environment.reset returned no messages; needs at least one")
    return found


def readable(what: str, messages: Any) -> list[Message]:
    """The messages of an environment as plain values; ChildError if they are not messages with text.

    A content that is a list of text parts becomes their joined text. Text that no tokenizer could encode is replaced.
    """
    if not isinstance(messages, (list, tuple)):
        raise ChildError(f"environment.{what} {type(messages).__name__} as messages; needs a list of them")
    return [_message(what, message) for message in messages]


def _message(what: str, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise ChildError(f"environment.{what} the message {shown(message)}; needs one with role and content")
    content, plain = message["content"], as_plain(message)
    if isinstance(content, (list, tuple)):  # joined, because many templates drop parts or write them as Python does
        if wrong := [part for part in content if not _is_text(part)]:
            kind = wrong[0].get("type") if isinstance(wrong[0], Mapping) else type(wrong[0]).__name__
            raise ChildError(
                f"environment.{what} a message with a part of type {shown(kind)}; needs parts of type text"
            )
        plain["content"] = "".join(part["text"] for part in plain["content"])
    elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise ChildError(f"environment.{what} a message whose content is {type(content).__name__}; needs text")
    found: Message = encodable(plain)
    return found


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def checked(step: Any, max_messages: int, max_chars: int) -> Step:
    """The step as plain values; ChildError if the loop cannot continue with it."""
    if not isinstance(step, Step):
        raise ChildError(f"environment.step returned {type(step).__name__}; needs rlcore_agent_loop.Step")
    step = Step(step.messages, step.done, step.reward, step.restart, step.info)  # a subclass may change between reads
    check_size("step returned", step.messages, step.info, max_messages, max_chars)
    for name, flag in (("done", step.done), ("restart", step.restart)):
        if not isinstance(flag, (bool, np.bool_)):
            raise ChildError(f"environment.step returned {name}={shown(flag)}; needs True or False")
    reward = number(as_plain(step.reward))
    if isinstance(reward, str):
        raise ChildError(f"environment.step returned reward={shown(step.reward)}; needs a finite number")
    if not isinstance(step.info, Mapping):
        raise ChildError(f"environment.step returned {type(step.info).__name__} as info; needs a mapping")
    messages = () if step.done else readable("step returned", step.messages)
    if not step.done and not messages:
        raise ChildError("environment.step returned no messages and is not done; needs one of them")
    return Step(messages, bool(step.done), reward, bool(step.restart), as_plain(step.info))
