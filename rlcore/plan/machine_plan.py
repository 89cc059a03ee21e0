"""Plans a run for another machine: memory by phase, seconds per step, and the settings that would help most."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlcore.contracts.clusters import WorkerPlan
from rlcore.errors import ConfigError, PlanError
from rlcore.plan.activations import BYTES, forward_bytes
from rlcore.plan.colocation import ACTOR, ROLLOUT, bytes_of, devices_of_ranks, resting_bytes, serves
from rlcore.plan.gathered import gathered_bytes, largest_unit
from rlcore.plan.machine_cards import Machine
from rlcore.plan.machine_times import StepEstimate, StepLayout, StepSize, estimate_step
from rlcore.plan.memory import CONTEXT_BYTES, is_whole, working_bytes
from rlcore.plan.run_plan import RunPlan
from rlcore.plan.sharded_memory import host_bytes, sharded_bytes
from rlcore.plan.shared_device import PROFILE_BYTES, WEIGHTS_FACTOR, cached_bytes_per_token

PHASES = ("start", "sample", "score", "update", "hand-over", "save")
WORTH = 0.01
"""Minimum share of a step that a setting has to save to be listed."""
NUM_SETTINGS = 3


@dataclass(frozen=True)
class Lengths:
    """Average tokens of a prompt and of a response, which no configuration states; 0: half of the limit."""

    prompt: int = 0
    response: int = 0


@dataclass(frozen=True)
class Setting:
    """Values that would shorten a step."""

    overrides: tuple[str, ...]
    step_s: float


@dataclass(frozen=True)
class MachinePlan:
    """A run on a machine."""

    machine: Machine
    size: StepSize
    layout: StepLayout
    times: StepEstimate
    memory: Mapping[str, Mapping[str, int]]
    """Bytes on the fullest device of each pool, by pool and phase."""
    host: Mapping[str, Mapping[str, int]]
    """Host memory in bytes of all training ranks, by role and purpose."""
    settings: tuple[Setting, ...]
    """The settings that would help most, best first."""


def plan_on(
    replan: Callable[[Sequence[str]], RunPlan], machine: Machine, lengths: Lengths
) -> tuple[RunPlan, MachinePlan]:
    """The plan of a run and its estimates; `replan` makes the plan with further overrides.

    PlanError if the plan uses no GPU or the model's architecture is unknown.
    """
    plan = replan(())
    size, layout = step_size(plan, lengths), step_layout(plan, lengths)
    times = estimate_step(size, layout, machine)
    settings = tuple(_settings(replan, plan, machine, lengths, times.total))
    return plan, MachinePlan(machine, size, layout, times, memory_of_phases(plan), host_memory(plan), settings)


def step_size(plan: RunPlan, lengths: Lengths) -> StepSize:
    """The work of a step."""
    config, shape = plan.config, plan.facts.shape
    if config.cluster.device != "cuda":
        raise PlanError("--on: the plan uses no GPU, cluster.device=cpu; needs cluster.device=auto or cuda")
    if shape is None or plan.facts.parameters is None:
        raise PlanError(
            f"--on: the architecture of model.path='{config.model.path}' is unknown; needs its config.json in that "
            "directory or in the cache of the hub"
        )
    way = next(worker.shared_prefix for worker in plan.workers if worker.request.role.name == ACTOR)
    return StepSize(
        parameters=plan.facts.parameters,
        layers=shape.layers,
        hidden_size=shape.hidden_size,
        query_size=shape.query_size or shape.hidden_size,
        kv_size=shape.kv_size,
        groups=config.train.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        prompt=lengths.prompt or max(1, config.data.max_prompt_tokens // 2),
        response=lengths.response or max(1, config.rollout.max_tokens // 2),
        longest=config.rollout.max_tokens,
        inner_size=shape.inner_size,
        vocabulary=shape.vocabulary,
        bytes_per_weight=BYTES[config.actor.dtype],
        shares_prompts=way != "none",
    )


def step_layout(plan: RunPlan, lengths: Lengths) -> StepLayout:
    """The devices that compute it."""
    config, requests = plan.config, {worker.request.role.name: worker.request for worker in plan.workers}
    actor, rollout, size = requests[ACTOR], requests[ROLLOUT], step_size(plan, lengths)
    embedded = rollout.embedded_in is not None
    tensor_parallel = 1 if embedded else max(1, int(rollout.gpus))
    return StepLayout(
        trainers=actor.ranks,
        engines=actor.ranks if embedded else rollout.replicas,
        tensor_parallel=tensor_parallel,
        max_rows=config.rollout.max_rows,
        cached_rows=_cached_rows(plan, size, rollout.device_frac, tensor_parallel),
        embedded=embedded,
        sleeps=ROLLOUT in plan.colocated_roles,
        checkpointing=config.actor.gradient_checkpointing,
        offload=config.actor.offload,
        sharded=config.actor.sharding != "none" and actor.ranks > 1,
        scoring_passes=sum(name != "values" for name in plan.schedule.passes),
        critic="values" in plan.schedule.passes,
        updates=plan.batch_sizes["minibatches"],
        epochs=config.actor.epochs,
        weight_sync=config.rollout.weight_sync,
        overlaps=plan.schedule.max_staleness > 0 and ROLLOUT not in plan.colocated_roles and not embedded,
    )


def memory_of_phases(plan: RunPlan) -> dict[str, dict[str, int]]:
    """Bytes on the fullest device of each pool in each phase, where they are known."""
    by_name = {pool.name: pool for pool in plan.pools}
    devices: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for worker in plan.workers:
        if worker.request.embedded_in is None and worker.request.gpus:
            phases = _of_worker(plan, worker)
            for gpu in devices_of_ranks(worker, by_name[worker.request.pool]):
                for phase, entry in phases.items():
                    devices.setdefault(gpu, {}).setdefault(phase, []).append(entry)
    totals = {
        gpu: {phase: (_in_turn if phase == "start" else _together)(entries) for phase, entries in phases.items()}
        for gpu, phases in devices.items()
    }
    return {
        pool.name: {phase: max(totals[gpu][phase] for gpu in pool.gpus if gpu in totals) for phase in PHASES}
        for pool in plan.pools
        if any(gpu in totals for gpu in pool.gpus)
    }


def _together(entries: Sequence[tuple[int, int]]) -> int:
    """Bytes of roles of which one at a time works."""
    return sum(held for held, _ in entries) + max(work for _, work in entries)


def _in_turn(entries: Sequence[tuple[int, int]]) -> int:
    """The most bytes while roles start one after another, in the order of the plan: those before hold what stays."""
    return max(sum(held for held, _ in entries[: place + 1]) + work for place, (_, work) in enumerate(entries))


def host_memory(plan: RunPlan) -> dict[str, dict[str, int]]:
    """Bytes of host memory of all ranks of each role that trains on GPUs, by purpose, where they are known."""
    found = {worker.request.role.name: host_bytes(plan, worker) for worker in plan.workers}
    return {role: sizes for role, sizes in found.items() if sizes}


def _of_worker(plan: RunPlan, worker: WorkerPlan) -> dict[str, tuple[int, int]]:
    """(resident bytes of a rank with its CUDA context, further bytes while it works) in each phase."""
    request, facts = worker.request, plan.facts
    held, working = bytes_of(worker, plan.memory_bytes, facts, facts.gpu_memory_bytes or 0)
    if serves(worker):
        asleep = request.asleep_bytes if request.role.name in plan.colocated_roles else held
        weights = BYTES[plan.config.actor.dtype] * (facts.model_of(request).parameters or 0)
        loading = min(held, asleep + int(weights / max(1.0, request.gpus))) if request.role.name == ROLLOUT else asleep
        found = {"start": (held, 0), "sample": (held, 0), "score": (asleep, 0), "update": (asleep, 0)}
        found["hand-over"] = (loading if request.role.name in plan.colocated_roles else held, 0)
        found["save"] = (held, 0)  # servers are awake then
    else:
        found = _of_trainer(plan, worker, held, working)
    return {phase: (CONTEXT_BYTES + kept, work) for phase, (kept, work) in found.items()}


def _of_trainer(plan: RunPlan, worker: WorkerPlan, held: int, working: int) -> dict[str, tuple[int, int]]:
    """`_of_worker` without the CUDA context, for a role that computes in the passes and updates of a step."""
    config, facts, engine, model = plan.config, plan.facts, worker.request.engine, plan.facts.model_of(worker.request)
    if engine is None:
        return dict.fromkeys(PHASES, (held, 0)) | {"score": (held, working)}
    served = any(serves(other) and other.request.gpus for other in plan.workers)
    resting = resting_bytes(worker, plan.workers, held, facts)
    sampled = [other for other in plan.workers if other.request.embedded_in == worker.request.role]
    sampling = max([0, *(working_bytes(config, other, facts.model_of(other.request)) for other in sampled)])
    scoring = forward_bytes(config, engine, worker.shared_prefix, model.shape)
    gathered = unit = 0
    if not is_whole(engine):
        whole = BYTES[engine.dtype] * (model.parameters or 0)  # ranks that sample hold all weights between updates
        gathered = whole if sampled else gathered_bytes(engine, model, backward=False)
        unit = whole if sampled else largest_unit(engine, model)
    kept = resting if served else held
    found = {
        "start": (kept, held - kept),
        "sample": (resting, sampling),
        "score": (held, min(working, gathered + scoring)),
        "update": (held, working),
        "hand-over": (resting, unit),  # an unsharded model is read where it rests
        "save": (resting, unit),
    }
    if not is_whole(engine):
        parts = sharded_bytes(engine, model)
        returned = parts["hand-over"] - parts["sample"] - largest_unit(engine, model)  # offloaded shards come back
        found |= {"start": (resting, max(0, parts["start"] - resting)), "score": (parts["sample"], gathered + scoring)}
        found |= dict.fromkeys(("hand-over", "save"), (parts["sample"], returned + unit))
    return found


def _cached_rows(plan: RunPlan, size: StepSize, share: float, tensor_parallel: int) -> int:
    """Rows whose keys and values fit into an engine's memory; effectively unlimited if it reserves no share."""
    shape = plan.facts.shape
    if not share or shape is None:
        return 10**9
    dtype = plan.config.actor.dtype
    weights = WEIGHTS_FACTOR * BYTES[dtype] * size.parameters / tensor_parallel
    room = share * (plan.facts.gpu_memory_bytes or 0) - weights - PROFILE_BYTES
    return max(1, int(room * tensor_parallel / (_row_tokens(size) * cached_bytes_per_token(shape, dtype))))


