"""Processes of a vLLM engine: their number, and the method of their start. vllm is imported inside functions."""

import gc
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable for the start of its processes: spawn or fork. For CPUs vLLM sets it to spawn."""


def computes_alone(arguments: Mapping[str, Any]) -> bool:
    """True if the process of an engine with these arguments also computes, and so has no workers.

    Several devices have a worker each. On a CPU vLLM would start one for the binding of compute threads to cores.
    """
    is_bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    return arguments.get("tensor_parallel_size", 1) == 1 and not (is_on_cpu(arguments) and is_bound)


def is_on_cpu(arguments: Mapping[str, Any]) -> bool:
    """True for the arguments of an engine on a CPU."""
    return "kv_cache_memory_bytes" in arguments


def keep_place_of_title() -> None:
    """Have forks show vLLM's title, such as VLLM::EngineCore, in ps; called before the environment is changed.

    setproctitle, of vLLM's requirements, finds a process's title in memory by the first environment variable, and does
    so once.
    """
    with suppress(ImportError):
        importlib.import_module("setproctitle").getproctitle()


@contextmanager
def forking(arguments: Mapping[str, Any], threads: int, method: str | None) -> Iterator[None]:
    """Have vLLM fork what it starts inside for a CPU, if that is safe and the user has set no `method`.

    A fork has the modules of this process, whose import takes a new one seven seconds. It also has this process's
    number of compute threads, but not the threads, and waits for those that were used. So there has to be a single one.
    """
    if method is not None or not is_on_cpu(arguments):
        yield
        return
    is_safe = threads == 1 and _has_one_thread()
    if is_safe:
        os.environ[METHOD] = "fork"
        gc.freeze()  # so that a collection in the fork neither takes a second nor copies all memory
    try:
        yield
    finally:
        if is_safe:
            gc.unfreeze()
        os.environ.pop(METHOD, None)  # a later engine finds what the user has set


def _has_one_thread() -> bool:
    """True in a process with one compute thread, except an actor of Ray, which has many others."""
    import torch
    from vllm.ray.lazy_utils import is_in_ray_actor  # type: ignore[import-not-found]

    return torch.get_num_threads() == 1 and not is_in_ray_actor()
