"""Memory that a process freed: kept for its next allocation, or given back to the system."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> None:
    """Let glibc's allocator keep what is freed for the next micro-batch, and all threads share it.

    By default glibc returns large tensors to the system at once, and the kernel clears every page of the next ones: a
    tenth of an update on a CPU. Nothing happens with another C library.
    """
    for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 2**30), (M_TRIM_THRESHOLD, 2**31 - 1)):
        _call_libc("mallopt", parameter, value)


def give_back_freed_memory() -> None:
    """Give back what `keep_freed_memory` has kept: between generation and update, which use different sizes, so that
    the holes that one leaves do not add to what the other needs."""
    _call_libc("malloc_trim", 0)


def _call_libc(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return
    function(*arguments)
