"""Stand-ins for child processes that run in this process, for tests of code that neither hangs nor crashes."""

import asyncio
import os
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from rlcore.cluster.child import ChildProcesses
from rlcore.cluster.child_main import end_copy
from rlcore.contracts.children import Child, Children
from rlcore.errors import CALLED, ChildError, RlcoreError, boundary
from rlcore.imports import import_target
from rlcore.reward.child_calls import SERVED
from rlcore.reward.served import ServedReward
from rlcore.reward.spec import FunctionSpec

LETTERS = "rlcore.testing.letters:count_letter"


@asynccontextmanager
async def open_children(processes: bool) -> AsyncIterator[Children]:
    """Children that end with the block: real ones with `processes`, else stand-ins that run in this process."""
    children = ChildProcesses() if processes else HereChildren()
    try:
        yield children
    finally:
        await children.close()


class HereChild:
    """A child without a process, for code that neither hangs nor crashes."""

    alive = True

    def __init__(self, served: Any, name: str = "child") -> None:
        self._served, self.name = served, name

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result for copies of its arguments. Its exceptions become those that a child would send."""
        copies = pickle.loads(pickle.dumps(args))

        def work() -> Any:
            process = os.getpid()
            with boundary("", ChildError, CALLED):  # a future cannot hold a StopIteration
                try:
                    return getattr(self._served, method)(*copies)
                finally:
                    end_copy(process)

        try:
            with boundary("", ChildError):
                return await asyncio.to_thread(work)
        except RlcoreError as error:
            raise ChildError(str(error).removeprefix(": ")) from error

    async def close(self) -> None:
        """Does nothing: no call outlives its `await`."""
        self.alive = False


class HereChildren:
    """Starts children that run in this process."""

    def __init__(self) -> None:
        self.started: list[HereChild] = []

    async def start(self, target: str, *args: Any, name: str, **limits: Any) -> Child:
        """See `rlcore.contracts.children.Children`. Limits of a process are ignored."""
        self.started.append(HereChild(import_target(target)(*args), name))
        return self.started[-1]

    async def close(self) -> None:
        """Does nothing: there are no processes."""


class RunChildren:
    """Children of a run: stand-ins for the reward functions that `stands_in` admits, else real ones.

    Starting a process takes longer than most runs of tests.
    """

    def __init__(self, stands_in: Callable[[FunctionSpec], bool]) -> None:
        self._stands_in = stands_in
        self._processes = ChildProcesses()

    async def start(self, target: str, *args: Any, name: str, **limits: Any) -> Child:
        """See `rlcore.contracts.children.Children`. A function with a memory limit always gets a process."""
        if target == SERVED:
            spec, memory_gib = args
            if not memory_gib and self._stands_in(spec):
                return HereChild(ServedReward(spec), name)
        return await self._processes.start(target, *args, name=name, **limits)

    async def close(self) -> None:
        """End the real children."""
        await self._processes.close()


@contextmanager
def letters_here() -> Iterator[None]:
    """In the block, runs need no process for `count_letter`."""
    here = partial(RunChildren, lambda spec: spec.target == LETTERS)
    with patch("rlcore.runtime.launch.ChildProcesses", here):
        yield


@contextmanager
def rewards_here() -> Iterator[None]:
    """In the block, reward functions of runs and of `reward_context` need no process. None may hang, crash or exit."""
    here = partial(RunChildren, lambda spec: True)
    with (
        patch.object(sys, "path", [*sys.path]),  # `import_target` adds the directories of functions' files
        patch("rlcore.runtime.launch.ChildProcesses", here),
        patch("rlcore.testing.rewards.ChildProcesses", here),
    ):
        yield
