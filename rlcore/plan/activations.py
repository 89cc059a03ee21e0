"""Counts what an update keeps for its backward pass, per way in which the samples of a group share their prompt.

The counts are those of a decoder with gated feed-forward and norms without a mean, as transformers writes it: Llama,
Qwen, Mistral. Letters: H hidden size, I inner size, Q and K sizes of all heads of queries and of keys.
"""

from dataclasses import dataclass, replace

from rlcore.config import EngineConfig, RunConfig
from rlcore.contracts.requests import ModelShape
from rlcore.types import SharedPrefix

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
HALF = frozenset({"bfloat16", "float16"})
CHUNK_LOGITS, KEPT_LOGITS = 2**24, 2**25
"""Logits that a CPU computes at a time, and those that are kept for the backward pass:
`rlcore.engines.hf.train.head.CHUNK_ELEMENTS` and `KEPT_ELEMENTS`."""
BLOCK_LOGITS = 3 * 2**19
"""Further numbers while logits are treated on a CPU: three blocks of `rlcore.engines.hf.train.head.BLOCK_ELEMENTS`."""
SCALES = 4
"""Numbers per token and layer: the scale of each norm in float32."""
HEAD_NORMS = frozenset({"apertus", "exaone4", "hunyuan_v1_dense", "olmo2", "olmo3", "qwen3"})
"""Values of `model_type` whose layers also scale queries and keys, by a norm each."""
DEVICE_LOGITS = 2**27
"""Logits that an accelerator computes at a time, 512 MiB in float32, where that is within the bounds below."""
DEVICE_ROWS = (1024, 4096)
"""Fewest and most rows of them: each chunk reads the output layer's weight three times and writes its gradient, so few
rows are slow; more than a few thousand are not faster."""
DEVICE_CHUNKS = 4
"""Arrays of the size of a chunk of logits that exist at a time on an accelerator, which computes a chunk in one go."""


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch, with prompts and responses as long as allowed."""

    tokens: int
    """Positions that are computed: with a shared prompt once per group, and without a row's last token, from which
    nothing is predicted."""
    scored: int
    """Tokens of a loss, at most."""
    alone: bool
    """A step has no other: gradients grow while activations are freed."""
    rows: int = 0
    """Rows that hold a copy of their prompt's keys and values, as with `cache`; 0 by the others."""
    queries: int = 0
    """Of each of these rows, the positions after its prompt."""
    keys: int = 0
    """Of each of these rows, the positions that are seen."""


