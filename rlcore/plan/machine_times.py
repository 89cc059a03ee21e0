"""Estimates the seconds of a step from a card's data sheet. Every assumption is a constant here, and printed.

Of a mixture of experts operations count the weights that a token uses, and decoding reads those that its rows use.
Optimizer, gradients and weight sync count all weights.

The time of a phase is set by its bottleneck: operations over the card's peak, or bytes over the bandwidth of its memory
or links, each times the share of it that is reached. Reward functions, judges, tools and the controller are left out,
because they depend on the user's code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from rlcore.contracts.requests import Experts
from rlcore.plan.experts import computed_parameters, expert_parameters, layer_values, used_parameters
from rlcore.plan.machine_cards import Machine

TRAIN_SHARE, FORWARD_SHARE = 0.4, 0.5
"""Share of the peak that matrix products reach in an update, and in a forward pass or a prefill of thousands of
tokens."""
MEMORY_SHARE, LINK_SHARE = 0.7, 0.7
"""Share of the memory bandwidth that decoding and elementwise operations reach, and of the link bandwidth that
collectives reach."""
DECODE_STEP_S = 0.003
"""Overhead per decoding step of all rows: scheduling, sampling, launches (CUDA graphs)."""
EMBEDDED_LAYER_S = 77 * 10e-6
"""Overhead of the embedded sampler per decoding step and layer: 77 kernels, launched individually."""
EAGER_LAYER_S = 15 * 10e-6
"""Assumed overhead of an engine without CUDA graphs per decoding step and layer: about 15 fused kernels, launched
individually."""
COLLECTIVE_S = 15e-6
"""Assumed latency of a sum over the devices of an engine, of which a layer has two."""
NODES_COLLECTIVE_S = 40e-6
"""The same if they are on several nodes."""
NODE_GB_S = 50.0
"""Bandwidth of a card to other nodes: one port of 400 Gbit/s each."""
HOST_GB_S = 25.0
"""Bandwidth of a card to pinned host memory, over PCIe 4."""
DISK_WRITE_GB_S, DISK_READ_GB_S, TCP_GB_S = 1.4, 3.0, 0.75
"""Bandwidth of a weight sync: written to memory-backed files by one process, read by each replica, and sent over one
connection (docs/results/transfer.md)."""
PAGEABLE_GB_S = 8.0
"""Assumed bandwidth of each card to and from unpinned host memory, which weights are shared in or broadcast from."""
IPC_PASSES = 6
"""Times that a byte of the weights passes the device's memory: copies into the bucket, from it, and into the engine."""
SLEEP_S = 2.0
"""Time to put replicas to sleep and wake them."""
GRADIENT_BYTES = 4
"""Bytes per parameter of a gradient that ranks sum: float32, whatever the weights are."""
OPTIMIZER_BYTES = 30
"""Bytes per parameter that an optimizer step reads and writes: masters, gradients, moments, weights."""


@dataclass(frozen=True)
class StepSize:
    """The work of a step. Tokens and lengths are means unless a name says otherwise."""

    parameters: int
    layers: int
    hidden_size: int
    query_size: int
    kv_size: int
    groups: int
    samples: int
    """Samples per group."""
    prompt: int
    response: int
    longest: int
    """Length of a sampled response, in tokens."""
    inner_size: int
    """Inner size of a feed-forward layer without experts."""
    vocabulary: int
    bytes_per_weight: int = 2
    shares_prompts: bool = True
    """True if an update computes the prompt of a group once."""
    experts: Experts | None = None
    cached_size: int = 0
    """Numbers per token and layer in a cache; 0: keys and values."""

    @property
    def shared_size(self) -> int:
        """Inner size of a layer's experts that every token goes through."""
        return self.experts.shared_size if self.experts else 0

    def used(self, tokens: float = 1.0) -> float:
        """Parameters that so many tokens use together."""
        return used_parameters(self.parameters, self.hidden_size, self.experts, tokens)


