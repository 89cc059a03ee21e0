"""Freed memory of a process: kept for its next allocations, or returned to the system and other processes."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcore.contracts.workers import WorkerContext

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Let glibc's allocator keep freed memory for the next micro-batch, shared by all threads.

    By default glibc returns large tensors to the system at once, and the kernel clears every page of the next ones: a
    tenth of an update on a CPU. Does nothing with another C library.
    """
    for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1)):
        _call_libc("mallopt", parameter, value)


def give_back_freed_memory(device: str) -> None:
    """Return freed memory to the system. Called between generation and update, which allocate different sizes, so the
    fragments of one do not add to the needs of the other. On a CPU it returns what `keep_freed_memory` keeps."""
    if device.startswith("cpu"):
        _call_libc("malloc_trim", 0)
    yield_device(device)


def yield_device(device: str) -> None:
    """Free torch's cache on an accelerator ('cuda:3'), which no other process can use.

    Called before a server on the same device starts or wakes up. Does nothing on a CPU.
    """
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


@contextmanager
def device_turn(context: "WorkerContext") -> Iterator[None]:
    """Context of a call during which no other process computes on the worker's device; frees the cache afterwards if
    another one has its turn next."""
    try:
        yield
    finally:
        if context.shares_device:
            yield_device(context.device)


def _call_libc(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return
    function(*arguments)
