"""Estimates the memory of a run before it starts.

For each process it counts the libraries (on a CPU) or the CUDA context, weights and optimizer state, and the larger of
update and generation, which take turns. An update needs gradients and the activations of one micro-batch
(`rlcore.plan.activations`), which the token budget bounds. Generation needs a second copy of the weights if it packs
them, keys and values of its rows, a forward pass over their prompts, and logits of one token per row.
"""

from collections.abc import Sequence

from rlcore.config import EngineConfig, RunConfig
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.plan.activations import (
    BYTES,
    HALF,
    adds_gradients,
    attention_numbers,
    expanded_size,
    forward_bytes,
    largest_micro_batch,
    last_layer_bytes,
    layer_states_bytes,
    longest_row,
    mask_bytes,
    masked_row,
    scores_bytes,
    sized,
    update_bytes,
)
from rlcore.plan.experts import expert_parameters, feed_forwards
from rlcore.plan.gathered import gathered_bytes
from rlcore.plan.machine_facts import Facts
from rlcore.types import SharedPrefix

TRAINING_BYTES = {"float64": 32.0, "float32": 16.0, "bfloat16": 20.0, "float16": 20.0}
"""Bytes per parameter: weight, gradient and Adam's two moments. A half-precision weight has a float32 master, whose
gradient is summed in float32."""
GRADIENT_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 6.0, "float16": 6.0}
"""The gradients' part of it, which is freed after each update."""
PROCESS_BYTES = 500 * 2**20
"""Host memory of Python with torch, transformers and the run's modules: 0.46 to 0.58 GB were resident, weights and
optimizer state excluded, when updates began on Linux (docs/results/performance.md)."""
CONTEXT_BYTES = 512 * 2**20
"""Device memory of a process, excluding torch's tensors: 426 MiB of CUDA context (docs/gpu.md), and kernels and
workspaces of products, which are loaded later."""
PIECES = 1.2
"""Resident over allocated memory of a process that trains on the host, weights excluded. glibc keeps freed memory in
fragments that the next tensor does not fit into (docs/results/performance.md, Memory of an update)."""
SAMPLED_LOGITS = 2
"""Arrays with one number per vocabulary entry and sampled row: logits and probabilities."""
REFERENCE = "reference"
PREFILL_TOKENS = 8192
"""Prompt tokens that generation computes at once: `rlcore.engines.hf.sample.prompt_passes.PASS_TOKENS`."""


def training_bytes_per_parameter(engine: EngineConfig) -> float:
    """One rank's share of weights, gradients, optimizer state and masters; with LoRA, of the frozen weights.

    Adapters are small and not counted. `gathered_bytes` of a sharded engine come on top.
    """
    return (
        frozen_bytes_per_parameter(engine) if engine.lora.enabled else TRAINING_BYTES[engine.dtype] / engine.shard_ranks
    )


def resting_bytes_per_parameter(engine: EngineConfig) -> float:
    """The part of `training_bytes_per_parameter` that remains between updates, without gradients."""
    return training_bytes_per_parameter(engine) - _gradient_bytes_per_parameter(engine)


def resting_share(engine: EngineConfig) -> float:
    """That part as a fraction."""
    return resting_bytes_per_parameter(engine) / training_bytes_per_parameter(engine)


def frozen_bytes_per_parameter(engine: EngineConfig) -> float:
    """One rank's share of frozen weights, with this engine's ranks and sharding."""
    return BYTES[engine.dtype] / engine.shard_ranks


def at_work_bytes_per_parameter(engine: EngineConfig) -> float:
    """Weights and gradients of one rank with `offload` during a backward pass, counted like training bytes."""
    return frozen_bytes_per_parameter(engine) + _gradient_bytes_per_parameter(engine)


def _gradient_bytes_per_parameter(engine: EngineConfig) -> float:
    """The gradients' part of `training_bytes_per_parameter`."""
    return 0.0 if engine.lora.enabled else GRADIENT_BYTES[engine.dtype] / engine.shard_ranks


def is_whole(engine: EngineConfig) -> bool:
    """True if a rank has all weights, gradients and optimizer state."""
    return engine.shard_ranks == 1