@dataclass(frozen=True)
class RankLayout:
    """The devices that compute one model."""

    devices: int = 1
    sharded: bool = False
    copies: int = 1
    """Copies of the sharded weights, each on equally many neighbours (HSDP)."""
    checkpointing: bool = True
    offload: bool = False

    @property
    def shard_devices(self) -> int:
        """The number of devices that hold one copy of the weights together."""
        return self.devices // self.copies if self.sharded else 1


@dataclass(frozen=True)
class OtherModel:
    """A model with ranks that are not the policy's."""

    size: StepSize
    """The step, with this model's figures."""
    ranks: RankLayout


@dataclass(frozen=True)
class RewardPool:
    """Reward models that share devices, on which one at a time computes."""

    models: tuple[OtherModel, ...]
    samples: bool = False
    """True if the policy samples on these devices."""
    trains: bool = False
    """True if the policy trains on these devices."""


@dataclass(frozen=True)
class StepLayout:
    """The devices that compute a step. The defaults describe one device."""

    trainers: int = 1
    """Number of devices that train together."""
    engines: int = 1
    tensor_parallel: int = 1
    engine_nodes: int = 1
    """Nodes over which an engine's devices are spread."""
    max_rows: int = 256
    """Rows that an engine decodes at a time."""
    cached_rows: int = 10**9
    """Rows that fit into an engine's memory."""
    embedded: bool = False
    graphs: bool = True
    """True if engines that are not embedded launch a decoding step as one CUDA graph."""
    sleeps: bool = False
    """True if engines take turns with the trainers on their devices."""
    shared: bool = False
    """True if engines are on the trainers' devices."""
    checkpointing: bool = True
    offload: bool = False
    sharded: bool = False
    copies: int = 1
    """Copies of the policy's sharded weights (`actor.dp_replicate`)."""
    scoring_passes: int = 0
    """Number of forward passes over all tokens of the policy, and of references of its size."""
    reference: StepSize | None = None
    """The step in the figures of a reference that is another model than the policy; the policy's ranks compute it."""
    critic: bool = False
    critic_model: OtherModel | None = None
    """The critic's model and ranks; None: they are those of the policy."""
    rewards: tuple[RewardPool, ...] = ()
    updates: int = 1
    epochs: int = 1
    weight_sync: str = "disk"
    merges: bool = False
    """True if an adapter is merged into weights that are sent, which one rank does."""
    overlaps: bool = False
    """True if sampling continues while the actor trains."""

    @property
    def policy(self) -> RankLayout:
        """The devices that train the policy."""
        return RankLayout(self.trainers, self.sharded, self.copies, self.checkpointing, self.offload)


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of each phase of a step, with its bottleneck."""

    seconds: Mapping[str, float]
    bound: Mapping[str, str]
    overlaps: bool = False

    @property
    def total(self) -> float:
        """Seconds of a step: the sum of all phases. If sampling overlaps with training, the longer of the two counts,
        and the wait for rewards that exceeds both."""
        if not self.overlaps:
            return sum(self.seconds.values())
        sampling, waiting = self.seconds["sample"], self.seconds["reward"]
        return max(sampling, sum(self.seconds.values()) - sampling - waiting) + waiting

    @property
    def longest(self) -> str:
        """The longest phase."""
        return max(self.seconds, key=lambda name: self.seconds[name])


def estimate_step(size: StepSize, layout: StepLayout, machine: Machine) -> StepEstimate:
    """Seconds of each phase of a step on a machine."""
    phases = {
        "sample": _sample(size, layout, machine),
        "score": _score(size, layout, machine),
        "reward": (0.0, "-"),
        "update": _update(size, layout, machine),
        "hand-over": _hand_over(size, layout, machine),
    }
    phases["reward"] = _reward({name: seconds for name, (seconds, _) in phases.items()}, layout, machine)
    return StepEstimate(
        {name: seconds for name, (seconds, _) in phases.items()},
        {name: bound for name, (_, bound) in phases.items()},
        layout.overlaps,
    )


def update_tokens(size: StepSize) -> int:
    """Tokens that an update or a scoring pass computes."""
    prompts = size.groups if size.shares_prompts else size.groups * size.samples
    return prompts * size.prompt + size.groups * size.samples * size.response


def _forward_operations(size: StepSize) -> float:
    """Operations of one forward pass over the step: matrix products and causal attention."""
    rows, response = size.groups * size.samples, size.response
    context = size.prompt + response / 2
    attention = 4 * size.layers * size.query_size * rows * response * context
    computed = computed_parameters(size.parameters, size.hidden_size, size.experts)
    return 2.0 * computed * update_tokens(size) + attention


def _forward_bytes(size: StepSize) -> float:
    """Bytes that the elementwise operations of one forward pass over the step write and read: layer values and
    logits."""
    values = layer_values(size.layers, size.hidden_size, size.inner_size, size.experts)
    values += 8 * size.hidden_size + 2 * (size.query_size + size.kv_size)
    rows = size.groups * size.samples * size.response
    return 2.0 * (size.bytes_per_weight * size.layers * values * update_tokens(size) + 4 * size.vocabulary * rows)


def _passes_s(size: StepSize, machine: Machine, forwards: float, share: float) -> tuple[float, float]:
    """Seconds of one device for that many forward passes: products at this share of the peak, and memory traffic."""
    card = machine.card
    products_s = forwards * _forward_operations(size) / (share * card.tflops * 1e12)
    return products_s, forwards * _forward_bytes(size) / (MEMORY_SHARE * card.memory_gb_s * 1e9)


def _sample(size: StepSize, layout: StepLayout, machine: Machine) -> tuple[float, str]:
    """Prefill of each group's prompt, then decoding steps of all rows, up to the longest response."""
    samples = size.groups * size.samples / layout.engines
    rows = max(1.0, min(samples, layout.max_rows, layout.cached_rows))
    prefill = 2.0 * size.used() * size.groups * size.prompt / layout.engines / layout.tensor_parallel
    prefill_s = prefill / (FORWARD_SHARE * machine.card.tflops * 1e12)
    prefill_s += _collectives_s(size, layout, machine, size.groups * size.prompt / layout.engines)
    waves = max(0.0, samples / rows - 1)
    # While rows are queued the engine is full; then rows end one after another, and the longest continues alone.
    full_s, bound = _decode_s(size, layout, machine, rows)
    mean_s, _ = _decode_s(size, layout, machine, max(1.0, rows * size.response / size.longest))
    return prefill_s + waves * size.response * full_s + size.longest * mean_s, bound


