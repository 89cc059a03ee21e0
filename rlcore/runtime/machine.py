"""Finds the facts about this machine for the planner, without torch: cores, memory, devices."""

import os
from dataclasses import replace
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.contracts.model_files import model_shape, num_parameters, usual_answers
from rlcore.plan import Facts
from rlcore.plan.cpu_products import bfloat16_instructions
from rlcore.plan.machine_cards import card_in_all
from rlcore.runtime.gpus import compile_problem, find_gpus
from rlcore.runtime.hub_settings import model_files

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def gather_facts(config: RunConfig, machine: Facts | None = None) -> Facts:
    """The facts of `machine` (None: this one) with those of `model.path`; unknown facts are None."""
    directory = model_files(config.model)
    return replace(
        machine or machine_facts(),
        parameters=num_parameters(directory),
        shape=model_shape(directory),
        answers=usual_answers(directory),
    )


def machine_facts() -> Facts:
    """Cores, memory and devices that this process may use."""
    gpus = find_gpus()
    known = [gpu for gpu in gpus.visible if gpu.total is not None]
    return Facts(
        cpus=num_cpus(),
        gpus=len(gpus.visible),
        cpu_bfloat16=bfloat16_instructions(),
        memory_bytes=memory_bytes(),
        gpu_memory_bytes=min((gpu.total for gpu in known if gpu.total), default=None),
        gpu_free_bytes=min((gpu.free for gpu in known if gpu.free is not None), default=None),
        card=card_in_all([(gpu.name, gpu.total) for gpu in gpus.visible]),
        gpu_problem=gpus.problem,
        compile_problem=compile_problem() if gpus.visible else "",
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
