"""Defaults of a machine: a table of keys for GPUs and one for CPUs, each key with its condition, value and reason.

A value that is set by a file, an override, the preset or a plugin is never changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlcore.config import RunConfig
from rlcore.config.checks import has_effect, lookup, walk
from rlcore.config.choices import AUTO, DEVICE, Choice
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.plan.activations import BYTES, EAGER, EAGER_TYPES, longest_row, masked_row, sized, update_bytes
from rlcore.plan.catalog import remedy, rollout_key
from rlcore.plan.machine_facts import GIB, Facts
from rlcore.plan.memory import (
    CONTEXT_BYTES,
    SAMPLED_LOGITS,
    cached_bytes_per_token,
    gathered_for_update,
    is_whole,
    training_bytes_per_parameter,
)
from rlcore.plan.mesh import copies_over_nodes, nodes_of_ranks, why_one_copy
from rlcore.plan.shared_device import (
    Fit,
    fit_replicas,
    needed_share,
    replica_devices,
    room_for_replicas,
    shares_device,
    trained_bytes,
    why_not_shared,
)
from rlcore.types import FrozenDict

MOST_TOKENS = 16384
"""Most tokens of a chosen micro-batch; matrix products of more tokens are not faster."""
TOKENS_STEP = 1024
"""A chosen micro-batch is a multiple of this number of tokens."""
ROWS = (256, 128)
"""Numbers of rows to decode at once, largest first."""
WORKING_SHARE = 0.5
"""Share of the memory left by weights and optimizer state that a chosen micro-batch may fill; the rest is for a
reference, a critic and fragmentation."""


@dataclass(frozen=True)
class Situation:
    """The facts that a default may depend on."""

    config: RunConfig
    """The configuration with the defaults of the rows above."""
    facts: Facts
    backend: str
    """The installed rollout backend for GPUs; empty if there is none."""
    is_set: frozenset[str]
    """The keys that are set by anything other than the sections' defaults."""


@dataclass(frozen=True)
class DeviceDefault:
    """A row of the table."""

    key: str
    when: Callable[[Situation], bool]
    """The condition, in addition to the table's device."""
    value: Callable[[Situation], Any]
    reason: Callable[[Situation], str]
    otherwise: Callable[[Situation], str] | None = None
    """Reason for keeping the section's default where the condition is false; empty if it is not worth a line."""


def _always(found: Situation) -> bool:
    return True


SHARE = rollout_key("device_share")
"""The key of the share of a device that replicas reserve."""

EAGER_ATTENTION = DeviceDefault(
    key="model.attention",
    when=lambda found: _model_type(found) in EAGER_TYPES,
    value=lambda found: EAGER,
    reason=lambda found: f"transformers has no sdpa for '{_model_type(found)}'",
)
"""The attention of models that transformers has no sdpa for, on every device."""

