"""Results of the wrong type name worker and method, in a thread as in a process."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.errors import WorkerError
from rlcore.launch import Deadlines, plan_run
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

SOURCE = """
    from abc import abstractmethod
    from collections.abc import AsyncIterator

    from rlcore.hookspecs import hookimpl
    from rlcore.plan import Component, Role, WorkerClass, WorkerRequest
    from rlcore.workers import Worker

    class Odd(Worker):
        @abstractmethod
        def number(self) -> int: ...
        @abstractmethod
        def sizes(self) -> dict[str, float]: ...
        @abstractmethod
        def items(self) -> AsyncIterator[int]: ...
        @abstractmethod
        def others(self) -> AsyncIterator[int]: ...

    class OddWorker(Odd):
        def setup(self): ...
        def number(self): return "three"
        def sizes(self): return None
        def items(self): return self._late()
        def others(self): return [1, 2]
        async def _late(self): return [1, 2]

    THREAD, PROCESS = Role("odd_thread", Odd), Role("odd_process", Odd)

    @hookimpl
    def rlcore_agent_loops():
        asks = [WorkerRequest(THREAD, "odd"), WorkerRequest(PROCESS, "odd", isolated=True)]
        return [Component("odd", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Odd, "odd", OddWorker)]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """The module of the plugin with the odd workers."""
    with importable(tmp_path / "site") as site:
        write_package(site, "odd_workers", SOURCE)
        import odd_workers  # type: ignore[import-not-found]

        yield odd_workers


async def refused(replica: Any, plugin: ModuleType) -> list[str]:
    """What is said of each method."""
    said = []
    for method in (plugin.Odd.number, plugin.Odd.sizes):
        with pytest.raises(WorkerError) as caught:
            await replica.call(method)
        said.append(str(caught.value))
    for method in (plugin.Odd.items, plugin.Odd.others):
        with pytest.raises(WorkerError) as caught:
            await anext(replica.stream(method))
        said.append(str(caught.value))
    return said


def test_results_of_the_wrong_type_name_worker_and_method(plugin: ModuleType, tmp_path: Path) -> None:
    plan = plan_run([], [*SETTINGS, "rollout.agent=odd"], ["null", "odd_workers"])

    async def story() -> dict[str, list[str]]:
        cluster = LocalCluster(plan, tmp_path, Deadlines(setup_s=60.0, call_s=30.0, close_s=5.0))
        try:
            ours = [each for each in plan.workers if each.request.role.name.startswith("odd")]
            groups = {each.request.role.name: await cluster.start(each) for each in ours}
            return {name: await refused(group.replicas[0], plugin) for name, group in groups.items()}
        finally:
            await cluster.close()

    for role, said in asyncio.run(story()).items():
        assert said == [
            f"{role}[0].number() returned str; needs int, as Odd.number() declares",
            f"{role}[0].sizes() returned None; needs dict, as Odd.sizes() declares",
            f"{role}[0].items(): returned coroutine; needs an async generator, an `async def` with `yield`",
            f"{role}[0].others(): returned list; needs an async generator, an `async def` with `yield`",
        ]
