"""Resources that this backend's classes need for a request. Planning imports this module, which does not import
torch."""

from dataclasses import replace
from typing import Any

from rlcore.config import RunConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.reference import ReferenceSlices
from rlcore.contracts.requests import WorkerRequest
from rlcore.contracts.stored_formats import check_planned
from rlcore.plan.activations import BYTES
from rlcore.plan.cpu_products import bfloat16_instructions
from rlcore.plan.memory import frozen_bytes_per_parameter

BASE_NOTE = "the actor's weights with the LoRA adapter off serve as the reference; no second model is loaded"


def complete_actor(config: RunConfig, section: Any, request: WorkerRequest) -> WorkerRequest:
    """The request as it is; ConfigError if the model is quantised, so that updates cannot change its weights."""
    check_planned("model.path", config.model.path, config.model.revision)
    return request


def complete_embedded(config: RunConfig, section: Any, request: WorkerRequest) -> WorkerRequest:
    """The request with the maximum number of cached tokens, and the packed copy of the weights that a CPU generates
    with, if it multiplies their format."""
    dtype = config.actor.dtype
    multiplies = dtype == "float32" or (dtype == "bfloat16" and bool(bfloat16_instructions()))
    packed = float(BYTES[dtype]) if multiplies and config.cluster.device != "cuda" else 0.0
    return replace(request, cached_tokens=_cached_tokens(config), bytes_per_parameter=packed)


def _cached_tokens(config: RunConfig) -> int:
    """Planned number of cached tokens: each row's response, and each prompt once.

    Agents other than `single_turn` may have further turns that are computed whole, and then share no prompts: each
    row's whole conversation, which is the most if later turns have one sample each. With `single_turn`, the last
    samples of more prompts than planned may be decoded at the same time.
    """
    kinds = [(config.rollout.samples_per_prompt, config.rollout.max_tokens)]
    if config.eval.sources:
        kinds.append((config.eval.samples_per_prompt, config.eval.max_tokens or config.rollout.max_tokens))
    rows, prompt = config.rollout.max_rows, config.data.max_prompt_tokens
    further = config.rollout.agent != "single_turn"
    return max(rows * response + (rows if further else -(-rows // samples) + 1) * prompt for samples, response in kinds)


def complete_reference(config: RunConfig, section: Any, request: WorkerRequest) -> WorkerRequest:
    """The actor's base model if it has a LoRA adapter; else a second model with the actor's ranks and sharding.

    A `reference.path` asks for a second model in any case. It uses the actor's context parallelism if that divides its
    heads. ConfigError if the second model is quantised.
    """
    actor = config.actor
    if actor.lora.enabled and not config.reference.path and actor.backend == request.backend:
        return replace(request, embedded_in=ACTOR, engine=actor, bytes_per_parameter=0.0, note=BASE_NOTE)
    if config.has_other_reference:
        check_planned("reference.path", config.reference.path)
    held = frozen_bytes_per_parameter(actor) if request.bytes_per_parameter else 0.0
    slices, heads = actor.context_parallel, request.model.shape.heads if request.model and request.model.shape else 0
    note = request.note
    if request.model is not None and heads % slices:
        note = f"each rank computes whole sequences: actor.context_parallel={slices} does not divide its {heads} heads"
        slices = 1
    return replace(
        request, ranks=actor.data_parallel, bytes_per_parameter=held, spec=ReferenceSlices(slices), note=note
    )
