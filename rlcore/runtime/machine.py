"""The facts about this machine that the planner is given: cores, memory, devices; found without torch."""

import ctypes
import os
from pathlib import Path
from typing import Any

from rlcore.config import RunConfig
from rlcore.contracts.model_files import model_directory, model_shape, num_parameters
from rlcore.plan import Facts

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


NVIDIA = Path("/proc/driver/nvidia/gpus")


NVML = "libnvidia-ml.so.1"
"""The library of NVIDIA's driver that tells of devices."""


def gather_facts(config: RunConfig) -> Facts:
    """Cores, memory and devices that this process may use, and the parameters of `model.path`; unknown is None."""
    directory, on_gpus = model_directory(config.model.path, config.model.revision), config.cluster.device == "cuda"
    return Facts(
        cpus=num_cpus(),
        gpus=num_gpus() if on_gpus else 0,
        memory_bytes=memory_bytes(),
        gpu_memory_bytes=gpu_memory_bytes() if on_gpus else None,
        parameters=num_parameters(directory),
        shape=model_shape(directory),
    )


def num_cpus() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of the machine, or of the container if that has less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def num_gpus() -> int:
    """Devices that CUDA_VISIBLE_DEVICES leaves of those the driver lists."""
    try:
        listed = len(list(NVIDIA.iterdir()))
    except OSError:
        listed = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    return min(listed, len([word for word in visible.split(",") if word.strip() not in ("", "-1")]))


def gpu_memory_bytes(nvml: Any = None) -> int | None:
    """Memory of the smallest device that CUDA_VISIBLE_DEVICES leaves, as the driver says; None when it does not.

    `nvml` stands for the driver's library. A variable that names devices in another way than by their numbers leaves
    all of them.
    """
    try:
        sizes = _device_bytes(ctypes.CDLL(NVML) if nvml is None else nvml)
    except (OSError, AttributeError):
        return None
    named = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    chosen = [sizes[int(name)] for name in named if name.isdecimal() and int(name) < len(sizes)]
    return min(chosen or sizes, default=None)


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _device_bytes(nvml: Any) -> list[int]:
    """The memory of each device; empty when the library refuses any call."""
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        sizes = []
        for index in range(count.value):
            device, memory = ctypes.c_void_p(), _NvmlMemory()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
                return []
            if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
                return []
            sizes.append(int(memory.total))
        return sizes
    finally:
        nvml.nvmlShutdown()
