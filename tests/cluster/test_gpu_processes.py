"""Workers on GPUs run in processes that see their own devices; here the devices are words in the environment."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

SOURCE = """
    import os
    from rlcore import Component, Role, Worker, WorkerClass, WorkerRequest, hookimpl

    class Probe(Worker):
        def setup(self):
            pass

        def seen(self):
            names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")
            return os.getpid(), self.context.device, self.context.threads, [os.environ.get(name) for name in names]

    class Inner(Probe):
        pass

    PROBE = Role("probe", Probe)

    def asked(config, section):
        gpus = 1.0 if config.cluster.device == "cuda" else 0.0
        return [
            WorkerRequest(PROBE, "p", "probes", replicas=2, gpus=gpus),
            WorkerRequest(Role("inner", Inner), "p", "probes", replicas=2, gpus=gpus),
        ]

    @hookimpl
    def rlcore_agent_loops():
        return [Component("probing", lambda context: None, asked)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Probe, "p", Probe), WorkerClass(Inner, "p", Inner, embedded_in=PROBE)]
"""
GPUS = Facts(cpus=6, gpus=3)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    with importable(tmp_path / "site") as site:
        write_package(site, "gpu_probe", SOURCE)
        import gpu_probe  # type: ignore[import-not-found]

        yield gpu_probe


def planned(*overrides: str) -> RunPlan:
    settings = [*SETTINGS, "rollout.agent=probing", "cluster.pools.probes.nodes=1", *overrides]
    hooks, loaded = configure([], settings, ["null", "gpu_probe"], machine=GPUS)
    return make_plan(loaded, hooks, GPUS)


def seen(plugin: ModuleType, run_dir: Path, *overrides: str) -> dict[str, list[Any]]:
    """Devices that every replica of each role sees."""

    async def ask() -> dict[str, list[Any]]:
        plan = planned(*overrides)
        deadlines = Deadlines(setup_s=60.0, call_s=60.0, close_s=10.0)
        cluster = LocalCluster(cluster_context(plan, run_dir, deadlines))
        try:
            found = {}
            for worker in plan.workers:
                if worker.asked_by != "core":
                    group = await cluster.start(worker)
                    found[worker.request.role.name] = [
                        await replica.call(plugin.Probe.seen) for replica in group.replicas
                    ]
            return found
        finally:
            await cluster.close()

    return asyncio.run(ask())


@pytest.mark.slow
def test_a_worker_on_a_gpu_is_a_process_with_its_device_and_its_share_of_the_cores(
    plugin: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = seen(plugin, tmp_path)
    pids = [pid for pid, *_ in found["probe"]]
    assert len({*pids, os.getpid()}) == 3
    assert [pid for pid, *_ in found["inner"]] == pids, "an embedded worker lives in its host's process"
    rest = [["cuda:0", 2, [name, "2", "expandable_segments:True"]] for name in ("GPU-b", "GPU-c")]
    assert [list(worker[1:]) for worker in found["probe"]] == rest
    assert [list(worker[1:]) for worker in found["inner"]] == rest


@pytest.mark.parametrize("override", ["cluster.device=cpu", "cluster.in_process=true"])
def test_on_a_cpu_and_for_a_debugger_it_is_a_thread(plugin: ModuleType, tmp_path: Path, override: str) -> None:
    found = seen(plugin, tmp_path, override)
    assert {pid for workers in found.values() for pid, *_ in workers} == {os.getpid()}
    device = "cpu" if override.endswith("cpu") else "cuda:1"
    assert found["probe"][0][1] == device
    assert found["probe"][0][2] == (3 if device == "cpu" else 2), "two replicas share six cores"


def test_the_plan_tells_a_cluster_of_no_devices_on_a_cpu(tmp_path: Path) -> None:
    hooks, loaded = configure([], [*SETTINGS, "cluster.device=cpu"], ["null"], machine=GPUS)
    plan = make_plan(loaded, hooks, GPUS)
    assert cluster_context(plan, tmp_path, Deadlines()).gpus == 0
    hooks, loaded = configure([], SETTINGS, ["null"], machine=GPUS)
    assert cluster_context(make_plan(loaded, hooks, GPUS), tmp_path, Deadlines()).gpus == 3
