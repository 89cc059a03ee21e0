"""A plugin in a plain file for `ClusterSuite`: an agent loop that requests probes, which report their contexts."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlcore.config import RunConfig
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.components import BuildContext, Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.workers import Worker, concurrent

RLCORE_API = "1"
BROKEN = "probes break"
"""Name of a file; a probe with such a file in its run directory fails in `setup`."""
RELEASED = "probes are released"
"""Name of a file that ends a probe's `compute`."""


class Probe(Worker):
    """Reports its context and its process."""

    def setup(self) -> None:
        if (self.context.run_dir / BROKEN).exists():
            raise ValueError("a probe breaks")
        self.num_ended = 0

    def identity(self) -> tuple[str, int, int, int, int, int, str, str]:
        """Role, replica, rank, number of ranks, seed, threads, device and run directory."""
        context = self.context
        place = (context.role, context.replica, context.rank, context.num_ranks)
        return (*place, context.seed, context.threads, context.device, str(context.run_dir))

    def where(self) -> int:
        """The id of its process."""
        return os.getpid()

    def echo(self, value: Any) -> Any:
        """The value."""
        return value

    async def echo_later(self, value: Any) -> Any:
        """The value, returned by a coroutine."""
        await asyncio.sleep(0)
        return value

    def compute(self, limit_s: float) -> bool:
        """Block the worker until the run directory has a file `RELEASED`; False if it has none after so long."""
        ends = time.monotonic() + limit_s
        (self.context.run_dir / f"computing {self.context}").touch()
        while not (self.context.run_dir / RELEASED).exists():
            if time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return True

    @concurrent
    async def answer(self, value: Any) -> Any:
        """The value, also while `compute` blocks."""
        return value

    def fail(self) -> None:
        """Raise an error of two lines."""
        raise ValueError("a first line\nand a second")

    def die(self) -> None:
        """End the process immediately."""
        os._exit(7)

    async def count(self, num: int) -> AsyncIterator[int]:
        """The numbers below `num`."""
        try:
            for index in range(num):
                yield index
                await asyncio.sleep(0)
        finally:
            self.num_ended += 1

    def ended(self) -> int:
        """Number of this probe's streams that have ended."""
        return self.num_ended

    def close(self) -> None:
        (self.context.run_dir / f"closed {self.context}").touch()


class EmbeddedProbe(Probe):
    """A probe that is embedded in another one."""

    def host(self) -> str:
        """Role and replica of its host: 'probe[1.0]'; empty without one."""
        return str(self.context.host.context) if self.context.host else ""


PROBE = Role("probe", Probe)
EMBEDDED = Role("embedded_probe", EmbeddedProbe)


def requests(config: RunConfig, section: Any) -> Sequence[WorkerRequest]:
    """Two isolated probes, each with an embedded one."""
    return [
        WorkerRequest(PROBE, "probing", replicas=2, threads=3, cpus=0.5, isolated=True),
        WorkerRequest(EMBEDDED, "probing", replicas=2),
    ]


def build(context: BuildContext) -> AgentLoop:
    """Not called, because a suite starts only workers."""
    raise NotImplementedError


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[AgentLoop]]:
    return [Component("probing", build, requests)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(Probe, "probing", Probe),
        WorkerClass(EmbeddedProbe, "probing", EmbeddedProbe, embedded_in=PROBE),
    ]
