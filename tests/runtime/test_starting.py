"""The order in which workers start: together on different devices, one after another on the same ones."""

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from two_tools import planned

from rlcore.cluster.kit import ThreadWorkers
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.activity import PHASE, Activity, as_current
from rlcore.contracts.clusters import ClusterAbilities, Deadlines, PoolPlan, ProcessUse, WorkerPlan
from rlcore.errors import WorkerError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.runtime.starting import start_chains
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable

TOGETHER = ClusterAbilities(starts_together=True)
BOTH = 'all((directory / f"{name} begins").exists() for name in ("hammer", "saw"))'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as place:
        yield place


def with_workers(plan: RunPlan, abilities: ClusterAbilities, *placed: tuple[str, str, float, str]) -> RunPlan:
    """The plan with these roles: name, pool, devices, and the role in which it is embedded."""
    workers: dict[str, WorkerPlan] = {}
    for name, pool, gpus, host in placed:
        role = replace(plan.workers[0].request.role, name=name)
        within = workers[host].request.role if host else None
        request = replace(plan.workers[0].request, role=role, pool=pool, gpus=gpus, embedded_in=within)
        workers[name] = replace(plan.workers[0], request=request)
    pools = (
        PoolPlan("main", 1, 1, (), "test"),
        PoolPlan("rollout", 1, 1, (), "test"),
        PoolPlan("all", 0, 1, (), "test", colocates=("main", "rollout")),
    )
    return replace(
        plan, workers=tuple(workers.values()), pools=pools, cluster=replace(plan.cluster, abilities=abilities)
    )


@pytest.mark.parametrize(
    ("abilities", "placed", "chains"),
    [
        pytest.param(
            TOGETHER,
            [("actor", "main", 1.0, ""), ("rollout", "other", 1.0, ""), ("reference", "main", 1.0, "")],
            [["actor", "reference"], ["rollout"]],
            id="separate pools",
        ),
        pytest.param(
            TOGETHER,
            [("actor", "all", 1.0, ""), ("rollout", "rollout", 1.0, ""), ("judge", "reward", 1.0, "")],
            [["actor", "rollout"], ["judge"]],
            id="a union and its member",
        ),
        pytest.param(
            TOGETHER,
            [("actor", "main", 0.0, ""), ("critic", "main", 0.0, ""), ("rollout", "main", 0.0, "actor")],
            [["actor", "critic", "rollout"]],
            id="threads",
        ),
        pytest.param(
            TOGETHER,
            [("actor", "main", 1.0, ""), ("judge", "reward", 1.0, ""), ("rollout", "main", 1.0, "actor")],
            [["actor", "rollout"], ["judge"]],
            id="an embedded worker follows its host",
        ),
        pytest.param(
            replace(TOGETHER, processes=ProcessUse.ALL),
            [("actor", "main", 0.0, ""), ("critic", "main", 0.0, ""), ("rollout", "main", 0.0, "actor")],
            [["actor", "rollout"], ["critic"]],
            id="processes without devices",
        ),
        pytest.param(
            replace(TOGETHER, processes=ProcessUse.NONE),
            [("actor", "main", 1.0, ""), ("judge", "reward", 1.0, "")],
            [["actor", "judge"]],
            id="a cluster of threads",
        ),
        pytest.param(
            ClusterAbilities(processes=ProcessUse.ALL),
            [("actor", "main", 1.0, ""), ("judge", "reward", 1.0, "")],
            [["actor", "judge"]],
            id="a cluster that starts one role at a time",
        ),
    ],
)
def test_roles_on_different_devices_start_together(
    abilities: ClusterAbilities, placed: list[tuple[str, str, float, str]], chains: list[list[str]]
) -> None:
    plan = with_workers(plan_run([], SETTINGS, ["null"]), abilities, *placed)
    assert [[worker.request.role.name for worker in chain] for chain in start_chains(plan)] == chains


@pytest.mark.slow
def test_two_isolated_roles_start_at_the_same_time_and_the_log_says_how_long_each_took(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan, activity = planned(site, wait=BOTH), Activity("all")

    async def story() -> list[str]:
        async with launch(plan, tmp_path) as run:
            return list(run.groups)

    with caplog.at_level("INFO", "rlcore"), as_current(activity):
        assert asyncio.run(story()) == [worker.request.role.name for worker in plan.workers]
    started = [message for message in caplog.messages if re.fullmatch(r"\w+ started in \d+\.\d s", message)]
    assert sorted(line.split()[0] for line in started) == ["actor", "hammer", "rollout", "saw"]
    phases = [span.work.who for span in activity.take().spans() if span.work.kind == PHASE]
    assert any({"hammer", "saw"} <= set(re.split(r"[ ,]+", phase)) for phase in phases), phases
    assert phases[-1].startswith("starting reward")


def test_a_cluster_that_waits_for_its_resources_is_the_phase_of_the_run(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, activity, phases = planned(site, isolated=False), Activity(), list[str]()
    cluster: Any = plan.cluster.offer.cls
    really = cluster.open

    async def waiting(self: Any) -> None:
        phases.append(activity.phase)
        await really(self)

    monkeypatch.setattr(cluster, "open", waiting)
    activity.enter("loading libraries")

    async def story() -> None:
        async with launch(plan, tmp_path):
            pass

    with as_current(activity):
        asyncio.run(story())
    assert phases == ["opening cluster local"]


def test_threads_start_one_after_another(site: Path, tmp_path: Path) -> None:
    plan = planned(site, isolated=False)
    order: list[list[str]] = []
    tool: Any = next(worker.cls for worker in plan.workers if worker.request.role.name == "saw")
    really = tool.setup

    def setup(worker: Any) -> None:
        really(worker)
        order.append(sorted(path.name for path in tmp_path.glob("* begins")))

    tool.setup = setup

    async def story() -> None:
        async with launch(plan, tmp_path):
            assert threading.active_count() > 1

    asyncio.run(story())
    assert order == [["hammer begins"], ["hammer begins", "saw begins"]]


def test_threads_that_a_cluster_starts_together_keep_their_names(site: Path, tmp_path: Path) -> None:
    """The core does not, but the kit is for clusters that may."""
    plan = planned(site, wait=BOTH, isolated=False)
    tools = [worker for worker in plan.workers if worker.request.role.name in ("hammer", "saw")]

    async def story() -> list[str]:
        threads = ThreadWorkers(cluster_context(plan, tmp_path, Deadlines()))
        try:
            return [
                replica.name for replica in await asyncio.gather(*(threads.start(tool, 0, "cpu") for tool in tools))
            ]
        finally:
            await threads.close()

    assert asyncio.run(story()) == ["hammer[0]", "saw[0]"]


@pytest.mark.slow
def test_a_role_that_does_not_start_ends_the_start_of_the_others_at_once(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = 'if self.context.role == "saw": raise ValueError("no teeth")\n            time.sleep(3600)'
    plan = planned(site, wait=BOTH, then=fails)

    async def story() -> None:
        async with launch(plan, tmp_path):
            pytest.fail("it was started")

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(WorkerError, match=r"saw\[0\]\.setup\(\): ValueError: no teeth"):
        asyncio.run(asyncio.wait_for(story(), 60))
    _, alive = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=5)
    assert not [process for process in alive if "child_main" in " ".join(process.cmdline())]
    assert not [message for message in caplog.messages if "took longer than" in message], "its close() was waited for"