def _decode_s(size: StepSize, layout: StepLayout, machine: Machine, rows: float) -> tuple[float, str]:
    """Seconds of one decoding step of `rows` rows, and its bottleneck."""
    context = size.prompt + size.response / 2
    kv = size.layers * (size.cached_size or 2 * size.kv_size) * size.bytes_per_weight * context
    logits = 2 * 4 * size.vocabulary  # written, and read by the sampler
    read = (size.bytes_per_weight * size.used(rows) + rows * (kv + logits)) / layout.tensor_parallel
    memory_s = read / (MEMORY_SHARE * machine.card.memory_gb_s * 1e9)
    products = 2.0 * size.used() * rows / layout.tensor_parallel
    compute_s = products / (FORWARD_SHARE * machine.card.tflops * 1e12)
    launch_s = EMBEDDED_LAYER_S * size.layers if layout.embedded else DECODE_STEP_S
    if not layout.graphs and not layout.embedded:
        launch_s += EAGER_LAYER_S * size.layers
    link_s = _collectives_s(size, layout, machine, rows)
    bounds = {"memory bandwidth": memory_s, "operations": compute_s, "launches": launch_s, "links": link_s}
    return max(memory_s, compute_s) + launch_s + link_s, max(bounds, key=lambda name: bounds[name])


def _collectives_s(size: StepSize, layout: StepLayout, machine: Machine, tokens: float) -> float:
    """Seconds of the sums over an engine's devices, after attention and after the MLP of each layer, of one pass over
    that many tokens."""
    devices = layout.tensor_parallel
    if devices == 1:
        return 0.0
    sent = 2 * (devices - 1) / devices * size.bytes_per_weight * size.hidden_size * tokens
    latency_s, gb_s = COLLECTIVE_S, machine.card.link_gb_s
    if layout.engine_nodes > 1:  # what a node sends goes through the ports of all its devices
        latency_s, gb_s = NODES_COLLECTIVE_S, min(gb_s, NODE_GB_S * devices / layout.engine_nodes)
    return 2 * size.layers * (latency_s + sent / (LINK_SHARE * gb_s * 1e9))