ON_CUDA = (
    EAGER_ATTENTION,
    DeviceDefault(
        key="actor.dtype",
        when=_always,
        value=lambda found: "bfloat16",
        reason=lambda found: (
            "tensor cores multiply it many times faster than float32; masters, optimizer state and sums stay float32"
        ),
    ),
    DeviceDefault(
        key="actor.tf32",
        when=lambda found: found.config.actor.dtype == "float32",
        value=lambda found: True,
        reason=lambda found: "float32 products on tensor cores, with 10 bits of mantissa; false computes all of them",
    ),
    DeviceDefault(
        key="actor.compile",
        when=lambda found: not found.facts.compile_problem,
        value=lambda found: True,
        reason=lambda found: "operations between two matrix products become one kernel; the first step takes longer",
        otherwise=lambda found: f"torch.compile has nothing to build kernels with: {found.facts.compile_problem}",
    ),
    DeviceDefault(
        key="actor.gradient_checkpointing",
        when=_always,
        value=lambda found: True,
        reason=lambda found: (
            "long responses fit: only the input of each layer is kept, and a third of the operations is repeated"
        ),
    ),
    DeviceDefault(
        key="actor.dp_replicate",
        when=lambda found: copies_over_nodes(found.config, found.facts) > 1,
        value=lambda found: copies_over_nodes(found.config, found.facts),
        reason=lambda found: (
            "each node holds a copy of the weights: layers are gathered within a node, and only gradients travel "
            "between nodes"
        ),
        otherwise=lambda found: _why_one_copy(found),
    ),
    DeviceDefault(
        key="actor.micro_batch_tokens",
        when=lambda found: _micro_batch_tokens(found) > found.config.actor.micro_batch_tokens,
        value=lambda found: _micro_batch_tokens(found),
        reason=lambda found: (
            f"fits into the {(found.facts.usable_gpu_bytes or 0) / GIB:.1f} GiB that are free on a device, next to "
            "weights and optimizer state"
        ),
    ),
    DeviceDefault(
        key="rollout.backend",
        when=lambda found: _takes_replicas(found) and (_has_devices_for_replicas(found) or _fit(found) is not None),
        value=lambda found: found.backend,
        reason=lambda found: _why_replicas(found),
        otherwise=lambda found: _why_embedded(found),
    ),
    DeviceDefault(
        key="actor.offload",
        when=lambda found: _offloads(found),
        value=lambda found: True,
        reason=lambda found: (
            f"weights and optimizer state take {_trained_gib(found):.1f} GiB of the device, which '{found.backend}' "
            "needs while it samples: they rest in host memory meanwhile"
        ),
    ),
    DeviceDefault(
        key=SHARE,
        when=lambda found: _shared_fit(found) is not None and _has_section(found),
        value=lambda found: _share(found),
        reason=lambda found: _why_share(found),
    ),
    DeviceDefault(
        key="rollout.max_rows",
        when=lambda found: _rows(found) > found.config.rollout.max_rows,
        value=lambda found: _rows(found),
        reason=lambda found: "decoding reads all weights for each token, be it of 64 rows or of 256",
    ),
)
"""Defaults where `cluster.device` is cuda. Each row sees the values of those above it."""
ON_CPU = (
    EAGER_ATTENTION,
    DeviceDefault(
        key="actor.dtype",
        when=lambda found: bool(found.facts.cpu_bfloat16) and _trains_and_samples(found.config),
        value=lambda found: "bfloat16",
        reason=lambda found: (
            f"this CPU multiplies it twice as fast as float32, or faster ({found.facts.cpu_bfloat16}); masters, "
            "optimizer state and sums stay float32"
        ),
    ),
)
"""Defaults where `cluster.device` is cpu."""


def device_choice(config: RunConfig, facts: Facts, origins: Mapping[str, str]) -> Choice:
    """The device of the run: cuda where `cluster.device=auto` finds a GPU that torch can use."""
    device = config.cluster.device
    if device != AUTO:
        return Choice(DEVICE, device, "", origins.get(DEVICE, "default"))
    if facts.gpu_problem or not facts.gpus:
        return Choice(DEVICE, "cpu", facts.gpu_problem or "this machine has no GPU")
    many = "a GPU" if facts.gpus == 1 else f"{facts.gpus} GPUs"
    return Choice(DEVICE, "cuda", f"this machine has {many}")


def choose_defaults(config: RunConfig, origins: Mapping[str, str], facts: Facts, backend: str) -> tuple[Choice, ...]:
    """The device and the result of each row of its table; `backend` as in `Situation`.

    `config` is without these choices. A row whose key is set names the value and where it is set.
    """
    device = device_choice(config, facts, origins)
    choices, on_cuda = [device], device.value == "cuda"
    is_set = frozenset(key for key, origin in origins.items() if origin != "default")
    found = Situation(_with(config, DEVICE, device.value), facts, backend, is_set)
    for row in ON_CUDA if on_cuda else ON_CPU:
        if row.key in is_set:
            if on_cuda or row.when(found):  # a CPU's row concerns no other CPU
                choices.append(Choice(row.key, lookup(config, row.key), "", origins[row.key]))
        elif row.when(found):
            value = row.value(found)
            choices.append(Choice(row.key, value, row.reason(found)))
            found = replace(found, config=_with(found.config, row.key, value))
        elif row.otherwise and (reason := row.otherwise(found)):
            choices.append(Choice(row.key, lookup(config, row.key), reason))
    return (*choices, *(_as_others(found) if on_cuda else ()))


