"""Devices and memory of a rollout replica. Planning imports this module; it does not import vllm."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlcore import ConfigError, PlanError, RunConfig, WorkerRequest
from rlcore.contracts.model_files import decoder_settings, model_directory
from rlcore_vllm.settings import VllmSettings

POOL = "rollout"
"""The pool of replicas when `rollout.pool` is empty."""
GRAPH_BYTES = int(1.5 * 2**30)
"""CUDA graphs stay on an engine's device while it sleeps (vllm#47654); awake, its share includes them."""
OVER_NODES = ("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port")
"""Options that would give an engine nodes that the plan does not count."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of torch's allocator."""


def complete_rollout(config: RunConfig, section: VllmSettings, request: WorkerRequest) -> WorkerRequest:
    """The request, with a pool for the replicas, their devices, and the share of them that an awake engine reserves.

    A replica has one rank per node of its engine. ConfigError when settings state an engine's devices or nodes twice,
    differently, or in numbers that do not fit; PlanError for an adapter that is not handed over as files.
    """
    adapter = config.actor.lora.enabled and section.lora == "adapter"
    by = config.rollout.weight_sync
    if adapter and by not in ("auto", "disk"):
        raise PlanError(
            f"rollout.weight_sync={by} sends whole weights, and plugins.vllm.lora=adapter wants an adapter, which is "
            "handed over as files; choose weight_sync=disk, or lora=merged"
        )
    check_nodes(section)
    _check_heads(config, section.tensor_parallel)
    check_parallel("plugins.vllm.options", section.options, section.tensor_parallel, "plugins.vllm.tensor_parallel")
    return replace(
        request,
        pool=config.rollout.pool or POOL,
        ranks=section.nodes,
        nodes_key="plugins.vllm.nodes",
        gpus=request.gpus * section.tensor_parallel / section.nodes,
        bytes_per_parameter=_weight_bytes(config, section) if request.gpus else 0.0,
        device_frac=section.gpu_memory_frac if request.gpus else 0.0,
        asleep_bytes=asleep_bytes(eager=section.enforce_eager) if request.gpus else 0,
        takes_adapter=adapter,
        note=_note(config, section, request) if request.gpus else "",
    )


def _weight_bytes(config: RunConfig, section: VllmSettings) -> float:
    """Bytes per parameter on each of an engine's devices, as a part of the share that it reserves; 0: unknown."""
    if "quantization" in section.options:
        return 0.0
    dtype = config.actor.dtype if section.dtype == "actor" else section.dtype
    return (4.0 if dtype == "float32" else 2.0) / section.tensor_parallel


def check_nodes(section: VllmSettings) -> None:
    """ConfigError for an option that states the nodes of a replica, which the plan counts, and for devices that cannot
    be spread over them evenly."""
    found = [name for name in (*OVER_NODES, "pipeline_parallel_size") if name in section.options]
    if found:
        raise ConfigError(
            f"plugins.vllm.options.{found[0]}: the devices of a rollout replica are counted by "
            "plugins.vllm.tensor_parallel, and its nodes by plugins.vllm.nodes; leave the option out, and set those"
        )
    if section.tensor_parallel % section.nodes:
        raise ConfigError(
            f"plugins.vllm.nodes={section.nodes}: does not divide plugins.vllm.tensor_parallel="
            f"{section.tensor_parallel}; needs as many devices on each node"
        )


def check_no_nodes(key: str, options: Mapping[str, Any], stated_at: str) -> None:
    """ConfigError for an option (at `key`) that states the nodes of an engine, which `stated_at` counts."""
    for name in OVER_NODES:
        if name in options:
            raise ConfigError(
                f"{key}.{name}: the nodes of an engine are counted by {stated_at}; leave the option out, and set that"
            )


def asleep_bytes(*, eager: bool) -> int:
    """Bytes of a device that a sleeping engine keeps."""
    return 0 if eager else GRAPH_BYTES


def model_length(config: RunConfig, section: VllmSettings, *, on_gpu: bool) -> int:
    """Most tokens of a prompt and its response in an engine; 0: what the model allows.

    On a GPU, unless set, it is the most that training or evaluation needs, if that is less than the model allows.
    Agent loops other than single_turn add tools' results to the context, so theirs is the model's.
    """
    if section.max_model_len or not on_gpu or config.rollout.agent != "single_turn":
        return section.max_model_len
    evaluated = config.eval.max_tokens if config.eval.sources else 0
    needed = config.data.max_prompt_tokens + max(config.rollout.max_tokens, evaluated)
    window = _window(config)
    return needed if window is None or needed < window else 0


def _window(config: RunConfig) -> int | None:
    """Tokens that the model's own configuration allows; None: unknown."""
    return _of_model(config, "max_position_embeddings")


def _of_model(config: RunConfig, name: str) -> int | None:
    """A number of the model's own configuration; None: unknown."""
    found = decoder_settings(model_directory(config.model.path, config.model.revision)).get(name)
    return found if isinstance(found, int) else None


def _check_heads(config: RunConfig, devices: int) -> None:
    """PlanError for a number of devices that cannot share out the model's heads of attention evenly.

    More devices than key heads each hold a copy of one, so theirs has to be a multiple of that number.
    """
    heads, keys = _of_model(config, "num_attention_heads"), _of_model(config, "num_key_value_heads")
    for number, kind in ((heads, "heads of attention"), (keys or heads, "key heads")):
        if number and number % devices and (kind == "heads of attention" or devices % number):
            raise PlanError(
                f"plugins.vllm.tensor_parallel={devices}: the model has {number} {kind}; needs a number that divides "
                f"them{' or is a multiple of them' if kind == 'key heads' else ''}, and more rollout.replicas"
            )


def _note(config: RunConfig, section: VllmSettings, request: WorkerRequest) -> str:
    """The plugin's decisions for an engine on a GPU, for `rlcore plan`."""
    notes = [request.note] if request.note else []
    length = model_length(config, section, on_gpu=True)
    if length and not section.max_model_len:
        notes.append(f"plugins.vllm.max_model_len is {length}, the longest prompt and response of this run")
    found = [
        name for name in ALLOCATOR if without_expandable_segments(os.environ.get(name, "")) != os.environ.get(name, "")
    ]
    if found:
        notes.append(
            f"expandable_segments of {' and '.join(found)} is kept for trainers and removed for vLLM, whose memory "
            "could not be released during sleep otherwise"
        )
    return "; ".join(notes)


def without_expandable_segments(settings: str) -> str:
    """A value of PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF without its expandable_segments setting."""
    return ",".join(part for part in settings.split(",") if part.partition(":")[0].strip() != "expandable_segments")


def check_parallel(key: str, options: Mapping[str, Any], size: int, stated_at: str) -> None:
    """ConfigError when the `options` of an engine (at `key`) shard a layer's weights over another number of devices
    than `size` (at `stated_at`)."""
    found = options.get("tensor_parallel_size", size)
    if found != size:
        raise ConfigError(
            f"{key}.tensor_parallel_size: found {found!r}, but {stated_at} gives an engine {size}; devices are stated "
            f"once: leave the option out, and set {stated_at}"
        )
