"""Devices and memory of a rollout replica. Planning imports this, and no vllm."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlcore import ConfigError, PlanError, RunConfig, WorkerRequest
from rlcore_vllm.settings import VllmSettings

POOL = "rollout"
"""The pool of replicas where `rollout.pool` is empty."""


def complete_rollout(config: RunConfig, section: VllmSettings, request: WorkerRequest) -> WorkerRequest:
    """The request with a pool for the replicas, their devices, and the share of these that an engine reserves for as
    long as it is awake.

    ConfigError when the devices of an engine are stated twice, differently; PlanError for an adapter over tcp.
    """
    adapter = config.actor.lora.enabled and section.lora == "adapter"
    if adapter and config.rollout.weight_sync == "tcp":
        raise PlanError(
            "rollout.weight_sync=tcp sends whole weights, and plugins.vllm.lora=adapter wants an adapter, which is "
            "handed over as files; choose weight_sync=disk, or lora=merged"
        )
    check_parallel("plugins.vllm.options", section.options, section.tensor_parallel, "plugins.vllm.tensor_parallel")
    return replace(
        request,
        pool=config.rollout.pool or POOL,
        gpus=request.gpus * section.tensor_parallel,
        device_frac=section.gpu_memory_frac if request.gpus else 0.0,
        takes_adapter=adapter,
    )


def check_parallel(key: str, options: Mapping[str, Any], size: int, stated_at: str) -> None:
    """ConfigError when `options` of an engine, which stand at `key`, ask for another number of devices for a layer's
    weights than `size`, which is stated at `stated_at`."""
    found = options.get("tensor_parallel_size", size)
    if found != size:
        raise ConfigError(
            f"{key}.tensor_parallel_size: found {found!r}, but {stated_at} gives an engine {size}; devices are stated "
            f"once: leave the option out, and set {stated_at}"
        )
