"""Starts exactly what a plan says, and closes what it started, also after a crash."""

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rlcore.cluster.child import ChildProcesses
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.clusters import Cluster, Deadlines, WorkerPlan
from rlcore.contracts.components import BuildContext
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.offers import Algorithm, Need
from rlcore.contracts.reference import REFERENCE, ReferenceWorker
from rlcore.contracts.requests import Role
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.rollout import ROLLOUT, Generator, RolloutWorker
from rlcore.contracts.tokens import Tokens
from rlcore.contracts.workers import WorkerGroup
from rlcore.data.tokenizer import load_tokens
from rlcore.engines.freed_memory import keep_freed_memory
from rlcore.errors import CALLED, PlanError, PluginError, WorkerError, boundary, shown
from rlcore.errors.checks.interfaces import check_product
from rlcore.plan import CORE, ComponentPlan, RunPlan
from rlcore.plan.time_limit import limited, where_in
from rlcore.runtime.checked_components import CheckedAgent, CheckedCritic, CheckedRewards
from rlcore.runtime.colocation import DeviceLease
from rlcore.runtime.hang_watch import HangWatch
from rlcore.runtime.offering_plugin import naming_offers
from rlcore.runtime.rollout_service import RolloutService
from rlcore.runtime.utilization import BusyMeter, roles_by_pool
from rlcore.runtime.weight_sync import WeightsSync
from rlcore.types import Metrics

if TYPE_CHECKING:
    from rlcore.algo.probe import Probed


Groups = Mapping[str, WorkerGroup[Any]]


SLOT_INTERFACES: Mapping[str, type[Any]] = {"agent": AgentLoop, "reward": RewardManager, "critic": CriticEngine}
"""In the order in which components start."""


CLOSE_S = 10.0
"""Seconds for a component's close() where nothing cuts the run short: children may end slowly on a busy machine."""


