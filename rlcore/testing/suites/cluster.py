"""The suite of clusters."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.aio import all_or_none
from rlcore.cluster.worker_context import cluster_context
from rlcore.config.providers import Offer, Provider
from rlcore.contracts.clusters import Cluster, ClusterAbilities, ClusterContext, ClusterOffer, Deadlines, WorkerPlan
from rlcore.contracts.workers import ReplicaEvent, WorkerGroup
from rlcore.errors import WorkerError
from rlcore.errors.checks.interfaces import refuses
from rlcore.plan import CORE, Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.plugins.enabled import name_of
from rlcore.runtime.starting import start_chains
from rlcore.testing import probing
from rlcore.testing.null import SETTINGS
from rlcore.testing.suites.harness import Suite, extra, need_conforming, run, scratch

NUM_ITEMS = 300
"""Items of a stream: more than fit in one message."""
SECONDS = Deadlines(setup_s=60.0, call_s=30.0, close_s=10.0)


class _OneCluster:
    """The offers of some plugins, with only one cluster."""

    def __init__(self, hooks: Any, offer: ClusterOffer, plugin: str) -> None:
        self._hooks = hooks
        providers = [provider for provider in hooks.providers() if provider.plugin == plugin]
        self._offer = Offer(offer, providers[0] if providers else Provider(CORE, "suite", "0"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def clusters(self) -> tuple[Offer[ClusterOffer], ...]:
        return (self._offer,)


@dataclass(frozen=True)
class StartedCluster:
    """An open cluster, with the groups of the started roles, by role."""

    cluster: Cluster
    context: ClusterContext
    groups: dict[str, WorkerGroup[Any]]
    probe: Any
    """The class of the probes, as the run imported it."""
    embedded: Any


class ClusterSuite(Suite):
    """A cluster of a plugin; `target` is its `ClusterOffer`."""

    restarts: bool = False
    """Claim: workers are processes, and an isolated one that dies is restarted."""
    leaves_nothing: bool = True
    """Claim: `close()` leaves no thread, process or descriptor in this process. Set it to False if a library keeps some
    until the process ends."""
    limit_s: float = 120.0
    """Seconds that a check may take."""

    @property
    def offer(self) -> ClusterOffer:
        """The target."""
        found = self.load()
        self.need(isinstance(found, ClusterOffer), f"is {type(found).__name__}; needs a ClusterOffer")
        return found  # type: ignore[no-any-return]

    @property
    def who(self) -> str:
        """The cluster, as errors name it."""
        return f"cluster '{getattr(self.load(), 'name', '?')}'"

    def planned(self) -> RunPlan:
        """A run with two probes, each with an embedded probe."""
        settings = [*SETTINGS, "rollout.agent=probing", f"cluster.backend={self.offer.name}", "cluster.max_restarts=2"]
        settings += [f"{key}={value}" for key, value in self.settings.items()]
        hooks, loaded = configure([], settings, ["null", probing.__file__, *self.plugins])
        offers: Any = _OneCluster(hooks, self.offer, name_of(self.plugins[0]) if self.plugins else CORE)
        return make_plan(loaded, offers, Facts(cpus=2))

    @asynccontextmanager
    async def built(self, run_dir: Path) -> AsyncIterator[tuple[Cluster, RunPlan, ClusterContext]]:
        """The cluster before `open`; it is closed afterwards."""
        plan = self.planned()
        context = cluster_context(plan, run_dir, SECONDS)
        cluster = self.offer.cls(context)
        try:
            yield cluster, plan, context
        finally:
            await cluster.close()

    def use(self, work: Callable[[StartedCluster], Awaitable[None]]) -> None:
        """Await `work` with an open cluster that has started every role, then close the cluster.

        Roles start in the order in which a run starts them: with `starts_together`, some at the same time.
        """

        async def main() -> None:
            with scratch() as run_dir:
                async with self.built(run_dir) as (cluster, plan, context):
                    await cluster.open()
                    groups: dict[str, WorkerGroup[Any]] = {}
                    chains = [_start(cluster, chain, groups) for chain in start_chains(plan)]
                    await all_or_none(chains)
                    classes = {worker.request.role.name: worker.cls for worker in plan.workers}
                    started = StartedCluster(cluster, context, groups, classes["probe"], classes["embedded_probe"])
                    await work(started)

        self.run(main)

    def run(self, main: Callable[[], Any]) -> None:
        """Run a check within its limit. With `leaves_nothing`, it may leave nothing behind."""
        if self.leaves_nothing:
            run(main(), self.limit_s)
        else:
            asyncio.run(asyncio.wait_for(main(), self.limit_s))

    def test_its_class_is_a_cluster(self) -> None:
        """It inherits from `Cluster`, keeps kind and parameters of every method, and is built from a context alone."""
        cls = self.offer.cls
        need_conforming(self.who, cls, Cluster)
        problem = refuses(cls, ["context"])
        self.need(not problem, f"__init__() {problem}")

    def test_it_says_the_same_of_itself_whenever_it_is_asked(self) -> None:
        """Its abilities are equal, and it has no problems with a plan that it can start."""
        plan, offer = self.planned(), self.offer
        section = plan.cluster.section
        one, other = (offer.abilities(plan.config, section) for _ in range(2))
        self.need(isinstance(one, ClusterAbilities), f"abilities() returned {type(one).__name__}")
        self.need(one == other, f"abilities() are {one}, and then {other}; needs the same")
        found = list(offer.problems(plan.config, section, plan.pools, plan.workers))
        self.need(not found, f"problems() of a plan that every cluster can start: {found}")

    def test_it_starts_every_replica_of_each_role_and_tells_it_who_it_is(self) -> None:
        """Replicas come in order, with the names of errors. Threads, seed and run directory are the plan's."""

        async def work(started: StartedCluster) -> None:
            for role, cls in (("probe", started.probe), ("embedded_probe", started.embedded)):
                group = started.groups[role]
                names = [replica.name for replica in group.replicas]
                self.need(names == [f"{role}[0]", f"{role}[1]"], f"the replicas of '{role}' are {names}")
                self.need(all(replica.alive for replica in group.replicas), f"a replica of '{role}' is not alive")
                seed, run_dir = started.context.config.train.seed, str(started.context.run_dir)
                due = started.context.threads_of(
                    next(worker for worker in started.context.workers if worker.request.role.name == role)
                )
                for index, identity in enumerate(await group.each(cls.identity)):
                    wanted = (role, index, 0, 1, seed, due, "cpu", run_dir)
                    self.need(tuple(identity) == wanted, f"{role}[{index}] reports {tuple(identity)}; needs {wanted}")

        self.use(work)

    def test_an_embedded_worker_is_in_the_process_of_its_host(self) -> None:
        """The host is its `WorkerContext.host`."""

        async def work(started: StartedCluster) -> None:
            group = started.groups["embedded_probe"]
            hosts = await group.each(started.embedded.host)
            self.need(hosts == ["probe[0.0]", "probe[1.0]"], f"the hosts are {hosts}")
            here, there = (
                await group.each(started.embedded.where),
                await started.groups["probe"].each(started.probe.where),
            )
            self.need(here == there, f"embedded workers are in processes {here}, their hosts in {there}")

        self.use(work)

    def test_calls_return_what_the_method_returns_and_raise_what_it_raises(self) -> None:
        """Methods are plain and async. An error is a WorkerError that names replica, method and cause."""

        async def work(started: StartedCluster) -> None:
            replica = started.groups["probe"].replicas[1]
            value = {"a": (1, 2.5), "b": b"x" * 100_000}
            for method in (started.probe.echo, started.probe.echo_later):
                found = await replica.call(method, value)
                self.need(found == value, f"{method.__name__}() returned {found!r:.80}; needs what it was given")
            error = await raised(replica.call(started.probe.fail))
            due = "probe[1].fail(): ValueError: a first line"
            self.need(error == due, f"a method that raises gives {error!r}; needs {due!r}")

        self.use(work)

    def test_a_method_marked_as_concurrent_answers_while_another_one_computes(self) -> None:
        """A checkpoint is written during updates, and is complete when its writer answers."""

        async def work(started: StartedCluster) -> None:
            replica = started.groups["probe"].replicas[0]
            seconds = min(SECONDS.call_s / 3, self.limit_s / 12)
            computing = asyncio.ensure_future(replica.call(started.probe.compute, seconds))
            while not any(started.context.run_dir.glob("computing *")) and not computing.done():
                await asyncio.sleep(0.01)
            found = await replica.call(started.probe.answer, 7)
            (started.context.run_dir / probing.RELEASED).touch()
            self.need(found == 7, f"answer() returned {found!r}; needs what it was given")
            self.need(await computing, "answer(), which is marked `concurrent`, did not answer while compute() ran")

        self.use(work)

    def test_a_stream_yields_everything_and_ends_with_its_reader(self) -> None:
        """Items come in order. A reader that leaves ends the worker's generator."""

        async def work(started: StartedCluster) -> None:
            replica = started.groups["probe"].replicas[0]
            items = [number async for number in replica.stream(started.probe.count, NUM_ITEMS)]
            self.need(items == list(range(NUM_ITEMS)), f"a stream of {NUM_ITEMS} items gave {len(items)}, or others")
            stream = replica.stream(started.probe.count, 10**9)
            async for number in stream:
                if number == 5:
                    break
            await stream.aclose()
            ended = await replica.call(started.probe.ended)
            self.need(ended == 2, f"{ended} of 2 streams have ended after their readers left")

        self.use(work)

    def test_what_does_not_start_is_named_and_nothing_is_left(self) -> None:
        """A WorkerError names the replica and the cause."""

        async def main() -> None:
            with scratch() as run_dir:
                (run_dir / probing.BROKEN).touch()
                async with self.built(run_dir) as (cluster, plan, _):
                    await cluster.open()
                    worker = next(worker for worker in plan.workers if worker.request.role.name == "probe")
                    error = await raised(cluster.start(worker))
                    good = error.startswith("probe[") and error.endswith("ValueError: a probe breaks")
                    self.need(good, f"a worker that does not start gives {error!r}; needs its name and the cause")

        self.run(main)

    def test_close_closes_every_worker_once(self) -> None:
        """Embedded workers are closed, too. A cluster that was never opened can be closed."""

        async def main() -> None:
            with scratch() as run_dir:
                async with self.built(run_dir) as (cluster, plan, _):
                    await cluster.open()
                    groups = [await cluster.start(worker) for worker in plan.workers]
                found = sorted(path.name for path in run_dir.glob("closed *"))
                due = [f"closed {role}[{index}.0]" for role in ("embedded_probe", "probe") for index in range(2)]
                self.need(found == due, f"close() closed {found}; needs {due}")
                alive = [replica.name for group in groups for replica in group.replicas if replica.alive]
                self.need(not alive, f"{', '.join(alive)} alive after close()")
                async with self.built(run_dir):
                    pass

        self.run(main)

    @extra("restarts")
    def test_an_isolated_replica_that_dies_is_lost_and_restored(self) -> None:
        """Its embedded workers are restored, too. `before_launch` is awaited before it is launched again, and
        `before_return` before it is alive again."""

        async def work(started: StartedCluster) -> None:
            group, restored = started.groups["probe"], asyncio.Event()
            events: list[str] = []

            def seen(event: ReplicaEvent) -> None:
                events.append(f"{event.kind} {event.name}")
                if event.kind == "restored":
                    restored.set()

            async def allow(replica: Any) -> None:
                events.append(f"allowed {replica.name}, alive: {replica.alive}")

            async def prepare(replica: Any) -> None:
                events.append(f"prepared {await replica.call(started.probe.echo, replica.name)}")

            group.on_event(seen)
            group.before_launch(allow)
            group.before_return(prepare)
            before = await group.each(started.probe.where)
            error = await raised(group.replicas[0].call(started.probe.die))
            self.need(error.startswith("probe[0].die(): "), f"a call of a replica that dies gives {error!r}")
            done = await asyncio.wait([asyncio.ensure_future(restored.wait())], timeout=self.limit_s / 2)
            self.need(bool(done[0]), f"an isolated replica that died was not restored in {self.limit_s / 2:g} s")
            due = ["lost probe[0]", "allowed probe[0], alive: False", "prepared probe[0]", "restored probe[0]"]
            self.need(events == due, f"events: {events}; needs {due}")
            after = await group.each(started.probe.where)
            self.need(after[0] != before[0], "the replica that died is in the process that it died in")
            self.need(after[1] == before[1], "the other replica was restarted, too")
            hosts = await started.groups["embedded_probe"].each(started.embedded.host)
            self.need(hosts[0] == "probe[0.0]", "what was embedded in the replica is not back")

        self.use(work)


async def _start(cluster: Cluster, chain: Sequence[WorkerPlan], groups: dict[str, WorkerGroup[Any]]) -> None:
    for worker in chain:
        groups[worker.request.role.name] = await cluster.start(worker)


async def raised(work: Awaitable[Any]) -> str:
    """The first line of the WorkerError that `work` raises; '' if it raises none."""
    try:
        await work
    except WorkerError as error:
        return str(error)
    return ""
