"""Starts exactly what a plan says, and closes everything it started, even after a crash."""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from rlcore.aio import in_daemon_thread
from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.activity import current_activity
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.components import BuildContext
from rlcore.contracts.critic import CriticEngine
from rlcore.contracts.offers import Algorithm, Need
from rlcore.contracts.reference import REFERENCE, ReferenceWorker
from rlcore.contracts.requests import Role
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.workers import WorkerGroup
from rlcore.errors import CALLED, ConfigError, PlanError, PluginError, RlcoreError, WorkerError, boundary
from rlcore.errors.checks.interfaces import check_product
from rlcore.plan import CORE, ComponentPlan, RunPlan
from rlcore.plan.time_limit import limit_s, limited, not_done, where_in
from rlcore.runtime.checked_components import CheckedAgent, CheckedCritic, CheckedRewards
from rlcore.runtime.hang_watch import HangWatch
from rlcore.runtime.lane_settings import LaneSettings
from rlcore.runtime.sampling_workers import Sampler, prepare_memory, start_sampler
from rlcore.runtime.starting import Groups
from rlcore.types import Metrics

if TYPE_CHECKING:
    from rlcore.algo.probe import Probed


logger = logging.getLogger(__name__)
T = TypeVar("T")

SLOT_INTERFACES: Mapping[str, type[Any]] = {"agent": AgentLoop, "reward": RewardManager, "critic": CriticEngine}
"""In the order in which components start."""


CLOSE_S = 10.0
"""Least seconds for the close() of a component or worker at the normal end of a run; engines and children end slowly on
a busy machine."""


class _LifeCycle(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Runtime(Sampler):
    """A live run: the started parts of a plan."""

    reference: WorkerGroup[ReferenceWorker] | None
    """None without a KL term."""
    agent: AgentLoop
    reward: RewardManager
    critic: CriticEngine
    advantage: Callable[..., Any]
    """The advantage estimator."""
    advantage_algorithm: Algorithm
    """The estimator's declaration."""
    selection: Callable[..., Any] | None = None
    """The selection that the policy loss names (`rlcore.algo.covariance`); None if it names none."""

    def take_metrics(self, core_metrics: Collection[str] = ()) -> Metrics:
        """Metrics that components recorded or counted since the last call.

        PluginError for a name that is 'step' or in `core_metrics`, the core's metrics of the step.
        """
        taken = self.sink.take() | self.utilization.take()
        _check_free("BuildContext.metrics()", taken, core_metrics)
        for slot, component in (("agent", self.agent), ("reward", self.reward), ("critic", self.critic)):
            found = component.metrics()
            _check_free(f"{owner_of(self.plan.components[slot])}: metrics()", found, core_metrics)
            taken |= found
        return taken


def _check_free(who: str, found: Metrics, core_metrics: Collection[str]) -> None:
    """PluginError for a metric that would hide one of the core's."""
    for name in found:
        if name == "step" or name in core_metrics:
            raise PluginError(f"{who}: found '{name}', a metric of the core; needs another name")


@asynccontextmanager
async def launch(plan: RunPlan, run_dir: Path, deadlines: Deadlines | None = None) -> AsyncIterator[Runtime]:
    """Start the run; on exit, including errors during the start, everything is closed in reverse order.

    The algorithms are probed before the first worker starts. WorkerError naming the worker, or PluginError naming the
    component or algorithm, that did not start. A component that closes too slowly is a warning: a run has saved
    everything by then, and ends as it would have.
    """
    deadlines = deadlines or Deadlines(plan.config.cluster.start_s)
    limits = replace(deadlines)
    prepare_memory(plan)
    algorithms = await _probed(plan)
    async with AsyncExitStack() as stack, _lengthened(limits):
        children = ChildProcesses()
        stack.push_async_callback(children.close)
        sampler = await start_sampler(plan, run_dir, limits, stack)
        context = await _build_context(sampler, children)
        start = partial(_start_component, plan, context, sampler.groups, limits, stack, sampler.watch)
        built = {slot: await start(slot) for slot in SLOT_INTERFACES}
        sampler.utilization.take()  # starting does not count as work
        yield Runtime(
            **{part.name: getattr(sampler, part.name) for part in fields(sampler)},
            reference=sampler.groups.get(REFERENCE.name),
            agent=built["agent"],
            reward=built["reward"],
            critic=built["critic"],
            advantage=algorithms["advantage"].function,
            advantage_algorithm=plan.algorithms["advantage"].algorithm,
            selection=algorithms["policy_loss"].selection,
        )


@asynccontextmanager
async def _lengthened(limits: Deadlines) -> AsyncIterator[None]:
    """Context whose normal end leaves `CLOSE_S` for closing. During the run and after an error or a signal the shorter
    deadline applies, also to streams that are closed on the way out."""
    yield
    limits.close_s = max(limits.close_s, CLOSE_S)


async def _build_context(sampler: Sampler, children: ChildProcesses) -> BuildContext:
    """The context that components share; each gets a copy with its section and workers."""
    plan = sampler.plan
    return BuildContext(
        config=plan.config,
        section=None,
        workers=_no_workers,
        generator=sampler.generator,
        reward_functions={reward.name: reward for reward in plan.rewards},
        tokens=sampler.tokens,
        children=children,
        run_dir=sampler.run_dir,
        seed=plan.config.train.seed,
        metrics=sampler.sink.record,
        context_length=sampler.context_length,
    )


async def _probed(plan: RunPlan) -> "dict[str, Probed]":
    """The functions of the run's algorithms by purpose; PluginError for one that does not match its offer, or hangs."""
    probe = await in_daemon_thread("importing torch", _probe)
    found = {}
    for purpose, algorithm in plan.algorithms.items():
        who = f"algo.{algorithm.algorithm.kind.value}={algorithm.algorithm.name} of {algorithm.provided_by}"
        probing = partial(probe, algorithm.algorithm, algorithm.provided_by, plan.config.algo)
        whose = f"{who}: probing it"
        found[purpose] = await in_daemon_thread(whose, partial(_within_limit, whose, probing))
    return found


def _probe() -> "Callable[..., Probed]":
    from rlcore.algo.probe import probe  # torch

    return probe


def _within_limit(whose: str, call: Callable[[], T]) -> T:
    """The result of plugin code; PluginError with its line if it is not done in `limit_s()`, and it is left behind."""
    limit, done = limit_s(), Future[T]()

    def run() -> None:
        try:
            with boundary(whose, PluginError, BaseException):
                done.set_result(call())
        except RlcoreError as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name=whose, daemon=True)
    thread.start()
    thread.join(limit)
    if not done.done():
        raise PluginError(not_done(whose, limit, sys._current_frames().get(thread.ident or 0)))
    return done.result()


