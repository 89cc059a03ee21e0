"""Plans a run for another machine: memory by phase, seconds per step, and the settings that would help most."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlcore.config import RunConfig
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.requests import ModelShape
from rlcore.errors import ConfigError, PlanError
from rlcore.plan.activations import BYTES
from rlcore.plan.colocation import ACTOR, ROLLOUT
from rlcore.plan.device_memory import DeviceRoles, devices_of_ranks, memory_by_phase
from rlcore.plan.faster_layouts import OTHER_SYNCS, WORTH, FasterLayout, LayoutSearch
from rlcore.plan.machine_cards import Machine, machine_like
from rlcore.plan.machine_facts import Facts
from rlcore.plan.machine_times import (
    OtherModel,
    RankLayout,
    RewardPool,
    StepEstimate,
    StepLayout,
    StepSize,
    estimate_step,
)
from rlcore.plan.memory import REFERENCE, cached_bytes_per_token
from rlcore.plan.run_plan import RunPlan
from rlcore.plan.sharded_memory import host_bytes
from rlcore.plan.shared_device import (
    PROFILE_BYTES,
    WEIGHTS_FACTOR,
    without_graphs,
)

NUM_SETTINGS = 3
MAX_PLANS = 8
"""Number of plans for one kind of setting; each takes 20 to 70 ms on a slow core."""


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


def own_machine(plan: RunPlan) -> Machine | None:
    """The machine that a plan for its own devices runs on; None unless its step can be estimated.

    The devices have to be those of the workers, and cards whose figures are known; the model's architecture, too.
    """
    facts = plan.facts
    is_workers = facts.of_workers or not plan.cluster.abilities.elsewhere
    known = facts.card and facts.shape is not None and facts.parameters is not None
    return machine_like(facts) if plan.config.cluster.device == "cuda" and is_workers and known else None


def step_size(plan: RunPlan, lengths: Lengths) -> StepSize:
    """The work of a step of a plan."""
    way = next(worker.shared_prefix for worker in plan.workers if worker.request.role.name == ACTOR)
    return size_of(plan.config, plan.facts, lengths, shares_prompts=way != "none")


def size_of(config: RunConfig, facts: Facts, lengths: Lengths, *, shares_prompts: bool = True) -> StepSize:
    """The work of a step; PlanError if it uses no GPU or the model's architecture is unknown."""
    shape = facts.shape
    if config.cluster.device != "cuda":
        raise PlanError("--on: the plan uses no GPU, cluster.device=cpu; needs cluster.device=auto or cuda")
    if shape is None or facts.parameters is None:
        raise PlanError(
            f"--on: the architecture of model.path='{config.model.path}' is unknown; needs its config.json in that "
            "directory or in the cache of the hub"
        )
    return StepSize(
        **_figures(facts.parameters, shape),
        groups=config.train.prompts_per_step,
        samples=config.rollout.samples_per_prompt,
        prompt=lengths.prompt or max(1, config.data.max_prompt_tokens // 2),
        response=lengths.response or max(1, config.rollout.max_tokens // 2),
        longest=config.rollout.max_tokens,
        bytes_per_weight=BYTES[config.actor.dtype],
        shares_prompts=shares_prompts,
    )


def _figures(parameters: int, shape: ModelShape) -> dict[str, Any]:
    """The figures of a model in a `StepSize`."""
    return {
        "parameters": parameters,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "query_size": shape.query_size or shape.hidden_size,
        "kv_size": shape.kv_size,
        "cached_size": shape.cached_size,
        "inner_size": shape.inner_size,
        "vocabulary": shape.vocabulary,
        "experts": shape.experts,
    }


def _size_of_model(worker: WorkerPlan, size: StepSize) -> StepSize:
    """The step with the figures of a worker's model: the policy's as far as its own are unknown."""
    engine, model = worker.request.engine, worker.request.model
    known = {} if model is None or not (model.parameters and model.shape) else _figures(model.parameters, model.shape)
    return replace(
        size,
        **known,
        bytes_per_weight=BYTES[engine.dtype] if engine else size.bytes_per_weight,
        shares_prompts=worker.shared_prefix != "none",
    )


def _reference(plan: RunPlan, size: StepSize) -> StepSize | None:
    """The step in the figures of a reference that is another model."""
    found = (worker for worker in plan.workers if worker.request.role.name == REFERENCE and worker.request.model)
    return next((_size_of_model(worker, size) for worker in found), None)


def _critic(plan: RunPlan, size: StepSize) -> OtherModel | None:
    """The critic with the ranks that train it; None if the actor's processes do."""
    for worker in plan.workers:
        request, engine = worker.request, worker.request.engine
        if worker.asked_by.startswith("critic ") and request.trains and engine and request.embedded_in is None:
            ranks = RankLayout(
                request.ranks,
                engine.sharding != "none" and request.ranks > 1,
                engine.dp_replicate,
                engine.gradient_checkpointing,
                engine.offload,
            )
            # Its head has one output per token.
            return OtherModel(replace(_size_of_model(worker, size), vocabulary=1), ranks)
    return None


def _rewards(plan: RunPlan, size: StepSize) -> tuple[RewardPool, ...]:
    """The reward models whose architecture is known and that have devices, by pool."""
    pools, by_role = {pool.name: pool for pool in plan.pools}, {plan.request.role.name: plan for plan in plan.workers}
    actor, rollout = by_role[ACTOR], by_role[ROLLOUT]
    training = set(devices_of_ranks(actor, pools[actor.request.pool]))
    sampling = training
    if rollout.request.embedded_in is None:
        sampling = set(devices_of_ranks(rollout, pools[rollout.request.pool]))
    found: dict[str, list[OtherModel]] = {}
    used: dict[str, set[int]] = {}
    for worker in plan.workers:
        request, engine, model = worker.request, worker.request.engine, worker.request.model
        known = model is not None and model.parameters and model.shape
        if worker.asked_by.startswith("reward ") and request.gpus and engine is not None and known:
            devices = set(devices_of_ranks(worker, pools[request.pool]))
            # Rows arrive one by one, so no prompt is shared; the head has a few outputs.
            figures = replace(_size_of_model(worker, size), vocabulary=1, shares_prompts=False)
            found.setdefault(request.pool, []).append(OtherModel(figures, RankLayout(len(devices))))
            used.setdefault(request.pool, set()).update(devices)
    return tuple(
        RewardPool(tuple(models), bool(used[pool] & sampling), bool(used[pool] & training))
        for pool, models in found.items()
    )


def step_layout(plan: RunPlan, lengths: Lengths) -> StepLayout:
    """The devices that compute it."""
    config, requests = plan.config, {worker.request.role.name: worker.request for worker in plan.workers}
    actor, rollout, size = requests[ACTOR], requests[ROLLOUT], step_size(plan, lengths)
    embedded, reference = rollout.embedded_in is not None, _reference(plan, size)
    tensor_parallel = 1 if embedded else max(1, int(rollout.gpus)) * rollout.ranks
    return StepLayout(
        trainers=actor.ranks,
        engines=actor.ranks if embedded else rollout.replicas,
        tensor_parallel=tensor_parallel,
        engine_nodes=1 if embedded else rollout.ranks,
        max_rows=config.rollout.max_rows,
        cached_rows=_cached_rows(plan, size, rollout.device_frac, tensor_parallel),
        embedded=embedded,
        graphs=not without_graphs(config),
        sleeps=ROLLOUT in plan.colocated_roles,
        checkpointing=config.actor.gradient_checkpointing,
        offload=config.actor.offload,
        sharded=config.actor.sharding != "none" and actor.ranks > 1,
        copies=config.actor.dp_replicate if config.actor.sharding != "none" else 1,
        scoring_passes=sum(name != "values" for name in plan.schedule.passes) - int(reference is not None),
        reference=reference,
        critic="values" in plan.schedule.passes,
        critic_model=_critic(plan, size),
        rewards=_rewards(plan, size),
        updates=plan.batch_sizes["minibatches"],
        epochs=config.actor.epochs,
        weight_sync=plan.weight_sync,
        merges=config.actor.lora.enabled,
        overlaps=plan.schedule.max_staleness > 0 and ROLLOUT not in plan.colocated_roles and not embedded,
    )


def memory_of_phases(plan: RunPlan) -> dict[str, dict[str, int]]:
    """Bytes on the fullest device of each pool in each phase, where they are known: the numbers that the plan was
    checked with."""
    sizes = plan.memory_bytes, plan.facts
    return memory_by_phase(DeviceRoles(plan.config, plan.pools, plan.workers, plan.colocated_roles, *sizes))


def host_memory(plan: RunPlan) -> dict[str, dict[str, int]]:
    """Bytes of host memory of all ranks of each role that trains, by purpose, where they are known."""
    found = {worker.request.role.name: host_bytes(plan, worker) for worker in plan.workers}
    return {role: sizes for role, sizes in found.items() if sizes}


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
    """The best setting of each kind, by the time that it saves per step.

    Each is the result of a plan that was accepted, with these overrides and nothing else.
    """
    best: list[Setting] = []
    for kind in _candidates(plan, machine, lengths, step_s):
        setting = _best(kind, lambda overrides: _step_s(replan, overrides, machine, lengths))
        if setting and setting.step_s < (1 - WORTH) * step_s:
            best.append(setting)
    return sorted(best, key=lambda setting: setting.step_s)[:NUM_SETTINGS]


def _best(kind: Sequence[FasterLayout], seconds: Callable[[Sequence[str]], float]) -> Setting | None:
    """The fastest of the layouts that are accepted, with the fewest overrides of those that are about as fast; None if
    there are none.

    Layouts come with the least time first, so one that cannot be faster than an accepted one ends the search.
    """
    found, left = list[Setting](), MAX_PLANS
    for layout in kind:
        if found and layout.least_s >= min(setting.step_s for setting in found):
            break
        for way in layout.ways[:left]:
            left -= 1
            setting = Setting(way, seconds(way))
            if setting.step_s:
                found.append(setting)
                break
    least = min((setting.step_s for setting in found), default=0.0)
    alike = [setting for setting in found if (1 - WORTH) * setting.step_s <= least]
    return min(alike, key=lambda setting: (len(setting.overrides), setting.step_s), default=None)


def _candidates(plan: RunPlan, machine: Machine, lengths: Lengths, step_s: float) -> Iterator[list[FasterLayout]]:
    """Overrides by kind. Apart from the schedule, none of them changes what is learned.

    None is the opposite of what the plan chose because something did not fit: `actor.offload`, which makes room for
    engines, and the rows of the embedded sampler.
    """
    config, is_set = plan.config, {choice.key for choice in plan.choices if choice.set_by}
    search = LayoutSearch(plan, step_size(plan, lengths), step_layout(plan, lengths), machine)
    yield search.faster(step_s)
    if config.rollout.backend != config.actor.backend or "rollout.max_rows" in is_set:
        yield _each(*(f"rollout.max_rows={config.rollout.max_rows * factor}" for factor in (2, 4)))
    if config.actor.gradient_checkpointing:
        yield _each("actor.gradient_checkpointing=false")
    if config.actor.offload and "actor.offload" in is_set:
        yield _each("actor.offload=false")
    yield _each(*(f"rollout.weight_sync={way}" for way in OTHER_SYNCS if way != plan.weight_sync))
    if not config.schedule.max_staleness:
        yield search.faster(step_s, stale=True)


def _each(*overrides: str) -> list[FasterLayout]:
    """Each of these overrides alone; nothing is known about its time."""
    return [FasterLayout(((override,),), 0.0) for override in overrides]


def _step_s(
    replan: Callable[[Sequence[str]], RunPlan], overrides: Sequence[str], machine: Machine, lengths: Lengths
) -> float:
    """Seconds of a step with further overrides; 0 if they cannot be planned."""
    try:
        plan = replan(overrides)
        return estimate_step(step_size(plan, lengths), step_layout(plan, lengths), machine).total
    except (ConfigError, PlanError):
        return 0.0