class _LifeCycle(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


class MetricsSink:
    """Collects what components record during a step; a name recorded several times is averaged."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def record(self, name: str, value: float) -> None:
        """One value of the current step."""
        self._values.setdefault(name, []).append(float(value))

    def take(self) -> Metrics:
        """The means, after which the next step begins."""
        taken, self._values = self._values, {}
        return {name: sum(values) / len(values) for name, values in taken.items()}


@dataclass(frozen=True, eq=False)
class Runtime:
    """A live run: what the plan named, started."""

    plan: RunPlan
    run_dir: Path
    tokens: Tokens
    actor: WorkerGroup[ActorWorker]
    reference: WorkerGroup[ReferenceWorker] | None
    """None without a KL term."""
    generator: Generator
    agent: AgentLoop
    reward: RewardManager
    critic: CriticEngine
    lease: DeviceLease
    """The lease of the devices that several roles share."""
    utilization: BusyMeter
    advantage: Callable[..., Any]
    """The advantage estimator."""
    advantage_algorithm: Algorithm
    """The estimator's declaration."""
    selection: Callable[..., Any] | None = None
    """The selection that the policy loss names: `rlcore.algo.covariance`; None for one that has none."""
    sink: MetricsSink = field(default_factory=MetricsSink)
    weights: WeightsSync | None = None
    """None where the rollout samples from the actor's own weights."""
    context_length: int | None = None
    """Tokens of a prompt and its response together, at most, as the rollout says; None when it does not."""
    vocabulary: int | None = None
    """Token ids are below it; None when neither the actor nor its model's configuration says."""

    async def sync_weights(self, version: int) -> None:
        """Rollout replicas sample with the actor's weights, published as `version`, when this returns.

        Servers that share the actor's devices sleep until then: gathered weights and a cache of keys and values are
        never there at the same time.
        """
        await self.lease.train()
        if self.weights is not None:
            began = time.monotonic()
            await self.weights.publish(version)
            self.sink.record("time/weights_s", time.monotonic() - began)
        await self.lease.serve()

    def take_metrics(self, beside: Collection[str] = ()) -> Metrics:
        """Metrics that components recorded or counted since the last call.

        PluginError for a name that is 'step' or one of `beside`, the core's own metrics of the step.
        """
        taken = self.sink.take() | self.utilization.take()
        _check_free("BuildContext.metrics()", taken, beside)
        for slot, component in (("agent", self.agent), ("reward", self.reward), ("critic", self.critic)):
            found = component.metrics()
            _check_free(f"{owner_of(self.plan.components[slot])}: metrics()", found, beside)
            taken |= found
        return taken


def _check_free(who: str, found: Metrics, beside: Collection[str]) -> None:
    """PluginError for a metric that would hide one of the core's."""
    for name in found:
        if name == "step" or name in beside:
            raise PluginError(f"{who}: found '{name}', a metric of the core; needs another name")


@asynccontextmanager
async def launch(plan: RunPlan, run_dir: Path, deadlines: Deadlines | None = None) -> AsyncIterator[Runtime]:
    """The run, started; on leaving, also by an error during the start, everything is closed in reverse order.

    The algorithms are probed before the first worker starts. WorkerError naming the worker, or PluginError naming the
    component or algorithm, that did not start.
    """
    limits = deadlines or Deadlines(plan.config.cluster.start_s)
    algorithms = await asyncio.to_thread(_probed, plan)
    if plan.config.cluster.device != "cuda":
        keep_freed_memory()
    async with AsyncExitStack() as stack:
        stack.enter_context(naming_offers(plan))
        tokens = await asyncio.to_thread(_tokens, plan)
        children = ChildProcesses()
        stack.push_async_callback(children.close)
        busy = BusyMeter(roles_by_pool(plan))
        groups = await _start_workers(plan, run_dir, limits, stack, busy)
        vocabulary = await _vocabulary(plan, groups)
        generator = _rollout_service(plan, groups, vocabulary)
        sink = MetricsSink()
        weights = _weights_sync(plan, run_dir, groups, stack)
        turns = _turns(plan, groups, sink)
        context = await _build_context(plan, run_dir, groups, generator, tokens, children, sink)
        watch = HangWatch(plan.config.cluster.stuck_s)
        stack.callback(watch.close)
        start = partial(_start_component, plan, context, groups, limits, stack, watch)
        built = {slot: await start(slot) for slot in SLOT_INTERFACES}
        busy.take()  # the time of starting is not work
        yield Runtime(
            plan=plan,
            run_dir=run_dir,
            tokens=tokens,
            actor=groups[ACTOR.name],
            reference=groups.get(REFERENCE.name),
            generator=generator,
            agent=built["agent"],
            reward=built["reward"],
            critic=built["critic"],
            advantage=algorithms["advantage"].function,
            advantage_algorithm=plan.algorithms["advantage"].algorithm,
            selection=algorithms["policy_loss"].selection,
            lease=turns,
            utilization=busy,
            sink=sink,
            weights=weights,
            context_length=context.context_length,
            vocabulary=vocabulary,
        )


async def _build_context(
    plan: RunPlan,
    run_dir: Path,
    groups: Groups,
    generator: RolloutService,
    tokens: Tokens,
    children: ChildProcesses,
    sink: MetricsSink,
) -> BuildContext:
    """The context that components share; each gets its own section and workers in it."""
    return BuildContext(
        config=plan.config,
        section=None,
        workers=_no_workers,
        generator=generator,
        reward_functions={reward.name: reward for reward in plan.rewards},
        tokens=tokens,
        children=children,
        run_dir=run_dir,
        seed=plan.config.train.seed,
        metrics=sink.record,
        context_length=await groups[ROLLOUT.name].replicas[0].call(RolloutWorker.context_length),
    )


def _probed(plan: RunPlan) -> "dict[str, Probed]":
    """The functions of the run's algorithms by purpose; PluginError for one that does not do what its offer says."""
    from rlcore.algo.probe import probe  # torch

    algo = plan.config.algo
    return {
        purpose: probe(algorithm.algorithm, algorithm.provided_by, algo)
        for purpose, algorithm in plan.algorithms.items()
    }


async def _vocabulary(plan: RunPlan, groups: Groups) -> int | None:
    """The number of token ids, as the actor says, else as its model's configuration does."""
    facts = await groups[ACTOR.name].replicas[0].call(ActorWorker.facts)
    size = facts.get("vocabulary", plan.facts.shape.vocabulary if plan.facts.shape else None)
    return None if size is None else int(size)


def _tokens(plan: RunPlan) -> Tokens:
    """The run's tokenizer and template; ConfigError for a stop string that they could never show."""
    tokens = load_tokens(plan.config.model, plan.config.data.system_prompt)
    tokens.check_stop(plan.config.rollout.stop)
    return tokens


def _rollout_service(plan: RunPlan, groups: Groups, vocabulary: int | None) -> RolloutService:
    isolated = any(worker.request.role == ROLLOUT and worker.request.isolated for worker in plan.workers)
    restarts = plan.config.cluster.max_restarts if isolated else 0
    return RolloutService(groups[ROLLOUT.name], plan.config.rollout.deadline_s, restarts, vocabulary)


def _weights_sync(plan: RunPlan, run_dir: Path, groups: Groups, stack: AsyncExitStack) -> WeightsSync | None:
    if plan.schedule.embedded:
        return None
    chosen = plan.config.rollout.weights_dir
    where = Path(chosen) / f"rlcore-{run_dir.name}" if chosen else run_dir / "weights"
    sync = WeightsSync(groups[ACTOR.name], groups[ROLLOUT.name], where.absolute())
    stack.push_async_callback(sync.close)
    return sync


def _turns(plan: RunPlan, groups: Groups, sink: MetricsSink) -> DeviceLease:
    """After the weight sync: a restarted server loads its weights before it may have to sleep."""
    interfaces = {worker.request.role.name: worker.request.role.interface for worker in plan.workers}
    servers = [(role, groups[role], interfaces[role]) for role in plan.colocated_roles]
    return DeviceLease(servers, sink.record, on_cpu=plan.config.cluster.device != "cuda")


async def _start_workers(
    plan: RunPlan, run_dir: Path, limits: Deadlines, stack: AsyncExitStack, busy: BusyMeter
) -> Groups:
    who = f"cluster '{plan.cluster.offer.name}' of {plan.cluster.provided_by}"
    with boundary(f"{who}: building it", PluginError, CALLED):
        cluster = plan.cluster.offer.cls(cluster_context(plan, run_dir, limits))
    stack.push_async_callback(_close_cluster, cluster, who)
    with boundary(f"{who}: open()", WorkerError, CALLED):
        await cluster.open()
    groups: dict[str, WorkerGroup[Any]] = {}
    for worker in plan.workers:
        role = worker.request.role.name
        with boundary(f"{who}: start() of role '{role}'", WorkerError, CALLED):
            group = await cluster.start(worker)
        _check_group(group, worker, f"{who}: start() of role '{role}'")
        groups[role] = busy.metered(role, group, worker.offered_by)
    return groups


def _check_group(group: object, worker: WorkerPlan, who: str) -> None:
    """PluginError unless a cluster returned as many replicas as it was asked for."""
    replicas = getattr(group, "replicas", None)
    if not isinstance(replicas, (tuple, list)) or not hasattr(group, "each"):
        raise PluginError(f"{who}: returned {shown(group)}; needs a WorkerGroup")
    if len(replicas) != worker.request.replicas:
        raise PluginError(f"{who}: returned {len(replicas)} replicas; needs {worker.request.replicas}")


async def _close_cluster(cluster: Cluster, who: str) -> None:
    with boundary(f"{who}: close()", WorkerError, CALLED):
        await cluster.close()


async def _start_component(
    plan: RunPlan,
    shared: BuildContext,
    groups: Groups,
    limits: Deadlines,
    stack: AsyncExitStack,
    watch: HangWatch,
    slot: str,
) -> Any:
    """The slot's component, built with its own section and workers, and started."""
    chosen = plan.components[slot]
    who = owner_of(chosen)
    context = replace(shared, section=chosen.section, workers=partial(_own, plan, groups, who))
    step = f"{who}: build()"
    limit = limited(step, limits.setup_s, "cluster.start_s")
    with boundary(step, PluginError, CALLED), watch.watching(step), limit:
        component = chosen.component.build(context)
    check_product(type(component), SLOT_INTERFACES[slot], who)
    life = cast(_LifeCycle, component)

    async def close(cut_short: type[BaseException] | None, *_: object) -> None:
        await _within(life.close, f"{who}: close()", limits.close_s if cut_short else max(limits.close_s, CLOSE_S))

    stack.push_async_exit(close)
    with watch.watching(f"{who}: start()"):
        await _within(life.start, f"{who}: start()", limits.setup_s)
    return _checked(plan, slot, component, who, watch)


def _checked(plan: RunPlan, slot: str, component: Any, who: str, watch: HangWatch) -> Any:
    """The component, behind the checks of what it hands over while the run goes on."""
    if slot == "agent":
        return CheckedAgent(component, who, watch)
    if slot == "reward":
        return CheckedRewards(component, who, watch)
    needed = any(Need.VALUES in algorithm.algorithm.needs for algorithm in plan.algorithms.values())
    return CheckedCritic(component, who, watch, needed=needed)


async def _within(step: Callable[[], Awaitable[None]], whose: str, deadline_s: float) -> None:
    with boundary(whose, PluginError, CALLED):
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                await step()
        except TimeoutError as cause:
            if not limit.expired():
                raise
            raise WorkerError(f"{whose} took longer than {deadline_s:g} s{_interrupted(cause)}") from cause


def _interrupted(cause: TimeoutError) -> str:
    """The line at which the cancelled code waited, for an error; empty when it is not known."""
    trace = cause.__cause__.__traceback__ if cause.__cause__ else None
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return f", {where_in(frames)}" if frames else ""


def owner_of(chosen: ComponentPlan) -> str:
    """The owner of a component in the plan's words: the `asked_by` of its workers."""
    return f"{chosen.slot} '{chosen.component.name}' of {chosen.provided_by}"


def _own(plan: RunPlan, groups: Groups, who: str, role: Role[Any]) -> WorkerGroup[Any]:
    """The workers of one of the component's own roles."""
    own = [worker.request.role for worker in plan.workers if worker.asked_by == who]
    if role not in own:
        names = ", ".join(pool.name for pool in own) or "none"
        raise PlanError(f"{who}: asked for the workers of role '{role.name}'; its own roles: {names}")
    return groups[role.name]


def _no_workers(role: Role[Any]) -> WorkerGroup[Any]:
    raise PlanError(f"{CORE}: no component asked for the workers of role '{role.name}' here")