def _as_others(found: Situation) -> list[Choice]:
    """The keys whose default on a GPU is another key's value (`option(on_cuda=...)`), where the two differ."""
    choices = []
    for entry in walk(found.config):
        other = entry.metadata.get("on_cuda", "")
        if not other or entry.key in found.is_set or not has_effect(found.config, entry):
            continue
        value = lookup(found.config, other)
        if value != entry.value:
            choices.append(Choice(entry.key, value, f"as {other}"))
    return choices


def _with(section: Any, key: str, value: Any) -> Any:
    """A copy of a section with another value at a dotted key."""
    name, _, rest = key.partition(".")
    if isinstance(section, Mapping):
        return FrozenDict({**section, name: _with(section[name], rest, value) if rest else value})
    return replace(section, **{name: _with(getattr(section, name), rest, value) if rest else value})


def _model_type(found: Situation) -> str:
    return found.facts.shape.model_type if found.facts.shape else ""


def _trains_and_samples(config: RunConfig) -> bool:
    """True if the actor is the core's, and samples itself."""
    return config.actor.backend == config.rollout.backend == RunConfig().actor.backend


def _why_one_copy(found: Situation) -> str:
    """Reason why ranks on several nodes shard one copy of the weights instead of one per node."""
    shared_out = found.config.actor.sharding != "none" and nodes_of_ranks(found.config) > 1
    return why_one_copy(found.config, found.facts) if shared_out else ""


def _takes_replicas(found: Situation) -> bool:
    """True if the run could sample outside its actor: the actor is the core's and its dtype allows it."""
    actor, default = found.config.actor, RunConfig().actor
    return bool(found.backend) and actor.backend == default.backend and actor.dtype != "float64"


def _has_devices_for_replicas(found: Situation) -> bool:
    """True if rollout replicas have devices apart from the actor's."""
    engines = found.config.rollout.replicas * replica_devices(found.config)
    return found.facts.gpus >= found.config.actor.data_parallel + engines


def _why_embedded(found: Situation) -> str:
    """Reason why the sampler is nevertheless embedded in the actor."""
    if not found.backend:
        return f"no engine for GPUs is enabled: {remedy('rollout.backend')}"
    if not _takes_replicas(found):
        actor = found.config.actor
        return f"'{found.backend}' does not sample for actor.backend={actor.backend}, actor.dtype={actor.dtype}"
    ranks, gpus = found.config.actor.data_parallel, found.facts.gpus
    needs = f"'{found.backend}' needs devices in addition to the actor's {ranks}; there are {gpus}"
    if not shares_device(found.config, found.facts):
        return f"{needs}: {why_not_shared(found.config, found.facts)}"
    if found.facts.usable_gpu_bytes is None:
        return f"{needs}: the memory of a device is unknown, so whether they can share is unknown"
    if found.facts.parameters is None or found.facts.shape is None:
        path = found.config.model.path
        return f"{needs}: the architecture of model.path='{path}' is unknown, so whether they can share is unknown"
    room = room_for_replicas(found.config, found.facts, offload=found.config.actor.offload)
    return (
        f"{needs}: it does not fit next to the {_trained_gib(found):.1f} GiB that are trained (it would have "
        f"{room:.0%} of the device, and needs {needed_share(found.config, found.facts):.0%})"
    )


def _why_replicas(found: Situation) -> str:
    """The reason for sampling with replicas, and their devices."""
    fit, shares = _fit(found), ""
    if shares_device(found.config, found.facts):
        shares = " next to the actor" if fit is not None and fit.awake else " on the actor's device, in turns with it"
    return (
        f"it is installed{', and fits' if shares else ''}{shares}; it pages its cache and samples many rows, each "
        "token of which takes the embedded sampler thousands of kernels"
    )


