"""Calls of tools, environments and agents in child processes. Failures are data."""

from collections.abc import Callable
from typing import Any

from rlcore.contracts.children import ChildPool, ChildSlot, LostProcess, RestartError
from rlcore.errors import ChildError, WorkerError


class CallLost(ChildError):
    """Another call ended the process that this one ran in, or that held its object."""


async def in_child(
    pool: ChildPool,
    who: str,
    deadline_s: float,
    method: str,
    *args: Any,
    slot: ChildSlot | None = None,
    generation: int | None = None,
    began: Callable[[ChildSlot], None] = lambda slot: None,
    shared_by: int = 1,
) -> Any:
    """The result of `ChildPool.call`; ChildError for any failure, whose message begins with `who`.

    CallLost if another call caused it. `shared_by` is the number of calls that a child takes at a time.
    """
    try:
        return await pool.call(
            method, *args, who=who, deadline_s=deadline_s, slot=slot, generation=generation, began=began
        )
    except TimeoutError as cause:
        raise ChildError(f"{who} took longer than {deadline_s:g} s") from cause
    except LostProcess as cause:
        raise CallLost(str(cause)) from cause
    except RestartError as cause:
        raise ChildError(str(cause)) from cause
    except WorkerError as cause:
        if shared_by > 1:
            raise ChildError(f"the process of {who} has ended, which up to {shared_by} share: {cause}") from cause
        raise ChildError(f"{who} ended the process it ran in") from cause
