"""Counts the numbers that an update keeps for its backward pass, for each way to share a group's prompt.

The counts are for a decoder with gated feed-forward and RMS norms, as implemented in transformers: Llama, Qwen,
Mistral, and their mixtures of experts (`rlcore.plan.experts`). Letters: H hidden size, I inner size, Q and K total size
of the query and key heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlcore.config import EngineConfig, RunConfig
from rlcore.contracts.requests import Latents, ModelShape
from rlcore.plan.experts import FeedForward, feed_forwards
from rlcore.types import SharedPrefix

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
HALF = frozenset({"bfloat16", "float16"})
CHUNK_LOGITS, KEPT_LOGITS = 2**24, 2**25
"""Logits that a CPU computes at a time, and those it keeps for the backward pass:
`rlcore.engines.hf.train.head.CHUNK_ELEMENTS` and `KEPT_ELEMENTS`."""
BLOCK_LOGITS = 3 * 2**19
"""Temporary numbers while a CPU processes logits: three blocks of `rlcore.engines.hf.train.head.BLOCK_ELEMENTS`."""
SCALES = 4
"""Numbers per token and layer: the scale of each norm in float32."""
HEAD_NORMS = frozenset(
    {
        *("afmoe", "apertus", "dots1", "exaone4", "exaone_moe", "flex_olmo", "gemma3_text", "glm4_moe"),
        *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "llama4_text", "minimax_m2", "nanochat"),
        *("olmo2", "olmo3", "olmoe", "qwen3", "qwen3_moe", "qwen3_vl_moe_text"),
    }
)
"""Values of `model_type` whose layers also normalize queries and keys."""
DEVICE_LOGITS = 2**27
"""Logits that an accelerator computes at a time (512 MiB in float32), within the bounds below."""
DEVICE_ROWS = (1024, 4096)
"""Minimum and maximum rows of a chunk. Each chunk reads the output layer's weight three times and writes its gradient,
so few rows are slow; more than a few thousand are not faster."""
FLOAT32_COPIES = 4
"""Numbers in half precision per number of queries and keys: copies and gradients in float32, and those of values and
outputs."""
EAGER = "eager"
"""The value of `model.attention` that computes the scores of all pairs of a row's tokens, in each head."""
EAGER_TYPES = frozenset(
    {
        *("bloom", "codegen", "gemma2", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "mpt"),
        "vaultgemma",
    }
)
"""Values of `model_type` that transformers has no sdpa for in 5.23: capped scores, attention sinks, biases, or old
code, which 5.24 has for GPT-J and CodeGen."""
DEVICE_CHUNKS = 4
"""Arrays the size of a chunk of logits that exist at a time on an accelerator, which computes a chunk in one go."""


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch, with prompts and responses as long as allowed."""

    tokens: int
    """Positions that are computed: a shared prompt once per group, and never a row's last token, which predicts
    nothing."""
    scored: int
    """Maximum number of loss tokens."""
    alone: bool
    """True if the step has one micro-batch only, so gradients grow while activations are freed."""
    rows: int = 0
    """Rows that hold a copy of their prompt's keys and values, as with `cache`; 0 with the other ways."""
    queries: int = 0
    """Positions after the prompt in each of these rows."""
    keys: int = 0
    """Positions that each of these rows attends to."""
    pairs: int = 0
    """Pairs of a query and a key whose score each head holds; 0 with attention that computes scores in blocks."""


