"""Stand-ins for child processes that run in this process, for tests of code that neither hangs nor crashes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.children import Child, Children
from rlcore.errors import CALLED, ChildError, boundary
from rlcore.imports import import_target


@asynccontextmanager
async def open_children(processes: bool) -> AsyncIterator[Children]:
    """Children of a test, ended with it: with `processes` real ones, else stand-ins that run in this process."""
    children = ChildProcesses() if processes else HereChildren()
    try:
        yield children
    finally:
        await children.close()


class HereChild:
    """A child without a process: for code that neither hangs nor crashes."""

    alive = True

    def __init__(self, served: Any, name: str = "child") -> None:
        self._served, self.name = served, name

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """The method's result; its exceptions become those that a child would send."""

        def work() -> Any:
            with boundary("", ChildError, CALLED):  # a future takes no StopIteration
                return getattr(self._served, method)(*args)

        try:
            with boundary("", ChildError):
                return await asyncio.to_thread(work)
        except ChildError as error:
            raise ChildError(str(error).removeprefix(": ")) from error

    async def close(self) -> None:
        """Does nothing: no call outlives its `await`."""
        self.alive = False


class HereChildren:
    """Starts children that run in this process."""

    def __init__(self) -> None:
        self.started: list[HereChild] = []

    async def start(
        self,
        target: str,
        *args: Any,
        name: str,
        threads: int = 1,
        deadline_s: float = 60.0,
        env: Sequence[str] | None = None,
    ) -> Child:
        """See `rlcore.contracts.children.Children`."""
        self.started.append(HereChild(import_target(target)(*args), name))
        return self.started[-1]

    async def close(self) -> None:
        """Does nothing: there are no processes."""