def gathered_for_update(engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes that a rank gathers, in addition to its shards, during an update; 0 if it has all weights."""
    return 0 if is_whole(engine) else gathered_bytes(engine, model, backward=True)


def memory_estimate(config: RunConfig, workers: Sequence[WorkerPlan], facts: Facts) -> dict[str, int]:
    """Bytes of one rank of each role, embedded roles included, with prompts and responses of maximum length.

    Empty if the number of parameters is unknown; if the architecture is unknown, activations and caches are left out.
    Roles in one process take turns, so besides weights and optimizer state only the largest need counts. Roles embedded
    in the actor work while it has no gradients.
    """
    if facts.parameters is None:
        return {}
    return {
        plan.request.role.name: _rank_bytes(config, plan, workers, facts)
        for plan in workers
        if plan.request.embedded_in is None and plan.request.bytes_per_parameter > 0
    }


def _rank_bytes(config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts) -> int:
    """Bytes of one rank of a role, embedded roles included."""
    request, held = plan.request, held_bytes(plan, facts)
    updating, inside = update_needs(config, plan, workers, facts), embedded_needs(config, plan, workers, facts)
    working = updating if inside is None else max(updating, inside)
    if request.gpus:
        return CONTEXT_BYTES + held + working
    parameters = facts.model_of(request).parameters or 0
    weights = held if request.engine is None else min(held, parameters * BYTES[request.engine.dtype])
    return PROCESS_BYTES + weights + int((PIECES if request.engine else 1.0) * (held + working - weights))


def held_bytes(plan: WorkerPlan, facts: Facts) -> int:
    """Weights, gradients and optimizer state of one rank."""
    return int(plan.request.bytes_per_parameter * (facts.model_of(plan.request).parameters or 0))


def update_needs(config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts) -> int:
    """Bytes in addition to `held_bytes` that a rank needs while the role itself, and not a sampler in it, computes."""
    here = [worker for worker in workers if plan.request.role in (worker.request.role, worker.request.embedded_in)]
    own = working_bytes(config, plan, facts.model_of(plan.request))
    inside = [working_bytes(config, worker, facts.model_of(worker.request)) for worker in here if worker.request.engine]
    if config.rollout.on_new_weights == "continue":  # keys and values of unfinished rows stay while other roles work
        own += sum(_cache_bytes(config, worker, facts.model_of(worker.request)) for worker in here)
    return max(own, *inside) if inside else own


def embedded_needs(config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts) -> int | None:
    """Bytes in addition to `held_bytes` that a rank needs while a sampler in it computes; None if it has no sampler."""
    needs = [
        working_bytes(config, worker, facts.model_of(worker.request))
        for worker in workers
        if worker.request.embedded_in == plan.request.role and worker.request.engine is None
    ]
    return max(needs, default=None)


def device_bytes(config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts) -> int:
    """Bytes that one rank of a role needs on a device that it has to itself."""
    estimate = _rank_bytes(config, plan, workers, facts)
    return CONTEXT_BYTES + sum(held_and_working_bytes(plan, estimate, facts))


def held_and_working_bytes(plan: WorkerPlan, estimate: int, facts: Facts) -> tuple[int, int]:
    """(resident bytes of a rank during its phase, further bytes while it works), without its CUDA context.

    `estimate`: the bytes of `memory_estimate`. With `offload` weights and gradients are resident; the activations of a
    backward pass are needed first, then the optimizer's state instead of them.
    """
    whole = max(0, estimate - CONTEXT_BYTES)
    held = min(whole, held_bytes(plan, facts))
    at_work = at_work_bytes(plan, held, facts)
    return at_work, max(whole - held, held - at_work)


def at_work_bytes(plan: WorkerPlan, held: int, facts: Facts) -> int:
    """The part of `held` bytes that is on the device during a backward pass: with `offload` weights and gradients."""
    engine = plan.request.engine
    if engine is None or not engine.offload or engine.lora.enabled:
        return held
    return min(held, int(at_work_bytes_per_parameter(engine) * (facts.model_of(plan.request).parameters or 0)))


def working_bytes(config: RunConfig, plan: WorkerPlan, model: ModelFacts) -> int:
    """Bytes that a role needs besides weights, gradients and optimizer state; 0 if they are unknown.

    For the embedded rollout the actor's gradients, whose memory it reuses, are subtracted, so the result can be
    negative.
    """
    request, shape = plan.request, model.shape
    engine, cached, embedded = request.engine, request.cached_tokens, request.embedded_in is not None
    if engine is not None:
        return (
            _update_bytes(config, plan, engine, model)
            if request.trains
            else _scoring_bytes(config, plan, engine, model)
        )
    if request.role.name == REFERENCE:
        gathers = request.ranks > 1 and not is_whole(config.actor)
        gathered = gathered_bytes(config.actor, model, backward=False) if gathers else 0
        return gathered + forward_bytes(config, config.actor, plan.shared_prefix, shape)
    # An embedded rollout reuses the memory of the actor's gradients for its copy; any other rollout's copy counts as
    # resident. Ranks of a sharded actor hold all weights while they sample, and while they score in between.
    whole = 0.0 if is_whole(config.actor) or not embedded else float(BYTES[config.actor.dtype])
    copied = whole + request.bytes_per_parameter - _gradient_bytes_per_parameter(config.actor) if embedded else 0.0
    if shape is None:
        return max(0, int(whole * (model.parameters or 0)))
    if not cached:
        return 0
    logits = SAMPLED_LOGITS * config.rollout.max_rows * shape.vocabulary * BYTES["float32"]
    # A layer's feed-forward, the peak of a pass; rows whose weights have changed are computed again like prompts.
    tokens, itemsize = min(cached, PREFILL_TOKENS), BYTES[config.actor.dtype]
    feed_forward = max(kind.forward for kind in feed_forwards(shape, tokens, itemsize, trained=False))
    states = max(4 * shape.hidden_size, attention_numbers(shape))
    prefilled = (states * tokens + feed_forward) * itemsize + _prompt_mask_bytes(config, shape)
    sampling = _cache_bytes(config, plan, model) + max(prefilled, _expanded_bytes(config, shape)) + logits
    scoring = forward_bytes(config, config.actor, plan.shared_prefix, shape) if whole else 0
    return int(copied * (model.parameters or 0)) + max(sampling, scoring)


def _expanded_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of a layer's keys and values of all rows, which the embedded rollout computes from copies of their latents
    for each token; 0 for attention without latents."""
    if shape.latents is None:
        return 0
    numbers = shape.cached_size + expanded_size(shape) + shape.heads * shape.latents.head_size
    return config.rollout.max_rows * longest_row(config) * numbers * BYTES[config.actor.dtype]


def _prompt_mask_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of a layer's masks while the embedded rollout computes prompts that fill a sliding window, and of the
    scores and masks of eager attention."""
    prompt, engine = config.data.max_prompt_tokens, config.actor
    size = sized(config, max(PREFILL_TOKENS, prompt), prompt)
    masked = masked_row(config, shape, SharedPrefix.NONE, prompt)
    return mask_bytes(engine, size, masked) + scores_bytes(shape, engine, size)


def _scoring_bytes(config: RunConfig, plan: WorkerPlan, engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes that a pass of a role without updates needs besides its weights: gathered ones, and states and mask of a
    layer."""
    gathered = 0 if is_whole(engine) else gathered_bytes(engine, model, backward=False)
    tokens = -(-engine.micro_batch_tokens // engine.context_parallel)
    if model.shape is None:
        return gathered
    size = sized(config, tokens, longest_row(config))
    masks = mask_bytes(engine, size, masked_row(config, model.shape, plan.shared_prefix))
    return gathered + layer_states_bytes(model.shape, engine, size) + masks


def _cache_bytes(config: RunConfig, plan: WorkerPlan, model: ModelFacts) -> int:
    """Bytes of keys and values of a role that generates; 0 if they are unknown."""
    if model.shape is None:
        return 0
    return plan.request.cached_tokens * cached_bytes_per_token(model.shape, config.actor.dtype)


def cached_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Keys and values, or latents, of one token in all layers."""
    return shape.layers * shape.cached_size * BYTES[dtype]


def _update_bytes(config: RunConfig, plan: WorkerPlan, engine: EngineConfig, model: ModelFacts) -> int:
    """Bytes that the update of a known architecture needs, excluding weights, optimizer state and all gradients.

    Negative if the gradients do not all exist at the same time: half-precision gradients are moved to the masters'
    after each micro-batch, unless they are added there directly as those of linear layers are on a CPU, and a step's
    only micro-batch begins its backward pass without any. Then the output layer's gradient comes first, and each
    layer's while that layer is computed. A sharded rank has its shard of them, and gathered layers on top of all
    activations.
    """
    shape, device, parameters = model.shape, config.cluster.device, model.parameters or 0
    if shape is None:
        return gathered_for_update(engine, model)
    size = largest_micro_batch(config, engine, plan.shared_prefix)
    half = engine.dtype in HALF and not engine.lora.enabled
    own = BYTES[engine.dtype] / engine.shard_ranks if half else 0.0  # of a gradient in the weight's format
    moving = expert_parameters(parameters, shape.hidden_size, shape.experts)
    collected = moving / max(1, parameters) if adds_gradients(engine, device) else 1.0
    moved, never = own * collected, own * (1 - collected)
    absent = _gradient_bytes_per_parameter(engine) - never if size.alone else moved
    later = max(0, parameters - shape.vocabulary * shape.hidden_size) * (1 - 1 / shape.layers)
    gathered = gathered_for_update(engine, model)
    masked = masked_row(config, shape, plan.shared_prefix)
    begin = gathered + update_bytes(shape, engine, size, device, masked) - int(absent * later)
    end = gathered + last_layer_bytes(shape, engine, size, device, masked)
    if moved and size.alone:
        sums = _gradient_bytes_per_parameter(engine) - own
        end = max(end - int(sums * collected * parameters), -int(moved * parameters))
    return max(begin, end) - int(never * parameters)
