"""What a run holds in memory, reckoned before it starts.

Of each process: its libraries (on a CPU), weights and optimizer state, and the larger of what an update and generation
need beside them, which take turns. An update needs gradients, the activations of one micro-batch, which the token
budget bounds, and the logits that exist at a time; generation the weights once more where it packs them, keys and
values of its rows, and logits of one token a row.
"""

from collections.abc import Mapping, Sequence

from rlcore.config import EngineConfig, RunConfig
from rlcore.errors import PlanError
from rlcore.plan.types import Facts, ModelFacts, ModelShape, WorkerPlan

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
TRAINING_BYTES = {"float64": 32.0, "float32": 16.0, "bfloat16": 20.0}
"""Of a parameter: weight, gradient and Adam's two moments; a half-precision weight has a float32 master, whose gradient
is summed in float32."""
GRADIENT_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 6.0}
"""What of it are gradients, which are freed after each update."""
PROCESS_BYTES = 500 * 2**20
"""Python with torch and transformers, the run's own, and what the allocator keeps in pieces, on the host: 0.46 to 0.58
GB were resident beside weights and optimizer state when updates began (docs/results/performance.md), on Linux."""
SAMPLED_LOGITS = 2
"""Arrays of a number for each entry of the vocabulary and each row that is sampled: logits and probabilities."""
LOGIT_BYTES = 4 * 2**24 * 4
"""Four arrays of one chunk of logits in float32: `rlcore.backends.hf.head.CHUNK_ELEMENTS`."""


def training_bytes_per_parameter(engine: EngineConfig) -> float:
    """Of one rank: weights, gradients, optimizer state and masters; of LoRA the frozen weights, adapters are small.

    A rank of a sharded engine has its part of these and, while it samples, scores or writes them, all weights.
    """
    everything = float(BYTES[engine.dtype]) if engine.lora.enabled else TRAINING_BYTES[engine.dtype]
    if _is_whole(engine):
        return everything
    return everything / engine.ranks + BYTES[engine.dtype]


def packed_bytes_per_parameter(config: RunConfig) -> float:
    """Of the embedded rollout: the copy of float32 weights that a CPU multiplies few rows with, while it generates."""
    return float(BYTES["float32"]) if config.cluster.device == "cpu" and config.actor.dtype == "float32" else 0.0


def _gradient_bytes_per_parameter(engine: EngineConfig) -> float:
    """Of one rank, as counted in `training_bytes_per_parameter`."""
    if engine.lora.enabled:
        return 0.0
    return GRADIENT_BYTES[engine.dtype] / (1 if _is_whole(engine) else engine.ranks)


def _is_whole(engine: EngineConfig) -> bool:
    """Whether a rank has all of the weights, gradients and optimizer state."""
    return engine.sharding == "none" or engine.ranks == 1


def memory_estimate(config: RunConfig, workers: Sequence[WorkerPlan], facts: Facts) -> dict[str, int]:
    """Bytes of one rank of each role, with those served inside it, when prompts and responses are as long as allowed.

    Empty when the number of parameters is not known; where the architecture is not, activations and caches are left
    out. Roles in one process take turns, so the largest of what they need beside weights and optimizer state counts;
    those that are served inside the actor work while it has no gradients.
    """
    if facts.parameters is None:
        return {}
    return {
        plan.request.role.name: int(plan.request.bytes_per_parameter * (facts.model_of(plan.request).parameters or 0))
        + (0 if plan.request.gpus else PROCESS_BYTES)
        + max(
            _working_bytes(config, each, facts.model_of(each.request))
            for each in workers
            if plan.request.role in (each.request.role, each.request.inside)
        )
        for plan in workers
        if plan.request.inside is None and plan.request.bytes_per_parameter > 0
    }


def _working_bytes(config: RunConfig, plan: WorkerPlan, model: ModelFacts) -> int:
    """What a role needs beside weights, gradients and optimizer state; 0 where nothing is known of it.

    Of the embedded rollout less the actor's gradients, whose place it takes: negative when it needs less than they.
    """
    engine, cached, shape = plan.request.engine, plan.request.cached_tokens, model.shape
    if shape is None:
        return 0
    if engine is not None:
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        samples = config.train.prompts_per_step * config.rollout.samples_per_prompt
        num_tokens = min(max(engine.micro_batch_tokens, longest), samples * longest)
        return num_tokens * activation_bytes(shape, engine) + LOGIT_BYTES
    if not cached:
        return 0
    copied = plan.request.bytes_per_parameter - _gradient_bytes_per_parameter(config.actor)
    logits = SAMPLED_LOGITS * config.rollout.max_rows * shape.vocabulary * BYTES["float32"]
    keys_and_values = cached * shape.layers * 2 * shape.kv_size * BYTES[config.actor.dtype]
    return int(copied * (model.parameters or 0)) + keys_and_values + logits


def activation_bytes(shape: ModelShape, engine: EngineConfig) -> int:
    """What one token of a micro-batch leaves behind for the backward pass.

    Of a layer with gated feed-forward: inputs, outputs and scaled values of two norms, queries, attention's output
    twice and the residual stream, 14 of the hidden size; gate, its activation, up and their product, and a copy in
    passing, 4.5 of the inner size; keys and values, plain and rotated. With gradient checkpointing the input of each
    layer, and one layer whole.
    """
    whole = 14 * shape.hidden_size + int(4.5 * shape.inner_size) + 4 * shape.kv_size
    kept = shape.hidden_size * shape.layers + whole if engine.gradient_checkpointing else whole * shape.layers
    return kept * BYTES[engine.dtype]


def check_memory(workers: Sequence[WorkerPlan], memory: Mapping[str, int], facts: Facts) -> None:
    """PlanError when the estimate exceeds what there is, with the settings that lower it."""
    remedy = (
        "lower actor.micro_batch_tokens, data.max_prompt_tokens or rollout.max_tokens, set "
        "actor.gradient_checkpointing=true or actor.lora.enabled=true, or take a smaller model"
    )
    on_host, parts = 0, []
    for plan in workers:
        request, size = plan.request, memory.get(plan.request.role.name, 0)
        if request.gpus and facts.gpu_memory_bytes is not None and size > facts.gpu_memory_bytes:
            raise PlanError(
                f"role '{request.role.name}' needs about {_gib(size)} GiB a rank, a device has "
                f"{_gib(facts.gpu_memory_bytes)}; {remedy}"
            )
        if size and not request.gpus:
            on_host += size * request.replicas * request.ranks
            parts.append(f"{request.role.name} {_gib(size * request.replicas * request.ranks)}")
    if facts.memory_bytes is not None and on_host > facts.memory_bytes:
        raise PlanError(
            f"memory: the run needs about {_gib(on_host)} GiB ({', '.join(parts)}), the machine has "
            f"{_gib(facts.memory_bytes)}; {remedy}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