def _fit(found: Situation) -> Fit | None:
    """Plan of replicas that share the actor's device; None if they do not share it or do not fit."""
    config = found.config
    if not shares_device(config, found.facts):
        return None
    offload = config.actor.offload if "actor.offload" in found.is_set else None
    share = float(lookup(config, SHARE)) if SHARE in found.is_set else None
    chosen = "rollout.backend" in found.is_set
    return fit_replicas(config, found.facts, rows=_most_rows(found), offload=offload, share=share, is_chosen=chosen)


def _most_rows(found: Situation) -> int:
    """Rows that replicas decode at a time."""
    rows = found.config.rollout.max_rows
    return rows if "rollout.max_rows" in found.is_set else max(rows, ROWS[0])


def _shared_fit(found: Situation) -> Fit | None:
    """`_fit` for a run that samples on this backend."""
    return _fit(found) if found.backend and found.config.rollout.backend == found.backend else None


def _offloads(found: Situation) -> bool:
    fit = _shared_fit(found)
    return fit is not None and fit.offload


def _share(found: Situation) -> float:
    fit = _shared_fit(found)
    return 0.0 if fit is None else fit.share


def _why_share(found: Situation) -> str:
    fit = _shared_fit(found)
    if fit is not None and fit.awake:
        rows = f"{_most_rows(found)} rows at their longest"
        return f"'{found.backend}' has room for {rows}, and stays awake while the actor trains"
    return f"'{found.backend}' gets the part of the actor's device that weights at rest leave free while it samples"


def _has_section(found: Situation) -> bool:
    """True if the plugin of the backend is enabled, so its settings exist."""
    return SHARE.split(".")[1] in found.config.plugins


def _trained_gib(found: Situation) -> float:
    return trained_bytes(found.config, found.facts) / GIB


def _micro_batch_tokens(found: Situation) -> int:
    """Tokens of a micro-batch that fit into the free memory of a device; 0 if that or the model is unknown."""
    facts, engine, size = found.facts, found.config.actor, found.facts.usable_gpu_bytes
    if size is None or facts.parameters is None or facts.shape is None:
        return 0
    shape = facts.shape
    held = CONTEXT_BYTES + training_bytes_per_parameter(engine) * facts.parameters
    held += gathered_for_update(engine, ModelFacts(facts.parameters, shape))
    room = WORKING_SHARE * (size - held)
    budgets = range(MOST_TOKENS, 0, -TOKENS_STEP)
    sizes = (sized(found.config, budget, longest_row(found.config)) for budget in budgets)
    masked = masked_row(found.config, shape)
    fitting = (size.tokens for size in sizes if update_bytes(shape, engine, size, "cuda", masked) <= room)
    return next(fitting, 0)


def _rows(found: Situation) -> int:
    """Rows to decode at once. The embedded sampler gets fewer if their keys and values, at maximum length, do not fit
    next to the optimizer state. Replicas page theirs."""
    config, facts, size = found.config, found.facts, found.facts.usable_gpu_bytes
    embedded = config.rollout.backend == config.actor.backend
    if not embedded or size is None or facts.parameters is None or facts.shape is None:
        return ROWS[0]
    held = training_bytes_per_parameter(config.actor) + (0 if is_whole(config.actor) else BYTES[config.actor.dtype])
    room = size - CONTEXT_BYTES - held * facts.parameters
    return next((rows for rows in ROWS if _sampled_bytes(config, facts.shape, rows) <= room), 0)


def _sampled_bytes(config: RunConfig, shape: ModelShape, rows: int) -> int:
    """Bytes of keys, values and logits of these rows; a group stores its prompt once."""
    prompts = rows // config.rollout.samples_per_prompt + 2
    tokens = rows * config.rollout.max_tokens + prompts * config.data.max_prompt_tokens
    cached = tokens * cached_bytes_per_token(shape, config.actor.dtype)
    return cached + SAMPLED_LOGITS * rows * shape.vocabulary * BYTES["float32"]