def largest_micro_batch(config: RunConfig, engine: EngineConfig, way: SharedPrefix) -> MicroBatchSize:
    """The size that the token budget allows; with context parallelism, one rank's slice."""
    size, num = _largest(config, engine, way), engine.context_parallel
    pairs = _pairs(size, longest_row(config)) if config.model.attention == EAGER else 0
    return replace(size, tokens=-(-size.tokens // num), scored=-(-size.scored // num), pairs=pairs)


def sized(config: RunConfig, tokens: int, longest: int) -> MicroBatchSize:
    """The size of this many tokens, all of which may be scored, in rows of at most `longest` that share nothing."""
    size = MicroBatchSize(tokens, tokens, alone=False)
    return replace(size, pairs=_pairs(size, longest)) if config.model.attention == EAGER else size


def _pairs(size: MicroBatchSize, longest: int) -> int:
    """Pairs of tokens in rows of this length; with `cache`, of the rows after their prompts, and of the prompts."""
    if not size.rows:
        return size.tokens * longest
    after = size.rows * size.queries
    return after * size.keys + max(0, size.tokens - after) * (size.keys - size.queries)


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


def masked_row(
    config: RunConfig, shape: ModelShape | None, way: SharedPrefix | None = None, longest: int | None = None
) -> int:
    """Tokens of the longest row if layers with a window compute it with a separate mask each, else 0.

    With sdpa transformers makes one for rows that fill the window. flash_attention_2 has kernels with windows, and with
    eager attention layers share masks, which are counted with its scores.
    `way`: how prompts are shared; None: not yet planned, so rows longer than the window are computed one by one.
    `longest`: None: with a prompt and a response.
    """
    longest = longest_row(config) if longest is None else longest
    masks = shape is not None and bool(shape.windowed_layers) and longest >= shape.window
    if not masks or shape is None or config.model.attention in ("flash_attention_2", EAGER):
        return 0
    if way is None:
        way = SharedPrefix.TREE if shape.sees_all(longest) else SharedPrefix.NONE
    return longest if way is SharedPrefix.NONE else 0


def longest_row(config: RunConfig) -> int:
    """Tokens of a row with a prompt and a response as long as allowed."""
    return config.data.max_prompt_tokens + config.rollout.max_tokens


def update_bytes(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize, device: str, masked: int = 0) -> int:
    """Peak bytes of a forward and backward pass, excluding weights, optimizer state and gradients.

    Counts the activations of all layers, plus the largest of: the output layer, the layer that is computed backward,
    and a cache that is still whole. With gradient checkpointing a layer keeps its input only, except the one that is
    computed backward. `masked`: the result of `masked_row`.
    """
    itemsize, layer, kinds = BYTES[engine.dtype], _layer_numbers(shape, engine, size), _kinds(shape, engine, size)
    inputs, mask = shape.hidden_size * size.tokens, _mask_numbers(size, masked)
    masks = mask * (1 if engine.gradient_checkpointing else shape.windowed_layers)
    shared = _shared_mask_numbers(shape, size)
    masks += shared
    whole = (inputs if engine.gradient_checkpointing else layer) * shape.layers + masks
    if not engine.gradient_checkpointing:
        whole += sum(kind.layers * kind.kept for kind in kinds)
    kept = inputs * shape.layers + shared if engine.gradient_checkpointing else whole
    # Embedding, last norm with its input, the states that predict a loss token, and their gradient.
    at_head = kept + inputs * (7 if engine.dtype in HALF else 6)
    recomputed = layer if engine.gradient_checkpointing else 0
    in_layer = (
        whole
        + recomputed
        + max((kind.kept if recomputed else 0) + _backward_numbers(shape, engine, size, kind) for kind in kinds)
    )
    # The cache lives until the forward pass ends; with grouped-query attention, heads attend to an expanded copy.
    cached = kept + inputs * 6 + (0 if _is_plain(shape) else 2 * size.rows * size.keys * shape.kv_size * shape.layers)
    head = at_head * itemsize + logit_bytes(shape, engine, size.scored, device)
    return max(head, max(in_layer, cached) * itemsize) + _common_mask_bytes(masked)


def last_layer_bytes(
    shape: ModelShape, engine: EngineConfig, size: MicroBatchSize, device: str, masked: int = 0
) -> int:
    """The bytes of `update_bytes` at the end of the backward pass.

    All gradients exist by then, the first layer's included, and the embedding's unless it is accumulated in place.
    """
    numbers = _layer_numbers(shape, engine, size)
    numbers += max(kind.kept + _backward_numbers(shape, engine, size, kind) for kind in _kinds(shape, engine, size))
    numbers += _mask_numbers(size, masked) + _shared_mask_numbers(shape, size)
    embedding = 0 if adds_gradients(engine, device) else shape.vocabulary * shape.hidden_size
    held = (numbers + shape.hidden_size * size.tokens + embedding) * BYTES[engine.dtype]
    return held + _common_mask_bytes(masked)


def forward_bytes(config: RunConfig, engine: EngineConfig, way: SharedPrefix, shape: ModelShape | None) -> int:
    """Bytes of a pass without gradients: the states of one layer and a chunk of logits; 0 if they are unknown."""
    if shape is None:
        return 0
    size, device = largest_micro_batch(config, engine, way), config.cluster.device
    states = layer_states_bytes(shape, engine, size)
    states += mask_bytes(engine, size, masked_row(config, shape, way))
    return states + logit_bytes(shape, engine, size.scored, device) - _head_gradient_bytes(shape, engine, device)


def layer_states_bytes(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> int:
    """Bytes of the states of one layer in a pass without gradients, and of the masks of eager attention."""
    itemsize = BYTES[engine.dtype]
    feed_forward = max(kind.forward for kind in _kinds(shape, engine, size)) * itemsize
    states = size.tokens * max(8 * shape.hidden_size, attention_numbers(shape)) + _shared_mask_numbers(shape, size)
    return states * itemsize + max(feed_forward, scores_bytes(shape, engine, size))


def scores_bytes(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> int:
    """Bytes of a layer's scores in a pass without gradients: those before and after the softmax, which half precision
    computes in float32, and copies of keys and values for each head of queries."""
    if not size.pairs:
        return 0
    half = BYTES[engine.dtype] if engine.dtype in HALF else 0
    copies = 2 * size.tokens * _query_size(shape) * BYTES[engine.dtype]
    return shape.heads * size.pairs * (2 * _wide(engine) + half) + copies


def _wide(engine: EngineConfig) -> int:
    """Bytes of a number that is computed in float32 or wider."""
    return max(4, BYTES[engine.dtype])


def _shared_mask_numbers(shape: ModelShape, size: MicroBatchSize) -> int:
    """Numbers of the masks of eager attention: one mask for each kind of layers, with windows and without."""
    kinds = (shape.windowed_layers > 0) + (shape.windowed_layers < shape.layers)
    return 0 if size.rows else kinds * size.pairs


def mask_bytes(engine: EngineConfig, size: MicroBatchSize, masked: int) -> int:
    """Bytes of the masks of one layer with a sliding window, whose longest row has `masked` tokens."""
    return _mask_numbers(size, masked) * BYTES[engine.dtype] + _common_mask_bytes(masked)


def _mask_numbers(size: MicroBatchSize, masked: int) -> int:
    """Numbers in the engine's format of the mask that a layer with a sliding window makes, and keeps for its backward
    pass: one for each pair of tokens of a row."""
    return size.tokens * masked


def _common_mask_bytes(masked: int) -> int:
    """Bytes of the flags that these masks are made from, for all layers and rows."""
    return masked**2


def _kinds(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> Sequence[FeedForward]:
    """The kinds of feed-forward layers for the tokens of a micro-batch."""
    return feed_forwards(shape, size.tokens, BYTES[engine.dtype], trained=not engine.lora.enabled)


def _backward_numbers(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize, kind: FeedForward) -> int:
    """Temporary numbers in the backward pass of a layer: two gradients of the feed-forward, those of the residual
    stream and of a norm; with `cache` also gradients of the copies.

    With eager attention also the gradients before and after the softmax. With its result these are three wide numbers
    per score, when what the feed-forward keeps is freed.
    """
    feed_forward = kind.backward + 4 * size.tokens * shape.hidden_size
    wide = 3 * _wide(engine) // BYTES[engine.dtype] * shape.heads * size.pairs
    scores = wide - _score_numbers(shape, engine, size) - kind.kept
    scores += size.tokens * (4 * shape.hidden_size + 2 * _query_size(shape))
    copies = 2 * size.rows * size.keys * (_query_size(shape) + shape.kv_size)
    return max(feed_forward, copies, scores, _attention_backward(shape, engine, size) - kind.kept)


def _score_numbers(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> int:
    """Numbers in the engine's format that eager attention keeps: the softmax, in half precision also in float32."""
    half = 1 if engine.dtype in HALF else 0
    return (_wide(engine) // BYTES[engine.dtype] + half) * shape.heads * size.pairs


def _layer_numbers(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> int:
    """Numbers in the engine's format that a layer keeps, without its feed-forward.

    Per token: rotated queries and attention output; rotated keys, and values; input, scaled input and output of each
    of two norms, where half precision keeps a float32 copy instead of the input. With `cache` also, per row, a mask and
    the keys and values that it attends to. With eager attention also scores, and keys and values once more for each
    head of queries.
    """
    half = engine.dtype in HALF
    heads = _query_size(shape) + shape.kv_size
    token = (8 if half else 6) * shape.hidden_size + 2 * heads + SCALES
    if shape.model_type in HEAD_NORMS:
        token += (3 if half else 2) * heads
    if shape.latents is not None:
        token += _latent_numbers(shape.latents, shape.heads, half=half)
    seen = size.rows * size.keys * (2 * _query_size(shape) + size.queries)
    copied = 2 * size.tokens * _query_size(shape) if size.pairs and not _is_plain(shape) and not size.rows else 0
    return size.tokens * token + seen + copied + _score_numbers(shape, engine, size)


def _latent_numbers(latents: Latents, heads: int, *, half: bool) -> int:
    """Numbers that attention with latents keeps per token in addition: their norms, and the output without the zeros
    that values are padded with."""
    norms = (4 if half else 3) * (latents.query_rank + latents.key_rank) + SCALES
    return norms + heads * latents.value_size


def attention_numbers(shape: ModelShape) -> int:
    """Numbers per token of attention with latents in a pass without gradients; 0 for any other attention.

    Queries before and after they get positions, keys and values together, then apart and padded, and the output.
    """
    if shape.latents is None:
        return 0
    return 2 * shape.hidden_size + 5 * _query_size(shape) + expanded_size(shape)


def expanded_size(shape: ModelShape) -> int:
    """Keys and values of a token that are computed from its latents, without the part of a key with a position."""
    latents = shape.latents
    return shape.heads * (latents.head_size - latents.rotated + latents.value_size) if latents else 0


def _attention_backward(shape: ModelShape, engine: EngineConfig, size: MicroBatchSize) -> int:
    """Temporary numbers in the backward pass of attention, when what the feed-forward keeps is freed: gradients of
    queries, keys, values and outputs, and of what latents are expanded to. In half precision a CPU computes those of
    short runs in float32, from copies."""
    each = 2 + (FLOAT32_COPIES if engine.dtype in HALF else 0)
    heads = each * (_query_size(shape) + shape.kv_size)
    return size.tokens * (4 * shape.hidden_size + heads + expanded_size(shape))


def _query_size(shape: ModelShape) -> int:
    return shape.query_size or shape.hidden_size


def _is_plain(shape: ModelShape) -> bool:
    """True for multi-head attention: every query head has separate keys."""
    return _query_size(shape) == shape.kv_size


def device_logit_rows(vocabulary: int) -> int:
    """Rows of logits that an accelerator computes at a time."""
    fewest, most = DEVICE_ROWS
    return min(most, max(fewest, DEVICE_LOGITS // vocabulary))


def logit_bytes(shape: ModelShape, engine: EngineConfig, scored: int, device: str) -> int:
    """Logits of that many tokens, in float32 or wider, and the gradient of a trained output layer unless it is
    accumulated in place."""
    wide, width = max(4, BYTES[engine.dtype]), shape.vocabulary
    if device != "cuda":
        logits = scored * width
        chunk = min(logits, CHUNK_LOGITS)
        # Logits that are kept, those that are recomputed, and their gradient; then either the temporaries of a block
        # or, in half precision, that gradient in the layer's dtype.
        passing = max(min(3 * logits, BLOCK_LOGITS), chunk // 2 if engine.dtype in HALF else 0)
        numbers = min(logits, KEPT_LOGITS) + min(max(0, logits - KEPT_LOGITS), CHUNK_LOGITS) + chunk + passing
    else:
        numbers = DEVICE_CHUNKS * min(scored, device_logit_rows(width)) * width
    return numbers * wide + _head_gradient_bytes(shape, engine, device)


def _head_gradient_bytes(shape: ModelShape, engine: EngineConfig, device: str) -> int:
    """The gradient of the output layer's weight, summed in float32, and the product that is added to it."""
    if adds_gradients(engine, device):
        return 0
    product = BYTES[engine.dtype] if engine.dtype in HALF else 0
    return shape.vocabulary * shape.hidden_size * (max(4, BYTES[engine.dtype]) + product)


def adds_gradients(engine: EngineConfig, device: str) -> bool:
    """True if the gradients of linear layers and embeddings are added to their sums without a temporary."""
    return engine.lora.enabled or (device != "cuda" and (engine.dtype not in HALF or engine.shard_ranks == 1))