def _row_tokens(size: StepSize) -> float:
    """Average tokens of a row during sampling."""
    return size.prompt + size.response / 2


def _settings(
    replan: Callable[[Sequence[str]], RunPlan], plan: RunPlan, machine: Machine, lengths: Lengths, step_s: float
) -> list[Setting]:
    """The best setting of each kind, by the time that it saves per step."""
    best: list[Setting] = []
    for kind in _candidates(plan, machine):
        found = [Setting(overrides, _step_s(replan, overrides, machine, lengths)) for overrides in kind]
        shorter = [setting for setting in found if 0 < setting.step_s < (1 - WORTH) * step_s]
        if shorter:
            best.append(min(shorter, key=lambda setting: setting.step_s))
    return sorted(best, key=lambda setting: setting.step_s)[:NUM_SETTINGS]


def _candidates(plan: RunPlan, machine: Machine) -> Iterator[list[tuple[str, ...]]]:
    """Overrides by kind. Apart from the schedule, none of them changes what is learned."""
    config, gpus = plan.config, machine.gpus
    counts = sorted({gpus, gpus // 2, 3 * gpus // 4} - {0}, reverse=True)
    layouts = [
        (f"actor.data_parallel={trainers}", f"rollout.replicas={engines}", *sharding)
        for trainers in counts
        for engines in {trainers, gpus - trainers} - {0}
        for sharding in ((), ("actor.sharding=fsdp2",))
        if trainers > 1 or not sharding
    ]
    yield layouts
    yield [(f"rollout.max_rows={config.rollout.max_rows * factor}",) for factor in (2, 4)]
    if config.actor.gradient_checkpointing:
        yield [("actor.gradient_checkpointing=false",)]
    if config.actor.offload:
        yield [("actor.offload=false",)]
    yield [(f"rollout.weight_sync={way}",) for way in ("tcp", "nccl") if way != config.rollout.weight_sync]
    if not config.schedule.max_staleness:
        fitting = [overrides for overrides in layouts if _num_devices(overrides) <= gpus]
        yield [(*overrides, "schedule.max_staleness=1") for overrides in ((), *fitting)]


def _num_devices(overrides: Sequence[str]) -> int:
    """Overrides for ranks and replicas, in separate pools."""
    return sum(int(override.partition("=")[2]) for override in overrides[:2])


def _step_s(
    replan: Callable[[Sequence[str]], RunPlan], overrides: Sequence[str], machine: Machine, lengths: Lengths
) -> float:
    """Seconds of a step with further overrides; 0 if they cannot be planned."""
    try:
        plan = replan(overrides)
        return estimate_step(step_size(plan, lengths), step_layout(plan, lengths), machine).total
    except (ConfigError, PlanError):
        return 0.0
