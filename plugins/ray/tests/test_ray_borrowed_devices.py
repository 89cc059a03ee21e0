"""Replicas of several devices on those of the actor's ranks: each borrows the devices of its neighbours in a bundle."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.runs import run_settings

PLUGIN = '''
"""Ranks and replicas that write which devices they see; a replica has `rollout.max_rows` devices."""
RLCORE_API = "1"

import os
from dataclasses import replace

from rlcore import ActorWorker, RolloutWorker, WorkerClass, hookimpl
from rlcore.testing.null import NullActor, NullReplica


def write(worker):
    (worker.context.run_dir / str(worker.context)).write_text(os.environ["CUDA_VISIBLE_DEVICES"])


class Rank(NullActor):
    def setup(self):
        write(self)


class Engine(NullReplica):
    def setup(self):
        write(self)


def complete(config, section, request):
    return replace(request, pool="rollout", gpus=config.rollout.max_rows * request.gpus)


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "wide", Rank),
        WorkerClass(RolloutWorker, "wide", Engine, isolated=True, complete=complete),
    ]
'''


def planned(directory: Path, ranks: int, replicas: int, devices: int) -> RunPlan:
    (directory / "wide.py").write_text(PLUGIN)
    settings = {
        "actor.backend": "wide",
        "rollout.backend": "wide",
        "actor.data_parallel": ranks,
        "rollout.replicas": replicas,
        "rollout.max_rows": devices,
        "train.prompts_per_step": ranks,
        "cluster.device": "cuda",
        "cluster.layout": "colocated",
        "actor.dtype": "float32",
        "plugins.ray.object_store_gib": 0.1,
    }
    overrides = [f"{key}={value}" for key, value in run_settings(directory, 8, **settings).items()]
    hooks, loaded = configure([], overrides, ["null", "ray", str(directory / "wide.py")])
    return make_plan(loaded, hooks, Facts(cpus=8, gpus=4))


def slots(plan: RunPlan, directory: Path) -> dict[str, list[tuple[int, float, Sequence[int], bool]]]:
    placement = pytest.importorskip("rlcore_ray.placement")
    found = placement.slots_of(cluster_context(plan, directory, Deadlines()))
    assert placement.bundles_of(found)["main"] == [{"CPU": 2.0, "GPU": 2.0}] * 2
    return {role: [(s.bundle, s.gpus, tuple(s.spots), s.borrows) for s in ranks] for role, ranks in found.items()}


def test_the_devices_of_a_replica_are_those_of_neighbouring_ranks_in_one_bundle(tmp_path: Path) -> None:
    found = slots(planned(tmp_path, 4, 2, 2), tmp_path)
    assert found["actor"] == [(number // 2, 1.0, (number,), False) for number in range(4)]
    assert found["rollout"] == [(0, 0.0, (0, 1), True), (1, 0.0, (2, 3), True)]


def test_a_replica_on_devices_without_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="role 'rollout' has 2 GPUs in one process, and Ray cannot share them"):
        planned(tmp_path, 3, 2, 2)


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("machine")
@NEEDS_RAY
def test_a_replica_sees_the_devices_of_its_ranks(tmp_path: Path) -> None:
    """In a separate process, since Ray keeps descriptors open in the one that started it."""
    start = f"import pathlib, {__name__} as test; test.start(pathlib.Path({str(tmp_path)!r}))"
    command = [sys.executable, "-c", start]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    seen = {path.name: path.read_text().split(",") for path in tmp_path.glob("*[[]*[]]")}
    ranks = [seen[f"actor[0.{number}]"] for number in range(4)]
    assert sorted(device for devices in ranks for device in devices) == ["0", "1", "2", "3"]
    assert seen["rollout[0.0]"] == ranks[0] + ranks[1]
    assert seen["rollout[1.0]"] == ranks[2] + ranks[3]


def start(tmp_path: Path) -> None:
    """Start ranks and replicas, and end them."""
    from rlcore_ray.cluster import RayCluster

    plan = planned(tmp_path, 4, 2, 2)
    cluster = RayCluster(cluster_context(plan, tmp_path, Deadlines(setup_s=120.0)))

    async def run() -> None:
        try:
            await cluster.open()
            for worker in plan.workers:
                if worker.request.role.name in ("actor", "rollout"):
                    await cluster.start(worker)
        finally:
            await cluster.close()

    asyncio.run(run())