async def _start_component(
    plan: RunPlan,
    shared: BuildContext,
    groups: Groups,
    limits: Deadlines,
    stack: AsyncExitStack,
    watch: HangWatch,
    slot: str,
) -> Any:
    """The slot's component, built with its section and workers, and started."""
    chosen = plan.components[slot]
    who = owner_of(chosen)
    lanes = LaneSettings(shared.generator, who) if slot == "agent" and shared.generator is not None else None
    own = partial(_own, plan, groups, who)
    context = replace(shared, section=chosen.section, workers=own, generator=lanes or shared.generator)
    step = f"{who}: build()"
    current_activity().enter(f"starting {who}")
    limit = limited(step, limits.setup_s, "cluster.start_s")
    with boundary(step, PluginError, CALLED), watch.watching(step), limit:
        component = chosen.component.build(context)
    check_product(type(component), SLOT_INTERFACES[slot], who)
    life = cast(_LifeCycle, component)

    async def close() -> None:
        try:
            await _within(life.close, f"{who}: close()", limits.close_s)
        except _TooSlow as slow:
            logger.warning("%s; its processes are killed", slow)

    stack.push_async_callback(close)
    with watch.watching(f"{who}: start()"):
        await _within(life.start, f"{who}: start()", limits.setup_s)
    return _checked(plan, slot, component, who, watch, lanes)


def _checked(plan: RunPlan, slot: str, component: Any, who: str, watch: HangWatch, lanes: LaneSettings | None) -> Any:
    """The component, wrapped in checks of its results."""
    if slot == "agent":
        return CheckedAgent(component, who, watch, lanes)
    needs = {need for chosen in plan.algorithms.values() for need in chosen.algorithm.needs}
    if slot == "reward":
        rewards = CheckedRewards(component, who, watch)
        if Need.FUNCTION_SCORES in needs and not rewards.weights:
            raise ConfigError(
                f"reward.manager={plan.config.reward.manager}: {who} states no `weights` of the parts of its "
                f"score, which algo.advantage={plan.config.algo.advantage} compares; choose an estimator of the whole "
                "score, such as algo.advantage=grpo"
            )
        return rewards
    needed = Need.VALUES in needs
    return CheckedCritic(component, who, watch, needed=needed)


class _TooSlow(WorkerError):
    """A step of a component's life was cancelled at its deadline."""


async def _within(step: Callable[[], Awaitable[None]], whose: str, deadline_s: float) -> None:
    with boundary(whose, PluginError, CALLED):
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                await step()
        except TimeoutError as cause:
            if not limit.expired():
                raise
            raise _TooSlow(f"{whose} took longer than {deadline_s:g} s{_interrupted(cause)}") from cause


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
