"""Describes exhausted memory in one line: the plan's estimate, the peak, and the settings that lower it."""

import os
import re
import resource
import sys
from typing import Any

from rlcore.contracts.workers import WorkerContext

GIB = 2**30
PIECES_SHARE = 0.05
"""Share of a device below which reserved but unused memory is not mentioned."""
SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True"
OTHERS_SHARE = 0.01
"""Share of a device below which memory of other processes is not mentioned."""
HOSTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
MARKS = ("out of memory", *HOSTS)
"""Words of torch's allocators, in exceptions of several classes; `HOSTS` are those of host memory."""
SAVING = (".snapshot()", ".write_snapshot()", ".save()")
"""Ends of the names of calls that copy or write a checkpoint, after the activations of updates are freed."""


def memory_problem(error: BaseException, context: WorkerContext | None, where: str = "") -> str:
    """`in_words` if an allocator failed, possibly as a cause of this error; else empty."""
    cause = _allocators(error)
    return "" if context is None or cause is None else in_words(cause, context, where)


def in_words(cause: BaseException, context: WorkerContext, where: str = "") -> str:
    """The exhausted memory, the plan's estimate, the peak, and the settings that lower it.

    `where` names the call. The plan estimates and advises on the device; a checkpoint, and host memory, need other
    advice.
    """
    device, saves = context.device, where.endswith(SAVING)
    if device.startswith("cuda") and _is_hosts(cause):
        device = "the host"
    parts = ["the plan does not know its memory"]
    remedy = "lower micro_batch_tokens, rollout.max_rows, rollout.max_tokens or data.max_prompt_tokens"
    if context.memory is not None:
        parts, remedy = [f"the plan estimated {context.memory.bytes / GIB:.1f} GiB"], context.memory.remedy
    if saves or device == "the host":
        parts, remedy = [], _other_remedy(device, saves)
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+ [KMG]iB)", str(cause))
    parts += _measured(device)
    in_pieces = _in_pieces(device)
    if in_pieces:
        parts.append(in_pieces)
        remedy = f"set {SEGMENTS} in the environment, or {remedy}"
    if wanted:
        parts.append(f"{wanted[1]} more were asked for")
    return f"memory of {device} is exhausted: {', '.join(parts)}; {remedy}"


def _other_remedy(device: str, saves: bool) -> str:
    """Advice where fewer tokens would not help."""
    if device.startswith("cuda"):
        return "a checkpoint gathers weights there, one layer at a time: leave more of the device to this role"
    if saves:
        return (
            "a checkpoint takes a copy of weights and optimizer state: end other processes of this machine, train an "
            "adapter with lora.enabled=true, or take a smaller model"
        )
    return "end other processes of this machine, or set offload=false or rollout.weight_sync=disk"


def _is_hosts(cause: BaseException) -> bool:
    return isinstance(cause, MemoryError) or any(mark in str(cause) for mark in HOSTS)


def _allocators(error: BaseException | None) -> BaseException | None:
    """The exception of torch's allocator, or Python's, among an exception and its causes."""
    while error is not None:
        torch_s = type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch")
        if torch_s or isinstance(error, MemoryError):
            return error
        if isinstance(error, RuntimeError) and any(mark in str(error) for mark in MARKS):
            return error
        error = error.__cause__
    return None


def _measured(device: str) -> list[str]:
    """The peak of this process, and on a GPU the memory of other processes; torch is already imported if the device was
    used."""
    torch: Any = sys.modules.get("torch")
    if not device.startswith("cuda") or torch is None:
        return [f"the peak was {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"]
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    parts = [
        f"the peak was {torch.cuda.max_memory_allocated(device) / GIB:.1f} of the device's {total / GIB:.1f} GiB",
    ]
    others = total - free - reserved
    if others > OTHERS_SHARE * total:
        parts.append(f"{others / GIB:.1f} GiB are used by other processes and contexts")
    return parts


def _in_pieces(device: str) -> str:
    """The memory that torch's allocator reserved but could not use, if it is worth mentioning.

    Empty if expandable segments are already on.
    """
    torch: Any = sys.modules.get("torch")
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not device.startswith("cuda") or torch is None or "expandable_segments:True" in settings:
        return ""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if unused <= PIECES_SHARE * torch.cuda.mem_get_info(device)[1]:
        return ""
    return f"{unused / GIB:.1f} GiB are reserved in pieces without tensors"
