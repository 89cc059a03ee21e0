"""Refuses plans that exceed the memory of a machine, and names the settings that lower it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlcore.config import RunConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.workers import MemoryPlan
from rlcore.errors import PlanError
from rlcore.plan.activations import EAGER, EAGER_TYPES, masked_row
from rlcore.plan.machine_facts import Facts, in_gib
from rlcore.plan.memory import (
    CONTEXT_BYTES,
    REFERENCE,
    cached_bytes_per_token,
    device_bytes,
    embedded_needs,
    held_and_working_bytes,
    held_bytes,
    update_needs,
    working_bytes,
)

ACTOR_SETTINGS = ACTOR.name
"""The section of the actor's settings."""
SHARDS = "{settings}"
"""The place of settings in an error."""


class DeviceMemoryError(PlanError):
    """A device has too little memory for the plan."""

    def __init__(self, text: str, advice: str, settings: str = ACTOR_SETTINGS, trains: bool = True) -> None:
        """`advice`: the text with settings that shard the model at `SHARDS`, if there are such settings; `settings`:
        the section of the engine that is too large; `trains`: False for one that only scores."""
        super().__init__(text)
        self._advice, self.settings, self.trains = advice, settings, trains

    def advising(self, settings: str, step_s: float = 0.0) -> PlanError:
        """The error with settings that a plan is accepted with, and the estimate of its step, if there is one."""
        seconds = f"; with these shards a step takes about {step_s:,.0f} s" if step_s else ""
        return PlanError(self._advice.replace(SHARDS, settings) + seconds)


def check_memory(config: RunConfig, workers: Sequence[WorkerPlan], memory: Mapping[str, int], facts: Facts) -> None:
    """PlanError when the estimate exceeds the memory, naming the settings that lower it."""
    on_host: dict[str, int] = {}
    for plan in workers:
        request, size = plan.request, memory.get(plan.request.role.name, 0)
        if size and request.gpus:
            size = CONTEXT_BYTES + sum(held_and_working_bytes(plan, size, facts))
            _check_share(plan, size - CONTEXT_BYTES, facts)
        if request.gpus and facts.usable_gpu_bytes is not None and size > facts.usable_gpu_bytes:
            needs = f"role '{request.role.name}' needs about {in_gib(size)} GiB a rank, a device has"
            raise too_large(f"{needs} {facts.usable_gpu_text}", config, plan, workers, facts)
        if size and not request.gpus:
            on_host[request.role.name] = size * request.replicas * request.ranks
    total = sum(on_host.values())
    if facts.memory_bytes is not None and total > facts.memory_bytes:
        parts = ", ".join(f"{name} {in_gib(size)}" for name, size in on_host.items())
        largest = next(
            plan for plan in workers if plan.request.role.name == max(on_host, key=lambda name: on_host[name])
        )
        raise PlanError(
            f"memory: the run needs about {in_gib(total)} GiB ({parts}), the machine has {in_gib(facts.memory_bytes)}; "
            f"{_ways_to_fit(config, largest, workers, facts)}"
        )


def _check_share(plan: WorkerPlan, size: int, facts: Facts) -> None:
    """PlanError if a role reserves less of a device than its weights take."""
    request = plan.request
    reserved = int(request.device_frac * (facts.gpu_memory_bytes or 0))
    if 0 < reserved < size:
        found = (
            f"role '{request.role.name}' reserves {in_gib(reserved)} GiB of a device, and its weights take "
            f"{in_gib(size)} there; raise the share that {plan.cls.__qualname__} of {plan.provided_by} reserves, give "
            "a replica more devices"
        )
        raise DeviceMemoryError(f"{found}, or take a smaller model", f"{found} ({SHARDS}), or take a smaller model")


def memory_plans(
    config: RunConfig, workers: Sequence[WorkerPlan], memory: Mapping[str, int], facts: Facts
) -> dict[str, MemoryPlan]:
    """The estimate of each role, an embedded one with its host, and the settings that lower its memory."""
    plans = {}
    for plan in workers:
        request = plan.request
        found = memory.get((request.embedded_in or request.role).name)
        if found:
            generates = request.engine is None and request.cached_tokens > 0
            room = cached_room(config, plan, workers, facts)
            plans[request.role.name] = MemoryPlan(found, _ways_to_lower(config, plan, generates), room)
    return plans


def cached_room(config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts) -> int:
    """Tokens of keys and values that an embedded rollout may hold without exceeding the memory of its process: those of
    its rows, and as many as fit into what an update needs more than generation. 0 if they are unknown.

    On a device with other processes only the first: servers that are awake while it generates sleep during an update.
    """
    request, shape = plan.request, facts.model_of(plan.request).shape
    host = next((worker for worker in workers if worker.request.role == request.embedded_in), None)
    if host is None or shape is None:
        return 0
    on_device = [worker for worker in workers if worker.request.gpus and worker.request.embedded_in is None]
    shares = [worker for worker in on_device if worker.request.pool == host.request.pool]
    if not request.cached_tokens or len(shares) > 1:
        return request.cached_tokens
    generating = embedded_needs(config, host, workers, facts) or 0
    unused = max(0, update_needs(config, host, workers, facts) - generating)
    return request.cached_tokens + unused // cached_bytes_per_token(shape, config.actor.dtype)


