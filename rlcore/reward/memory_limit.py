"""Limits the memory of a reward function's process."""

import resource
import sys
from pathlib import Path

from rlcore.errors import ConfigError, PluginError

GIB = 1 << 30
STATUS = Path("/proc/self/status")


def limit_memory(name: str, memory_gib: float) -> None:
    """Limit the private memory of this process, and of each process that it starts.

    The kernel counts writable memory (RLIMIT_DATA), not reserved address space; for torch on a CPU that is about what
    it uses. An allocation beyond the limit is a MemoryError. ConfigError if the process already has more, PluginError
    if the system lacks this limit.
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
