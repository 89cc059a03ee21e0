"""The cluster `miniature`: nodes with seats for replicas, which leave and return during a run.

A replica lives on this process's loop, so hundreds fit into one process. When its node leaves, every call to it fails
like a call to a killed process. Its next life waits for a free seat on a present node.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore import ConfigSection, RawScore, RewardReplica, RunConfig, WorkerClass, hookimpl, option
from rlcore.cluster.host import WorkerHost
from rlcore.cluster.kit import ReplicaCluster
from rlcore.contracts.clusters import ClusterAbilities, ClusterOffer, Deadlines, ProcessUse, Shipment, WorkerPlan
from rlcore.errors import WorkerError

RLCORE_API = "1"


@dataclass(frozen=True)
class MiniatureSettings:
    """The nodes, and the frequency of their departures."""

    nodes: int = option(8, at_least=1)
    seats: int = option(8, at_least=1)
    """Replicas that a node holds."""
    stays_s: float = option(0.0, at_least=0)
    """Mean seconds between two departures; 0: no node leaves."""
    away_s: float = option(0.5, above=0)
    """Mean seconds until a node is back."""
    seed: int = 0


@dataclass(eq=False)
class Node:
    """A machine, present or away, that holds bodies."""

    name: str
    there: bool = True
    bodies: list["Body"] = field(default_factory=list)


class Body:
    """The stand-in for the process of one replica: its worker runs on the controller's loop."""

    rendezvous = ""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._host = WorkerHost()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        node.bodies.append(self)

    @property
    def alive(self) -> bool:
        return not self._gone.done()

    async def ended(self) -> str:
        return await asyncio.shield(self._gone)

    def end(self, reason: str) -> None:
        """End it like a killed process."""
        if not self._gone.done():
            self._gone.set_result(reason)
        if self in self.node.bodies:
            self.node.bodies.remove(self)

    async def build(self, ranks: Sequence[Shipment], deadline_s: float) -> None:
        if not self.alive:
            raise WorkerError(f"{self.node.name} left")
        for shipment in ranks:
            self._host.build(shipment)

    async def call(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        where: str,
        deadline_s: float,
        *,
        concurrent: bool = False,
    ) -> Any:
        return await self._or_gone(self._host.call(role, method, args, kwargs), where)

    async def stream(
        self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, deadlines: Deadlines
    ) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(self._host.stream(role, method, args, kwargs)) as items:
            while True:
                try:
                    yield await self._or_gone(anext(items), where)
                except StopAsyncIteration:
                    return

    async def _or_gone(self, work: Awaitable[Any], where: str) -> Any:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():  # an answer that arrives together with the departure is lost, too
                raise WorkerError(f"{where}: {self._gone.result()}")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self, deadline_s: float) -> None:
        self._host.close()
        self.end("it was closed")


class MiniatureCluster(ReplicaCluster):
    """Seats on nodes. Workers that must not die sit on `head`, which stays."""

    async def open(self) -> None:
        settings = self.context.settings(MiniatureSettings)
        self._settings, self._random = settings, random.Random(settings.seed)
        self._head = Node("head")
        self._nodes = [Node(f"node{index}") for index in range(settings.nodes)]
        self._came = asyncio.Event()
        self._counts = {"departures": 0, "replicas_lost": 0, "all_away": 0}
        self._returns: set[asyncio.Task[None]] = set()
        self._weather = asyncio.create_task(self._leave_and_return()) if settings.stays_s else None

    def device_of(self, worker: WorkerPlan, index: int, rank: int) -> str:
        return "cpu"

    async def launch(self, worker: WorkerPlan, index: int) -> Any:
        if not worker.request.isolated:
            return Body(self._head)
        while True:
            free = [node for node in self._nodes if node.there and len(node.bodies) < self._settings.seats]
            if free:
                return Body(min(free, key=lambda node: len(node.bodies)))
            self._came.clear()
            await self._came.wait()

    async def _leave_and_return(self) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._settings.stays_s))
            there = [node for node in self._nodes if node.there]
            if there:
                self._leave(self._random.choice(there))

    def _leave(self, node: Node) -> None:
        node.there = False
        self._counts["departures"] += 1
        self._counts["replicas_lost"] += len(node.bodies)
        self._counts["all_away"] += not any(node.there for node in self._nodes)
        for body in list(node.bodies):
            body.end(f"{node.name} left")
        back = asyncio.create_task(self._return(node, self._random.expovariate(1 / self._settings.away_s)))
        self._returns.add(back)
        back.add_done_callback(self._returns.discard)

    async def _return(self, node: Node, away_s: float) -> None:
        await asyncio.sleep(away_s)
        node.there = True
        self._came.set()

    async def close(self) -> None:
        tasks = [task for task in (self._weather, *self._returns) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in self._nodes:
            node.there = True
        await self.close_replicas()
        (self.context.run_dir / "departures.json").write_text(json.dumps(self._counts))


class Marker(RewardReplica):
    """A reward model whose score is a function of the text."""

    def setup(self) -> None:
        """Does nothing: there are no files."""

    async def score(self, requests: Sequence[Any]) -> list[RawScore]:
        await asyncio.sleep(0.002)
        return [RawScore(request.id, len(str(request.messages)) % 7 / 7) for request in requests]

    async def health(self) -> str:
        return "fine"


def abilities(config: RunConfig, section: MiniatureSettings) -> ClusterAbilities:
    return ClusterAbilities(processes=ProcessUse.ALL, elsewhere=True, several_nodes=True)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("miniature_cluster", MiniatureSettings, {"cluster.backend": "miniature"})]


@hookimpl
def rlcore_clusters() -> Sequence[ClusterOffer]:
    return [ClusterOffer("miniature", MiniatureCluster, abilities)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(RewardReplica, "marker", Marker)]
