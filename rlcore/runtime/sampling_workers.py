"""The part of a run that samples with the actor's weights: workers, tokenizer and weight sync."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.reference import REFERENCE
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.contracts.tokens import Tokens
from rlcore.contracts.workers import WorkerGroup
from rlcore.data.tokenizer import check_reference_ids, load_tokens
from rlcore.engines.freed_memory import keep_freed_memory
from rlcore.engines.huge_pages import use_huge_pages
from rlcore.plan import RunPlan
from rlcore.plan.colocation import roles_on_actors_devices
from rlcore.runtime.colocation import DeviceLease
from rlcore.runtime.hang_watch import HangWatch
from rlcore.runtime.offering_plugin import naming_offers
from rlcore.runtime.rollout_service import RolloutService
from rlcore.runtime.starting import Groups, start_workers
from rlcore.runtime.utilization import BusyMeter, roles_by_pool
from rlcore.runtime.weight_check import WeightsCheck
from rlcore.runtime.weight_sync import WeightsSync
from rlcore.types import Metrics


class MetricsSink:
    """Collects what components record during a step; a name recorded several times is averaged."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def record(self, name: str, value: float) -> None:
        """Record a value of the current step."""
        self._values.setdefault(name, []).append(float(value))

    def take(self) -> Metrics:
        """The means of the step; clears them for the next one."""
        taken, self._values = self._values, {}
        return {name: sum(values) / len(values) for name, values in taken.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Sampler:
    """The started actor and rollout, with everything that requests to them need."""

    plan: RunPlan
    run_dir: Path
    groups: Groups
    """Every worker group of the plan, by role."""
    tokens: Tokens
    actor: WorkerGroup[ActorWorker]
    generator: RolloutService
    lease: DeviceLease
    """The lease of the devices that several roles share."""
    utilization: BusyMeter
    watch: HangWatch
    """Reports calls of workers and components that do not return."""
    sink: MetricsSink
    weights: WeightsSync | None
    """None if the rollout samples from the actor's own weights."""
    check: WeightsCheck | None
    """Checks that replicas sample with the weights that were handed to them; None without weight sync."""
    context_length: int | None
    """Maximum tokens of a prompt and its response together, as reported by the rollout; None if unknown."""
    vocabulary: int | None
    """Upper bound of token ids; None if neither the actor nor its model's configuration states it."""

    async def publish(self, version: int) -> None:
        """Make the actor's weights those of `version`, and hand them over; an embedded rollout may sample with them
        before this returns."""
        self.generator.newest_version = version
        await self.actor.replicas[0].call(ActorWorker.publish, version)
        await self.sync_weights(version)

    async def sync_weights(self, version: int) -> None:
        """Hand over the actor's weights as `version`; rollout replicas sample with them when this returns.

        Servers that share the actor's devices sleep until then, so gathered weights and a key-value cache never exist
        at the same time.
        """
        await self.lease.train()
        self.generator.newest_version = version
        if self.weights is not None:
            began = time.monotonic()
            await self.weights.publish(version)
            self.sink.record("time/weights_s", time.monotonic() - began)
        await self.lease.serve()
        self.generator.clock.restart()  # while the weights were loaded, samples may have waited
        if self.check is not None:
            await self.check.sample(version)


@asynccontextmanager
async def launch_sampler(plan: RunPlan, run_dir: Path) -> AsyncIterator[Sampler]:
    """Start only the plan's actor and rollout; on exit, everything is closed.

    WorkerError naming the worker that did not start.
    """
    prepare_memory(plan)
    async with AsyncExitStack() as stack:
        yield await start_sampler(plan.only_sampling(), run_dir, Deadlines(plan.config.cluster.start_s), stack)


def prepare_memory(plan: RunPlan) -> None:
    """Set how this process allocates memory, if workers compute in it on a CPU; to be called before torch's first
    tensor."""
    if plan.config.cluster.device != "cuda":
        keep_freed_memory()
        use_huge_pages()


async def start_sampler(plan: RunPlan, run_dir: Path, limits: Deadlines, stack: AsyncExitStack) -> Sampler:
    """Starts every worker of the plan; `stack` closes them. WorkerError naming the worker that did not start."""
    stack.enter_context(naming_offers(plan))
    tokens = await asyncio.to_thread(_tokens, plan)
    watch = HangWatch(plan.config.cluster.stuck_s)
    stack.callback(watch.close)
    busy = BusyMeter(roles_by_pool(plan), watch=watch)
    groups = await start_workers(plan, run_dir, limits, stack, busy)
    vocabulary = await _vocabulary(plan, groups)
    generator = _rollout_service(plan, groups, vocabulary)
    busy.on_change(ACTOR.name, generator.clock.actor_busy)
    sink = MetricsSink()
    weights = _weights_sync(plan, run_dir, groups, stack)
    return Sampler(
        plan=plan,
        run_dir=run_dir,
        groups=groups,
        tokens=tokens,
        actor=groups[ACTOR.name],
        generator=generator,
        lease=_turns(plan, groups, sink),
        utilization=busy,
        watch=watch,
        sink=sink,
        weights=weights,
        check=None if weights is None else _weights_check(plan, groups, tokens),
        context_length=await groups[ROLLOUT.name].replicas[0].call(RolloutWorker.context_length),
        vocabulary=vocabulary,
    )


async def _vocabulary(plan: RunPlan, groups: Groups) -> int | None:
    """The number of token ids, from the actor, else from its model's configuration."""
    facts = await groups[ACTOR.name].replicas[0].call(ActorWorker.facts)
    size = facts.get("vocabulary", plan.facts.shape.vocabulary if plan.facts.shape else None)
    return None if size is None else int(size)


def _tokens(plan: RunPlan) -> Tokens:
    """The run's tokenizer and template; ConfigError for a stop string that they can never produce, and for a reference
    with other token ids."""
    config = plan.config
    tokens = load_tokens(config.model, config.data.system_prompt)
    tokens.check_stop(config.rollout.stop)
    if config.has_other_reference and any(worker.request.role == REFERENCE for worker in plan.workers):
        check_reference_ids(tokens, config.reference.path)
    return tokens


def _rollout_service(plan: RunPlan, groups: Groups, vocabulary: int | None) -> RolloutService:
    [ranks] = [worker.request.ranks for worker in plan.workers if worker.request.role == ROLLOUT]
    return RolloutService(groups[ROLLOUT.name], plan.config.rollout.deadline_s, vocabulary, ranks)


def _weights_sync(plan: RunPlan, run_dir: Path, groups: Groups, stack: AsyncExitStack) -> WeightsSync | None:
    if plan.schedule.embedded:
        return None
    rollout = plan.config.rollout
    directory = _weights_directory(rollout.weights_dir, run_dir.absolute())
    sync = WeightsSync(groups[ACTOR.name], groups[ROLLOUT.name], directory, rollout.weights_deadline_s)
    stack.push_async_callback(sync.close)
    return sync


def _weights_directory(chosen: str, run_dir: Path) -> Path:
    """The directory of this run's weights; the digest of the run's path separates runs of one name, as in sweeps."""
    if not chosen:
        return run_dir / "weights"
    digest = hashlib.blake2b(os.fsencode(run_dir), digest_size=8).hexdigest()
    return Path(chosen).absolute() / f"rlcore-{run_dir.name}-{digest}"


def _weights_check(plan: RunPlan, groups: Groups, tokens: Tokens) -> WeightsCheck:
    return WeightsCheck(groups[ACTOR.name], groups[ROLLOUT.name], tokens, plan.config.rollout)


def _turns(plan: RunPlan, groups: Groups, sink: MetricsSink) -> DeviceLease:
    """Created after the weight sync, so that a restarted server loads its weights before it may have to sleep."""
    interfaces = {worker.request.role.name: worker.request.role.interface for worker in plan.workers}
    servers = [(role, groups[role], interfaces[role]) for role in plan.colocated_roles]
    sharing = roles_on_actors_devices(plan.pools, plan.workers)
    awake = [groups[role] for role in sharing if role not in plan.colocated_roles]
    return DeviceLease(servers, sink.record, on_cpu=plan.config.cluster.device != "cuda", awake=awake)