def largest_micro_batch(config: RunConfig, engine: EngineConfig, way: SharedPrefix) -> MicroBatchSize:
    """The size that the token budget allows; of ranks that hold slices of it, one's part."""
    size, num = _largest(config, engine, way), engine.context_parallel
    return replace(size, tokens=-(-size.tokens // num), scored=-(-size.scored // num))


def _largest(config: RunConfig, engine: EngineConfig, way: SharedPrefix) -> MicroBatchSize:
    """The size of a whole micro-batch."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_tokens
    samples, prompts = config.rollout.samples_per_prompt, config.train.prompts_per_step
    longest, scored = prompt + response, prompts * samples * response
    if way is SharedPrefix.NONE:
        everything, budget = prompts * samples * longest, max(engine.micro_batch_tokens, longest)
        tokens = min(budget, everything)
        return MicroBatchSize(tokens, min(tokens, scored), everything <= budget)
    suffix = max(1, response - 1)
    group = prompt + samples * suffix
    everything, budget = prompts * group, max(engine.micro_batch_tokens, prompt + suffix)
    tokens = min(budget, everything)
    found = MicroBatchSize(tokens, min(tokens, scored), everything <= budget)
    if way is SharedPrefix.TREE:
        return found
    whole_groups, rest = divmod(tokens, group)
    rows = whole_groups * samples + max(0, rest - prompt) // suffix
    return MicroBatchSize(found.tokens, found.scored, found.alone, rows, suffix, prompt + suffix)


def update_bytes(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize, device: str) -> int:
    """The most that a forward and a backward pass hold beside weights, optimizer state and gradients.

    That is what all layers keep, and the larger of what the output layer, the layer that is computed backward, and a
    cache that is still whole need beside it. With gradient checkpointing layers keep their input, and the one that is
    computed backward all.
    """
    itemsize, layer = BYTES[engine.dtype], _layer_numbers(shape, engine, size)
    inputs = shape.hidden_size * size.tokens
    whole = inputs * shape.layers + layer if engine.gradient_checkpointing else layer * shape.layers
    kept = inputs * shape.layers if engine.gradient_checkpointing else whole
    # Embedding, last norm with its input, the states that predict a loss token, and their gradient.
    at_head = kept + inputs * (7 if engine.dtype in HALF else 6)
    in_layer = whole + _backward_numbers(shape, size)
    # The cache lives until the forward pass ends; heads that share keys attend to another copy.
    cached = kept + inputs * 6 + (0 if _is_plain(shape) else 2 * size.rows * size.keys * shape.kv_size * shape.layers)
    return max(at_head * itemsize + logit_bytes(shape, engine, size.scored, device), max(in_layer, cached) * itemsize)


def last_layer_bytes(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize, device: str) -> int:
    """The bytes of `update_bytes` at the end of the backward pass.

    All gradients are there: of the first layer, and of the embedding where it is not added to its sum at once.
    """
    numbers = _layer_numbers(shape, engine, size) + _backward_numbers(shape, size)
    embedding = 0 if _adds_gradients(engine, device) else shape.vocabulary * shape.hidden_size
    return (numbers + shape.hidden_size * size.tokens + embedding) * BYTES[engine.dtype]


def forward_bytes(config: RunConfig, engine: EngineConfig, way: SharedPrefix, shape: ModelShape | None) -> int:
    """Bytes of a pass that keeps nothing: the states of one layer, and a chunk of logits; 0 where they are unknown."""
    if shape is None:
        return 0
    size, device = largest_micro_batch(config, engine, way), config.cluster.device
    states = size.tokens * (3 * shape.inner_size + 8 * shape.hidden_size) * BYTES[engine.dtype]
    return states + logit_bytes(shape, engine, size.scored, device) - _head_gradient_bytes(shape, engine, device)


def _backward_numbers(shape: ModelShape, size: MicroBatchSize) -> int:
    """Numbers that the backward pass of a layer needs beside what it keeps: of the feed-forward two gradients more than
    values are freed, and those of the residual stream and of a norm; with `cache` gradients of the copies."""
    feed_forward = size.tokens * (2 * shape.inner_size + 4 * shape.hidden_size)
    return max(feed_forward, 2 * size.rows * size.keys * (_query_size(shape) + shape.kv_size))


def _layer_numbers(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> int:
    """Numbers in the engine's format that a layer keeps.

    Of a token: gate, its activation, up and their product; rotated queries and attention's output, rotated keys and
    values; of each of two norms input, scaled input and output, and in half precision, instead of the input, its copy
    in float32. By the way `cache` also, of each row, the keys and values of all that it sees, and a mask.
    """
    half = engine.dtype in HALF
    heads = _query_size(shape) + shape.kv_size
    token = 4 * shape.inner_size + (8 if half else 6) * shape.hidden_size + 2 * heads + SCALES
    if shape.model_type in HEAD_NORMS:
        token += (3 if half else 2) * heads
    seen = size.rows * size.keys * (2 * _query_size(shape) + size.queries)
    return size.tokens * token + seen


def _query_size(shape: ModelShape) -> int:
    return shape.query_size or shape.hidden_size


def _is_plain(shape: ModelShape) -> bool:
    """True if every head of queries has keys for itself."""
    return _query_size(shape) == shape.kv_size


def device_logit_rows(vocabulary: int) -> int:
    """Rows of logits that an accelerator computes at a time."""
    fewest, most = DEVICE_ROWS
    return min(most, max(fewest, DEVICE_LOGITS // vocabulary))


def logit_bytes(shape: ModelShape, engine: EngineConfig, scored: int, device: str) -> int:
    """Logits of that many tokens, in float32 at least, and the gradient of a trained output layer where it is not added
    to its sum at once."""
    wide, width = max(4, BYTES[engine.dtype]), shape.vocabulary
    if device != "cuda":
        logits = scored * width
        chunk = min(logits, CHUNK_LOGITS)
        # Those that are kept, further ones, which are computed again, and their gradient; then either what treats them
        # block by block or, in half precision, that gradient as the layer wants it.
        passing = max(min(3 * logits, BLOCK_LOGITS), chunk // 2 if engine.dtype in HALF else 0)
        numbers = min(logits, KEPT_LOGITS) + min(max(0, logits - KEPT_LOGITS), CHUNK_LOGITS) + chunk + passing
    else:
        numbers = DEVICE_CHUNKS * min(scored, device_logit_rows(width)) * width
    return numbers * wide + _head_gradient_bytes(shape, engine, device)


def _head_gradient_bytes(shape: ModelShape, engine: EngineConfig, device: str) -> int:
    """The gradient of the output layer's weight, summed in float32, and the product that is added to it."""
    if _adds_gradients(engine, device):
        return 0
    product = BYTES[engine.dtype] if engine.dtype in HALF else 0
    return shape.vocabulary * shape.hidden_size * (max(4, BYTES[engine.dtype]) + product)


def _adds_gradients(engine: EngineConfig, device: str) -> bool:
    """True if no gradient of embedding or output layer is made beside its sum."""
    return engine.lora.enabled or (device != "cuda" and engine.dtype not in HALF)