def _critics(size: StepSize, layout: StepLayout) -> list[OtherModel]:
    """The critic; none in a step without one."""
    return [layout.critic_model or OtherModel(size, layout.policy)] if layout.critic else []


def _score(size: StepSize, layout: StepLayout, machine: Machine) -> tuple[float, str]:
    """Forward passes for old log-probs, references and values, one after another."""
    sizes = [size] * layout.scoring_passes + ([layout.reference] if layout.reference else [])
    models = [*(OtherModel(figures, layout.policy) for figures in sizes), *_critics(size, layout)]
    products_s = values_s = 0.0
    for model in models:
        products, values = _passes_s(model.size, machine, 1, FORWARD_SHARE)
        products_s, values_s = products_s + products / model.ranks.devices, values_s + values / model.ranks.devices
    bound = "operations" if products_s >= values_s else "memory bandwidth"
    return products_s + values_s, bound if models else "-"


def _reward(others: Mapping[str, float], layout: StepLayout, machine: Machine) -> tuple[float, str]:
    """The wait for reward models, which score rows as they end: what remains after the phases that hide it.

    These are sampling and passes, or the longer side if sampling overlaps with training. A phase on the same devices
    hides nothing. `others`: the seconds of the other phases.
    """
    longest, bound = 0.0, "-"
    sampling, training = others["sample"], sum(others.values()) - others["sample"]
    for pool in layout.rewards:
        passes = [(_passes_s(model.size, machine, 1, FORWARD_SHARE), model.ranks.devices) for model in pool.models]
        products_s, values_s = (sum(parts[index] / devices for parts, devices in passes) for index in (0, 1))
        busy = products_s + values_s + (sampling if pool.samples else 0.0)
        busy += training if pool.trains and layout.overlaps else 0.0
        hidden = max(sampling, training) if layout.overlaps else sampling + (0.0 if pool.trains else others["score"])
        if busy - hidden > longest:
            longest, bound = busy - hidden, "operations" if products_s >= values_s else "memory bandwidth"
    return longest, bound


def _update(size: StepSize, layout: StepLayout, machine: Machine) -> tuple[float, str]:
    """Forward and backward passes of all epochs, communication, and the optimizer: the critic's, then the policy's."""
    bounds: dict[str, float] = {}
    for model in (*_critics(size, layout), OtherModel(size, layout.policy)):
        for bound, seconds in _model_update(model, layout.updates, layout.epochs, machine).items():
            bounds[bound] = bounds.get(bound, 0.0) + seconds
    return sum(bounds.values()), max(bounds, key=lambda name: bounds[name])


def _model_update(model: OtherModel, updates: int, epochs: int, machine: Machine) -> dict[str, float]:
    """Seconds of the updates of one model in a step, by what bounds them."""
    size, ranks, card = model.size, model.ranks, machine.card
    per_forward = 4 if ranks.checkpointing else 3
    products_s, values_s = _passes_s(size, machine, per_forward * epochs, TRAIN_SHARE)
    steps, held = updates * epochs, size.parameters / ranks.shard_devices
    state_s = steps * OPTIMIZER_BYTES * held / (MEMORY_SHARE * card.memory_gb_s * 1e9)
    return {
        "operations": products_s / ranks.devices,
        "links": steps * _exchange_s(size, ranks, machine),
        "memory bandwidth": state_s + values_s / ranks.devices,
        "host link": (steps * 24 + 4) * held / (HOST_GB_S * 1e9) if ranks.offload else 0.0,
    }


