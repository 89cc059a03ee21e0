"""Finds the GPUs that this process may use through NVIDIA's driver, without importing torch.

`CUDA_VISIBLE_DEVICES` is read as CUDA reads it: a list of indices, of UUIDs (`GPU-...`, also their beginnings), or of
one MIG instance (`MIG-...`). The first entry that names no device ends the list.
"""

import ctypes
import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlcore.errors import counted

NVIDIA = Path("/proc/driver/nvidia/gpus")
NVML = "libnvidia-ml.so.1"
"""The library of NVIDIA's driver that reports devices."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
UUID_BYTES = NAME_BYTES = 96


@dataclass(frozen=True)
class Gpu:
    """A device, or a MIG instance of one. Sizes in bytes; None is unknown."""

    uuid: str
    """The UUID, or its index in the list if the driver does not report one."""
    total: int | None = None
    free: int | None = None
    """Free memory; other processes and the driver use the rest."""
    name: str = ""
    """The product's name, such as 'NVIDIA H100 80GB HBM3'; empty if it is unknown, and for a MIG instance."""


@dataclass(frozen=True)
class Gpus:
    """The devices that this process may use, and why there are not more."""

    visible: tuple[Gpu, ...] = ()
    problem: str = ""
    """Reason why this process cannot compute on a device, worded as the end of a sentence; empty: none is known."""


def find_gpus(nvml: Any = None) -> Gpus:
    """The visible devices of this machine. `nvml` replaces the driver's library."""
    try:
        library = ctypes.CDLL(NVML) if nvml is None else nvml
        listed = _listed(library)
    except (OSError, AttributeError):
        library, listed = None, ()
    if not listed:  # trust the driver's list in the file system
        library, listed = None, tuple(Gpu(str(index)) for index in range(_num_listed()))
    if not listed:
        return Gpus((), "this machine has no NVIDIA GPU")
    named = os.environ.get(VISIBLE)
    visible = listed if named is None else _named(named, listed, library)
    if not visible:
        return Gpus((), f"{VISIBLE}='{named}' names none of the machine's {counted(len(listed), 'GPU')}")
    return Gpus(visible, torch_problem())


def compile_problem() -> str:
    """Reason why torch.compile cannot build kernels for a device here, as the end of a sentence; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CC", ""), "gcc", "clang") if compiler):
        return "triton needs a C compiler, and this machine has neither gcc nor clang, nor the variable CC"
    return ""


def torch_problem() -> str:
    """Reason why the installed torch cannot compute on a GPU, by its version file; empty if that says it can.

    Whether its build has code for the actual card is checked after importing torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = Path(spec.origin).with_name("version.py").read_text("utf-8")
    except OSError:
        return ""
    built = {name: re.search(rf"^{name}\b[^=\n]*= *(.+)$", text, re.M) for name in ("__version__", "cuda", "hip")}
    if any(found and found[1].strip() != "None" for name, found in built.items() if name != "__version__"):
        return ""
    version = built["__version__"]
    return f"torch {version[1].strip(chr(39)) if version else ''} is built without CUDA"


def _num_listed() -> int:
    """Devices that the driver lists in the file system."""
    try:
        return len(list(NVIDIA.iterdir()))
    except OSError:
        return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()])


def _named(named: str, listed: Sequence[Gpu], library: Any) -> tuple[Gpu, ...]:
    """The devices that a value of CUDA_VISIBLE_DEVICES names; none when it names one twice, as for CUDA."""
    chosen: list[Gpu] = []
    for word in (word.strip() for word in named.split(",")):
        if word.startswith("MIG-"):
            instance = _instance(library, word)
            return (instance,) if instance and not chosen else tuple(chosen)  # a process has one instance at most
        gpu = _device(word, listed)
        if gpu is None:
            break
        if gpu in chosen:
            return ()
        chosen.append(gpu)
    return tuple(chosen)


def _device(word: str, listed: Sequence[Gpu]) -> Gpu | None:
    """The device that a word names: a number, or the beginning of exactly one UUID.

    If the driver reports no UUIDs, any UUID is accepted.
    """
    if word.isdecimal():
        return listed[int(word)] if int(word) < len(listed) else None
    if not word.startswith("GPU-"):
        return None
    if listed[0].total is None:
        return Gpu(word)
    found = [gpu for gpu in listed if gpu.uuid.startswith(word)]
    return found[0] if len(found) == 1 else None


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _listed(nvml: Any) -> tuple[Gpu, ...]:
    """Every device in the driver's order; empty when the library refuses any call."""
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
                return ()
            uuid = ctypes.create_string_buffer(UUID_BYTES)
            if nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(UUID_BYTES)) != 0:
                return ()
            gpu = _sizes(nvml, device, uuid.value.decode("ascii", "replace"))
            if gpu is None:
                return ()
            found.append(replace(gpu, name=_name(nvml, device)))
        return tuple(found)
    finally:
        nvml.nvmlShutdown()


def _instance(nvml: Any, uuid: str) -> Gpu | None:
    """The MIG instance of that name, whose size is unknown without the driver's library; None if there is none."""
    if nvml is None:
        return Gpu(uuid)
    try:
        if nvml.nvmlInit_v2() != 0:
            return Gpu(uuid)
        try:
            device = ctypes.c_void_p()
            found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device))
            return _sizes(nvml, device, uuid) if found == 0 else None
        finally:
            nvml.nvmlShutdown()
    except AttributeError:
        return Gpu(uuid)


def _sizes(nvml: Any, device: Any, uuid: str) -> Gpu | None:
    memory = _NvmlMemory()
    if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    return Gpu(uuid, int(memory.total), int(memory.free))


def _name(nvml: Any, device: Any) -> str:
    """The product's name; empty if the driver does not report it, or has divided the device into MIG instances."""
    mig_mode, get_name = (getattr(nvml, name, None) for name in ("nvmlDeviceGetMigMode", "nvmlDeviceGetName"))
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    if mig_mode is not None and mig_mode(device, ctypes.byref(mode), ctypes.byref(pending)) == 0 and mode.value:
        return ""  # CUDA then uses an instance, even where none is named
    text = ctypes.create_string_buffer(NAME_BYTES)
    if get_name is None or get_name(device, text, ctypes.c_uint(NAME_BYTES)) != 0:
        return ""
    return text.value.decode("utf-8", "replace")
