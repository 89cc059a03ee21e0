"""Cases of the scorecard in one process that is connected to Ray, for `test_ray_cases.py`: ray_cases.py HEAD DIRECTORY.

It writes its events to DIRECTORY/told.json.
"""

import asyncio
import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from rlcore_ray.cluster import RayCluster

from rlcore.cli import main
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.errors import WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.testing.rewards import make_trajectory, score_all
from rlcore.testing.runs import differing, run_settings
from rlcore.train import checkpoint
from rlcore.types import Lane, RewardStatus, ScoredTrajectory

HEAD, HERE = sys.argv[1], Path(sys.argv[2])
PLUGIN = '''
import asyncio, errno, os, threading, time

from rlcore import RawScore, RewardReplica, WorkerClass, hookimpl
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.components import Component
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.testing.null import NullActor
from rlcore.contracts.workers import Worker

RLCORE_API = "1"


class WhoReplica(RewardReplica):
    """Answers with the id of its process."""

    def setup(self):
        self.pause_s = 0.02

    async def score(self, requests):
        await asyncio.sleep(self.pause_s)
        return [RawScore(request.id, float(os.getpid())) for request in requests]

    async def health(self):
        return "fine"


class UnevenReplica(WhoReplica):
    """The last of three is 20 times slower, by 20 pauses: a busy machine lengthens each as those of the others."""

    def setup(self):
        self.pause_s = 0.05

    async def score(self, requests):
        for _ in range(19 if self.context.replica == 2 else 0):
            await asyncio.sleep(self.pause_s)
        return await super().score(requests)


class Full(NullActor):
    """The disk is full when the second checkpoint is written."""

    def snapshot(self):
        self.is_full = self.version >= 2
        return super().snapshot()

    async def write_snapshot(self, directory):
        if not self.is_full:
            await super().write_snapshot(directory)
            return
        (directory / "model").mkdir(parents=True)
        (directory / "model" / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / "model" / "logits_V.npy"))


class Sibling(Worker):
    """Another interface, offered for the backend in use."""

    def setup(self):
        pass


class Probe(Worker):
    def setup(self):
        pass

    def where(self):
        return os.getpid()

    def stuck(self):
        time.sleep(3600)

    def take(self, value):
        return None

    def lock(self):
        return threading.Lock()

    async def locks(self, num):
        for index in range(num):
            yield threading.Lock() if index == 2 else index

    async def count(self, num):
        for index in range(num):
            yield index
            await asyncio.sleep(0.01)


PROBE = Role("probe", Probe)


@hookimpl
def rlcore_agent_loops():
    asks = [WorkerRequest(PROBE, "p", cpus=0.1, isolated=True)]
    return [Component("probing", lambda context: None, lambda config, section: asks)]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(RewardReplica, "who", WhoReplica),
        WorkerClass(RewardReplica, "uneven", UnevenReplica),
        WorkerClass(ActorWorker, "full", Full),
        WorkerClass(Sibling, "misfit", Sibling),
        WorkerClass(Probe, "p", Probe),
    ]
'''
ON_RAY = {"plugins.ray": "{}"}
HOW = {"cluster.threads": 1, "cluster.max_restarts": 2}


def values(name: str, **more: Any) -> list[str]:
    """Overrides of a run of that name."""
    settings = run_settings(HERE, 16, **{"train.name": name, "rollout.backend": "null_replica"} | HOW | more)
    settings |= {} if "cluster.backend" in more else ON_RAY
    return [f"{key}={value}" for key, value in settings.items()]


def rlcore(name: str, **more: Any) -> dict[str, Any]:
    """Exit code and last line of `rlcore train`."""
    output = io.StringIO()
    plugins = ["--plugin", "null", *(["--plugin", str(HERE / "cases.py")] if "plugin" in more else [])]
    more.pop("plugin", None)
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
        code = main(["train", *plugins, *values(name, **more)])
    lines = output.getvalue().strip().splitlines() or [""]
    return {"code": code, "said": lines[-1], "lines": len(lines)}


def rollout_dies() -> dict[str, Any]:
    """Case 22."""
    steps = {"train.max_steps": 3, "plugins.null.token_s": 0.01}
    whole = rlcore("whole", **steps | {"cluster.backend": "local"})
    died = rlcore("died", **steps | {"plugins.null.die_at_token": 3})
    runs = HERE / "runs"
    marked = (runs / "died" / "a replica has died 1").exists()
    return {
        "codes": [whole["code"], died["code"]],
        "died": marked,
        "differing": differing(runs / "whole", runs / "died"),
    }


def disk_full() -> dict[str, Any]:
    """Case 33."""
    full = {"plugin": True, "actor.backend": "full", "checkpoint.every_steps": 1, "train.max_steps": 4}
    results = rlcore("full", **full)
    newest = checkpoint.latest(HERE / "runs" / "full")
    return results | {"last": checkpoint.load(newest).step if newest else None, "path": str(newest)}


def models(backend: str) -> dict[str, Any]:
    """Settings of three replicas of a reward model."""
    return {
        "plugins.reward_loop": json.dumps(
            {
                "rewards": {"liked": {"kind": "model", "served_by": "reward"}},
                "models": {
                    "reward": {
                        "path": "none",
                        "backend": backend,
                        "replicas": 3,
                        "cpus": 0.3,
                        "health_s": 0.1,
                        "concurrency": 12,
                    }
                },
            }
        ),
    }


