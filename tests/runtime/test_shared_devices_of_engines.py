"""Four devices with a limit, of four ranks and two replicas of two devices: no order of calls in a run exceeds it.

The roles are fakes in processes of the local cluster. A device is a directory, in which each file is an allocation; a
process sees its devices in CUDA_VISIBLE_DEVICES.
"""

from pathlib import Path

import pytest

from rlcore.errors import RlcoreError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing.packages import importable, write_package
from rlcore.testing.runs import run_settings
from rlcore.train import run_training

SOURCE = """
import os
from dataclasses import replace

from rlcore import ActorWorker, RolloutWorker, WeightsHandle, WorkerClass, hookimpl
from rlcore.testing.null import NullActor, NullReplica

LIMIT = 11


def devices(worker):
    root = worker.context.run_dir.parent.parent / "devices"
    return [root / name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]


def put(worker, name, size):
    for device in devices(worker):
        device.mkdir(parents=True, exist_ok=True)
        (device / f"{worker.context} {name}").write_text(str(size))
        held = {path.name: int(path.read_text() or 0) for path in device.iterdir()}
        if sum(held.values()) > LIMIT:
            raise RuntimeError(f"no room on device {device.name}: {held}")


def free(worker, *names):
    for device in devices(worker):
        for name in names:
            (device / f"{worker.context} {name}").unlink(missing_ok=True)


class Rank(NullActor):
    def setup(self):
        super().setup()
        put(self, "weights", 1)

    def begin_updates(self):
        put(self, "optimizer", 6)

    def end_updates(self):
        free(self, "optimizer")

    def weights(self, version, directory):
        put(self, "whole weights", 5)
        free(self, "whole weights")
        if self.context.rank:  # the first one writes
            return WeightsHandle(version, "directory", str(directory))
        return super().weights(version, directory)


class Engine(NullReplica):
    def setup(self):
        super().setup()
        put(self, "weights", 2)
        put(self, "cache", 6)

    async def sleep(self):
        await super().sleep()
        if self.context.config.train.seed != 1 + self.context.replica:
            free(self, "weights", "cache")

    async def load_weights(self, handle):
        put(self, "weights", 2)
        return await super().load_weights(handle)

    async def wake(self):
        put(self, "cache", 6)
        await super().wake()


def complete(config, section, request):
    return replace(request, pool="rollout", gpus=2 * request.gpus, device_frac=0.5)


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "spanning", Rank),
        WorkerClass(RolloutWorker, "spanning", Engine, isolated=True, complete=complete),
    ]
"""


def planned(directory: Path, seed: int) -> RunPlan:
    """`seed`: 1 plus the number of a replica that releases nothing while it sleeps; else all do."""
    settings = {
        "actor.backend": "spanning",
        "rollout.backend": "spanning",
        "actor.data_parallel": 4,
        "actor.dtype": "float32",
        "rollout.replicas": 2,
        "train.prompts_per_step": 4,
        "train.max_steps": 2,
        "train.seed": seed,
        "cluster.device": "cuda",
        "cluster.max_restarts": 0,
    }
    overrides = [f"{key}={value}" for key, value in run_settings(directory, 8, **settings).items()]
    with importable(directory / "site"):
        write_package(directory / "site", "spanning", SOURCE)
        hooks, loaded = configure([], overrides, ["null", "spanning"])
        plan = make_plan(loaded, hooks, Facts(cpus=4, gpus=4, gpu_memory_bytes=80 * 2**30))
        assert plan.colocated_roles == ("rollout",)
        run_training(plan)
    return plan


@pytest.mark.slow
def test_both_replicas_leave_their_two_devices_to_the_ranks_there(tmp_path: Path) -> None:
    planned(tmp_path, seed=9)
    found = {device.name: {path.name for path in device.iterdir()} for device in (tmp_path / "devices").iterdir()}
    for rank in range(4):
        engine = {f"rollout[{rank // 2}.0] {name}" for name in ("weights", "cache")}
        assert found[str(rank)] == {f"actor[0.{rank}] weights", *engine}


@pytest.mark.slow
@pytest.mark.parametrize("replica", [0, 1])
def test_the_devices_of_a_replica_that_keeps_its_memory_overflow(tmp_path: Path, replica: int) -> None:
    with pytest.raises(RlcoreError, match="no room on device") as caught:
        planned(tmp_path, seed=1 + replica)
    assert any(f"on device {device}" in str(caught.value) for device in (2 * replica, 2 * replica + 1))
