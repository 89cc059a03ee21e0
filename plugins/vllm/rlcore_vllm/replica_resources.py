"""Devices and memory of a reward model's replica, stated once: `gpus` of the request. Planning imports this module; it
does not import vllm."""

from dataclasses import replace
from typing import Any

from rlcore import ConfigError, RunConfig, WorkerRequest
from rlcore.contracts.reward_models import RewardModel
from rlcore_vllm.resources import asleep_bytes, check_no_nodes

GPU_MEMORY_FRAC = 0.9
"""Share of its devices' memory, unless options.gpu_memory_utilization is set."""


def complete_replica(config: RunConfig, section: Any, request: WorkerRequest) -> WorkerRequest:
    """The request, with the share of each device that an awake engine reserves, and with an engine that spans the
    devices of all ranks of a replica, each of which is a node; without devices, a worker per rank.

    ConfigError if the model is missing, the devices cannot be spanned, or two settings give different numbers.
    """
    model, key = request.spec, request.settings or request.role.name
    if not isinstance(model, RewardModel):
        raise ConfigError(
            f"{key}: role '{request.role.name}' has no model to serve on vLLM; the component that asks for it needs "
            "WorkerRequest(spec=RewardModel(path=...))"
        )
    check_no_nodes(f"{key}.options", model.options, f"{key}.nodes")
    if not request.gpus and request.ranks == 1:
        return request
    size = _tensor_parallel(key, model, request)
    spanning = replace(model, options={**model.options, "tensor_parallel_size": size})
    if not request.gpus:
        return replace(request, spec=spanning)
    share = model.options.get("gpu_memory_utilization", GPU_MEMORY_FRAC)
    asleep = asleep_bytes(eager=bool(model.options.get("enforce_eager", False)))
    return replace(request, device_frac=float(share), asleep_bytes=asleep, spec=spanning)


def _tensor_parallel(key: str, model: RewardModel, request: WorkerRequest) -> int:
    """The number of devices, or of workers without devices, that share a layer's weights; `key` names the model's
    settings.

    ConfigError when the stages in `options` do not divide the devices, or `options` state another number.
    """
    setting, stated = ("gpus", request.gpus * request.ranks) if request.gpus else ("nodes", float(request.ranks))
    devices, options = max(1, int(stated)), model.options
    stages = options.get("pipeline_parallel_size", 1)
    if not isinstance(stages, int) or stages < 1 or devices % stages:
        raise ConfigError(
            f"{key}: options.pipeline_parallel_size={stages!r} does not divide its {devices} devices "
            f"({setting}={stated:g}); needs a divisor, or another {key}.{setting}"
        )
    size = options.get("tensor_parallel_size", devices // stages)
    if size != devices // stages:
        raise ConfigError(
            f"{key}: {setting}={stated:g} and options.tensor_parallel_size={size!r} contradict each other; devices are "
            f"stated once: leave the option out, and set {key}.{setting}"
        )
    return devices // stages