def replicas(name: str, backend: str) -> Any:
    """The plan of a run with three replicas of a reward model on Ray."""
    overrides = [value for value in values(name, **models(backend)) if not value.startswith("reward.functions")]
    return plan_run([], overrides, ["null", str(HERE / "cases.py")])


def processes(scored: list[ScoredTrajectory]) -> list[int]:
    """The process that scored each sample."""
    return [int(sample.reward.components["liked"]) for sample in scored]


async def replica_killed() -> dict[str, Any]:
    """Case 7."""
    samples = [make_trajectory(index // 4, index % 4) for index in range(60)]
    async with launch(replicas("who", "who"), HERE / "runs" / "who") as live:
        first = processes(await score_all(live.reward, samples, Lane.TRAIN))
        victim = min(first)
        pending = asyncio.create_task(score_all(live.reward, samples, Lane.TRAIN))
        await asyncio.sleep(0.02)
        os.kill(victim, signal.SIGKILL)
        second = await pending
        numbers = live.reward.metrics()
        async with asyncio.timeout(60):
            while len(set(processes(await score_all(live.reward, samples, Lane.TRAIN)))) < 3:
                await asyncio.sleep(0.1)
        after = live.reward.metrics()
    return {
        "first": len(set(first)),
        "good": sum(sample.reward.status is RewardStatus.OK for sample in second),
        "ids": len({sample.trajectory.id for sample in second}),
        "victim": processes(second).count(victim),
        "ejections": numbers["reward/num_ejections"],
        "ejected": after["reward/ejected"],
    }


async def replica_slow() -> dict[str, Any]:
    """Case 8."""
    samples = [make_trajectory(index // 8, index % 8) for index in range(600)]
    async with launch(replicas("uneven", "uneven"), HERE / "runs" / "uneven") as live:
        counts: dict[int, int] = {}
        for process in processes(await score_all(live.reward, samples, Lane.TRAIN)):
            counts[process] = counts.get(process, 0) + 1
    return {"counts": sorted(counts.values())}


async def probed() -> dict[str, Any]:
    """A worker whose loop is stuck, and a stream while the controller's loop is."""
    overrides = values("probed", **{"rollout.agent": "probing", "rollout.backend": "null"})
    plan = plan_run([], overrides, ["null", str(HERE / "cases.py")])
    probe_class = sys.modules["rlcore_file_cases"].Probe
    cluster = RayCluster(cluster_context(plan, HERE, Deadlines(setup_s=60, call_s=3, close_s=0.1)))
    results: dict[str, Any] = {"events": []}
    try:
        await cluster.open()
        [group] = [await cluster.start(worker) for worker in plan.workers if worker.asked_by != "core"]
        restored = asyncio.Event()

        def seen(event: Any) -> None:
            results["events"].append([event.kind, event.reason])
            if event.kind == "restored":
                restored.set()

        group.on_event(seen)
        [probe] = group.replicas

        async def block() -> None:
            while True:
                time.sleep(0.15)  # longer than close_s
                await asyncio.sleep(0.001)

        before = await probe.call(probe_class.where)
        blocking = asyncio.create_task(block())
        results["items"] = [value async for value in probe.stream(probe_class.count, 30)]
        blocking.cancel()
        results["crossing"] = await uncrossed(probe, probe_class)
        results["stayed"] = before == await probe.call(probe_class.where)
        try:
            await probe.call(probe_class.stuck)
        except WorkerError as error:
            results["stuck"] = str(error)
        await asyncio.wait_for(restored.wait(), 60)
        results["replaced"] = before != await probe.call(probe_class.where)
    finally:
        await cluster.close()
    return results


async def uncrossed(probe: Any, probe_class: Any) -> list[Any]:
    """The items and errors of calls with a value that cannot be pickled, or unpickled in the worker's process."""
    module = ModuleType("only_here")
    exec("class Thing:\n    pass", vars(module))
    vars(module)["Thing"].__module__ = module.__name__
    sys.modules[module.__name__] = module
    found: list[Any] = []
    for call in (probe.call(probe_class.take, vars(module)["Thing"]()), probe.call(probe_class.lock)):
        try:
            found.append(await call)
        except WorkerError as error:
            found.append(str(error))
    try:
        async for value in probe.stream(probe_class.locks, 4):
            found.append(value)
    except WorkerError as error:
        found.append(str(error))
    return found


def free() -> float:
    """CPUs that are free once ending processes have ended."""
    ends_at = time.monotonic() + 10
    while time.monotonic() < ends_at and ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        time.sleep(0.1)
    return float(ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0))


def story() -> dict[str, Any]:
    """Everything that happened, by case."""
    (HERE / "cases.py").write_text(PLUGIN)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(HEAD, configure_logging=False, log_to_driver=False)
    results = {
        "misfit": rlcore("misfit", plugin=True, **models("misfit")) | {"held": free()},
        "joined": rlcore("joined", **{"plugins.ray.address": HEAD}),
        "rollout": rollout_dies(),
        "forgets": rlcore("forgets", **{"plugins.null.forget_version": 2, "train.max_steps": 4}),
        "full": disk_full(),
        "who": asyncio.run(replica_killed()),
        "uneven": asyncio.run(replica_slow()),
        "probe": asyncio.run(probed()),
    }
    results["held"] = free()
    ray.shutdown()
    return results


if __name__ == "__main__":
    (HERE / "told.json").write_text(json.dumps(story()))