def too_large(
    found: str, config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts
) -> DeviceMemoryError:
    """The error for a role that exceeds a device, with the settings that lower its memory."""
    where = plan.request.settings or plan.request.role.name
    alone, sharded = (f"{found}; {_ways_to_fit(config, plan, workers, facts, way)}" for way in ("", SHARDS))
    return DeviceMemoryError(alone, sharded, where, plan.request.trains)


def _ways_to_fit(
    config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts, sharding: str = ""
) -> str:
    """The settings that lower a role's memory; `sharding`: those with which it fits in shards."""
    request = plan.request
    served = [
        worker for worker in workers if worker.request.embedded_in == request.role and worker.request.cached_tokens
    ]
    needs = [working_bytes(config, worker, facts.model_of(worker.request)) for worker in (plan, *served)]
    generation, offload = max(needs) > needs[0], _fits_offloaded(config, plan, workers, facts)
    usable = facts.usable_gpu_bytes if request.gpus else None
    shorter = usable is None or CONTEXT_BYTES + held_bytes(plan, facts) <= usable
    shape = facts.model_of(request).shape
    masked = not generation and masked_row(config, shape, plan.shared_prefix) > 0
    sdpa = shape is None or shape.model_type not in EAGER_TYPES
    return _ways_to_lower(
        config, plan, generation, sharding, offload=offload, shorter=shorter, masked=masked, sdpa=sdpa
    )


def _fits_offloaded(config: RunConfig, plan: WorkerPlan, workers: Sequence[WorkerPlan], facts: Facts) -> bool:
    """True if a role would fit with `offload`, on the device next to roles of its pool that rest, and on the host."""
    request, engine, usable = plan.request, plan.request.engine, facts.usable_gpu_bytes
    trains = engine is not None and request.trains and not engine.offload and not engine.lora.enabled
    if engine is None or not trains or not request.gpus or usable is None:
        return False
    if facts.memory_bytes is not None and held_bytes(plan, facts) * request.ranks > facts.memory_bytes:
        return False
    other = replace(plan, request=replace(request, engine=replace(engine, offload=True)))
    near = [worker for worker in workers if worker is not plan and worker.request.pool == request.pool]
    resting = sum(
        CONTEXT_BYTES + (worker.request.asleep_bytes if worker.request.device_frac else held_bytes(worker, facts))
        for worker in near
        if worker.request.gpus and worker.request.embedded_in is None
    )
    return resting + device_bytes(config, other, workers, facts) <= usable


def _ways_to_lower(
    config: RunConfig,
    plan: WorkerPlan,
    generation: bool,
    sharding: str = "",
    *,
    offload: bool = False,
    shorter: bool = True,
    masked: bool = False,
    sdpa: bool = True,
) -> str:
    """The settings that lower the memory of generation or of an update, without those that are already set.

    `sharding`: those with which the role would fit in shards. `offload`: it would fit with offload. `shorter`: weights
    and optimizer state leave room for shorter sequences. `masked`: layers with a sliding window make masks. `sdpa`: the
    model is not known to need eager attention.
    """
    request = plan.request
    engine, where = request.engine, request.settings or request.role.name
    if engine is not None and not request.trains:
        ways = [f"set {where}.dtype=bfloat16"] if engine.dtype == "float32" else []
        ways += [f"shard it over devices ({sharding})"] if sharding else []
        return f"{', '.join([*ways, ''])}or take a smaller model" if ways else "take a smaller model"
    if generation:
        response = "eval" if _evaluates_longer(config) else "rollout"
        lower = ["rollout.max_rows", f"{response}.max_tokens", "data.max_prompt_tokens"]
    else:
        lower = ["data.max_prompt_tokens", "rollout.max_tokens"]
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        if engine is not None and engine.micro_batch_tokens > longest:
            lower = [f"{where}.micro_batch_tokens", *lower]
    ways = [f"lower {', '.join(lower[:-1])} or {lower[-1]}"] if shorter else []
    if engine is not None:
        helps = {
            "gradient_checkpointing=true": not generation and not engine.gradient_checkpointing,
            "lora.enabled=true": not engine.lora.enabled,
            "offload=true": offload,
            "sharding=fsdp2": not sharding and engine.data_parallel > 1 and engine.sharding == "none",
        }
        settings = [f"{where}.{remedy}" for remedy, does in helps.items() if does]
        ways += [f"set {' or '.join(settings)}"] if settings else []
        if config.model.attention == EAGER and not generation and shorter and sdpa:
            ways += ["set model.attention=sdpa, which keeps no scores, unless the model needs eager"]
        if masked and request.gpus and engine.is_half:
            ways += ["set model.attention=flash_attention_2, which makes no masks for windows (it takes flash-attn)"]
        ways += [f"shard it over devices ({sharding})"] if sharding else []
        if generation and engine.shard_ranks > 1:
            ways += [
                "choose a rollout.backend that is not embedded (ranks that sample hold all weights; with "
                f"rollout.replicas={engine.data_parallel} replicas share the actor's devices)"
            ]
    elif request.role.name == REFERENCE and sharding:  # another model than the actor, with its ranks and sharding
        ways += [f"shard it over devices ({sharding})"]
    return ", or ".join([", ".join(ways)] * bool(ways) + ["take a smaller model"])


def _evaluates_longer(config: RunConfig) -> bool:
    return bool(config.eval.sources) and config.eval.max_tokens > config.rollout.max_tokens
