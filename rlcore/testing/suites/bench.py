"""Starts worker classes on threads of this process, as the local cluster does, without a plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.cluster.host import named
from rlcore.cluster.replica import ReplicaGroup
from rlcore.cluster.thread import WorkerThread
from rlcore.cluster.thread_workers import ThreadReplica
from rlcore.config import RunConfig
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.workers import Worker, WorkerContext

DEADLINES = Deadlines(setup_s=60.0, call_s=30.0, close_s=10.0)


class Bench:
    """Workers of one configuration; `close` ends all of them."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        references: Mapping[str, str],
        specs: Mapping[str, Any],
        deadlines: Deadlines = DEADLINES,
    ) -> None:
        """`specs` maps a role to its `WorkerContext.spec`."""
        self.run_dir = run_dir
        self._config, self._references, self._specs, self._deadlines = config, references, specs, deadlines
        self._started: list[ThreadReplica[Any]] = []
        self._threads: list[WorkerThread] = []

    def context(self, role: str, section: Any, host: Worker | None = None) -> WorkerContext:
        """The context of the only worker of a role, on the CPU."""
        return WorkerContext(
            role=role,
            replica=0,
            rank=0,
            num_ranks=1,
            config=self._config,
            section=section,
            targets=self._references,
            run_dir=self.run_dir,
            seed=self._config.train.seed,
            threads=1,
            device="cpu",
            host=host,
            spec=self._specs.get(role),
        )

    async def start(
        self, cls: type[Any], role: str, section: Any, host: ThreadReplica[Any] | None = None
    ) -> ThreadReplica[Any]:
        """A worker that is set up on a thread or on that of its host; WorkerError naming the failure."""
        name = f"{role}[0]"
        if host is None:
            self._threads.append(WorkerThread(name).start())
        thread = host.thread if host else self._threads[-1]
        context = self.context(role, section, host.worker if host else None)

        def build() -> None:
            with named(f"{name}.setup()"):
                worker = cls(context)
                self._started.append(ThreadReplica(worker, cls, thread, name, self._deadlines))
                worker.setup()

        await thread.run(build, "setup()", self._deadlines.setup_s)
        return self._started[-1]

    async def group(
        self, cls: type[Any], role: str, section: Any, host: ThreadReplica[Any] | None = None
    ) -> ReplicaGroup[Any]:
        """A role with one worker."""
        return ReplicaGroup([await self.start(cls, role, section, host)])

    async def close(self) -> None:
        """Close every worker, the last one first, and end the threads; WorkerError when a `close` raises."""
        try:
            for replica in reversed(self._started):
                with named(f"{replica.name}.close()"):
                    await replica.thread.run(replica.worker.close, "close()", self._deadlines.close_s)
        finally:
            for thread in reversed(self._threads):
                await thread.stop(self._deadlines.close_s)
            self._started.clear()
            self._threads.clear()