def _exchange_s(size: StepSize, ranks: RankLayout, machine: Machine) -> float:
    """Seconds of one update over the links: gradients are summed, and sharded weights are gathered.

    Ranks with whole weights sum whole gradients. The shards of a copy gather the weights forward and backward, and each
    keeps the sum of its part of the gradient (reduce-scatter); copies then sum that part. Micro-batches count as one:
    the exchanges of the others are assumed to overlap with computation.
    """
    shards = ranks.shard_devices
    within = (2 * size.bytes_per_weight + GRADIENT_BYTES) * size.parameters * (shards - 1) / shards
    copies = ranks.devices // shards
    among = 2 * GRADIENT_BYTES * size.parameters / shards * (copies - 1) / copies
    return within / _link_rate(shards, machine) + among / _link_rate(ranks.devices, machine)


def _link_rate(devices: int, machine: Machine) -> float:
    """Bytes per second that each of these neighbours reaches in a collective: those of the slowest link."""
    one_node = devices <= machine.gpus_per_node
    return LINK_SHARE * 1e9 * (machine.card.link_gb_s if one_node else NODE_GB_S)


def _hand_over(size: StepSize, layout: StepLayout, machine: Machine) -> tuple[float, str]:
    """Weight sync from the actor to every engine."""
    if layout.embedded:
        return 0.0, "-"
    gb, turns_s = size.bytes_per_weight * size.parameters / 1e9, SLEEP_S if layout.sleeps else 0.0
    if layout.weight_sync == "ipc":
        shards = layout.trainers // layout.copies if layout.sharded else 1
        gathering_s = gb * 1e9 * (shards - 1) / shards / _link_rate(shards, machine)
        copying_s = gb * IPC_PASSES / (MEMORY_SHARE * machine.card.memory_gb_s)
        return gathering_s + copying_s + turns_s, "links" if gathering_s > copying_s else "memory bandwidth"
    if layout.weight_sync == "tcp":
        return gb * max(1.0, layout.engines / 4) / TCP_GB_S + turns_s, "one process that sends"
    if layout.weight_sync == "nccl":
        return gb * (2 / PAGEABLE_GB_S + 1 / NODE_GB_S) + turns_s, "copies from and to host memory"
    if layout.weight_sync == "shm":
        shares = _largest_share(size, layout) + 1 / layout.tensor_parallel
        return gb * shares / PAGEABLE_GB_S + turns_s, "copies from and to host memory"
    return gb / DISK_WRITE_GB_S + gb / DISK_READ_GB_S + turns_s, "one process that writes"


def _largest_share(size: StepSize, layout: StepLayout) -> float:
    """The share of the weights that the slowest rank copies into shared memory. Ranks deal out the tensors of the whole
    model; if they shard it, those of a layer at a time, and then the embedding and the head. The routed experts of a
    layer are so many tensors that each rank gets an equal share of them."""
    if layout.merges:
        return 1.0
    dense, mixture = _layer_tensors(size, size.inner_size), _layer_tensors(size, size.shared_size)
    mixed = size.experts.layers if size.experts else 0
    routed = expert_parameters(size.parameters, size.hidden_size, size.experts)
    layers, table = [*[dense] * (size.layers - mixed), *[mixture] * mixed], size.hidden_size * size.vocabulary
    tables = [table] * max(1, round((size.parameters - routed - sum(map(sum, layers))) / table))
    parts = [*layers, tables] if layout.sharded else [[*chain.from_iterable(layers), *tables]]
    slowest = sum(_largest_load(part, layout.trainers) for part in parts) + routed / layout.trainers
    return slowest / (sum(map(sum, parts)) + routed)


def _layer_tensors(size: StepSize, inner_size: int) -> list[int]:
    """Numbers of each matrix of a layer whose feed-forward has that inner size."""
    query, kv, inner = (size.hidden_size * width for width in (size.query_size, size.kv_size, inner_size))
    return [query, query, kv, kv, inner, inner, inner]


def _largest_load(tensors: Iterable[int], ranks: int) -> int:
    """The most that a rank gets of tensors that are dealt out, the largest first, each to the one that has least."""
    loads = [0] * ranks
    for tensor in sorted(tensors, reverse=True):
        loads[loads.index(min(loads))] += tensor
    return max(loads)
