"""Devices and memory of a replica on vLLM, stated once: `gpus` of the model. Planning imports this, and no vllm."""

from dataclasses import replace
from typing import Any

from rlcore import ConfigError, RunConfig, WorkerRequest
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings

GPU_MEMORY_FRAC = 0.9
"""Of the memory of its devices, unless options.gpu_memory_utilization says."""


def complete_replica(config: RunConfig, section: RewardLoopSettings, request: WorkerRequest) -> WorkerRequest:
    """The request with the share of each device that an engine reserves while it is awake."""
    options = section.models[request.role.name].options
    frac = float(options.get("gpu_memory_utilization", GPU_MEMORY_FRAC)) if request.gpus else 0.0
    return replace(request, device_frac=frac)


def parallel_arguments(settings: ModelSettings) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs with which an engine spans the replica's devices."""
    return {"tensor_parallel_size": max(1, int(settings.gpus)) // settings.options.get("pipeline_parallel_size", 1)}


def check_devices(key: str, settings: ModelSettings) -> None:
    """ConfigError when the devices of a replica, which `key` names, are no number that its engine can span, or are
    stated a second time and differently in `options`."""
    gpus, options = settings.gpus, settings.options
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(f"{key}.gpus: found {gpus:g}; needs a share of one device, or a whole number of them")
    if settings.backend == "hf" and gpus > 1:
        raise ConfigError(
            f"{key}.gpus: found {gpus:g}, and backend=hf computes on one; needs at most 1, or backend=vllm"
        )
    if settings.backend != "vllm" or gpus == 0:
        return
    devices = max(1, int(gpus))
    stages = options.get("pipeline_parallel_size", 1)
    if not isinstance(stages, int) or stages < 1 or devices % stages:
        raise ConfigError(
            f"{key}: options.pipeline_parallel_size={stages!r} does not divide its {devices} devices (gpus={gpus:g}); "
            f"needs a divisor, or another {key}.gpus"
        )
    size = options.get("tensor_parallel_size", devices // stages)
    if size != devices // stages:
        raise ConfigError(
            f"{key}: gpus={gpus:g} and options.tensor_parallel_size={size!r} contradict each other; devices are stated "
            f"once: leave the option out, and set {key}.gpus"
        )
