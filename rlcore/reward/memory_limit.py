"""Limits the memory of a reward function's process."""

import resource
import sys
from pathlib import Path

from rlcore.errors import ConfigError, PluginError

GIB = 1 << 30
STATUS = Path("/proc/self/status")


def limit_memory(name: str, memory_gib: float) -> None:
    """From now on this process, and each that it starts, may hold so much private memory.

    The kernel counts what the process could write to (RLIMIT_DATA), not the address space that libraries reserve: that
    of torch on a CPU is about what it uses. A request beyond the limit is a MemoryError. ConfigError when the process
    has more already, PluginError where the system lacks this limit.
    """
    if not sys.platform.startswith("linux"):
        raise PluginError(f"reward.functions.{name}.memory_gib: {sys.platform} cannot limit memory so; leave it out")
    held = _held_bytes()
    if held >= memory_gib * GIB:
        raise ConfigError(
            f"reward.functions.{name}.memory_gib={memory_gib:g}: its process holds {held / GIB:.2g} GiB before the "
            "function is imported; needs more"
        )
    limit = int(memory_gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _held_bytes() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
