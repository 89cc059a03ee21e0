"""Nodes that leave a Ray cluster: the run ends in one line where the actor was on it; a server is restarted."""

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.runs import differing, run_settings

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("machine"),
    NEEDS_RAY,
]

DEADLINE_S = 60.0
NODES = """
import os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import psutil
from ray.cluster_utils import Cluster
cluster, nodes = Cluster(), {}

def join(cpus):
    node = cluster.add_node(num_cpus=cpus, object_store_memory=100 * 2**20, include_dashboard=False)
    nodes[node.all_processes["raylet"][0].process.pid] = node

for cpus in map(int, sys.argv[1:]):
    join(cpus)
cluster.wait_for_nodes(60)
print("head:", cluster.address, flush=True)
for line in sys.stdin:
    command, number = line.split()
    if command == "join":
        join(int(number))
    else:
        [raylet] = [process.pid for process in psutil.Process(int(number)).parents() if process.pid in nodes]
        cluster.remove_node(nodes.pop(raylet), allow_graceful=False)
    cluster.wait_for_nodes(60)
    print(f"done: {command}", flush=True)
cluster.shutdown()
"""


class Nodes:
    """A cluster that the test controls."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.head = self.wait_for_line("head: ")

    def wait_for_line(self, start: str) -> str:
        """The rest of the line that begins so."""
        for line in self.process.stdout or ():
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise AssertionError(f"the cluster ended before it said '{start}'")

    def tell(self, command: str, number: int) -> None:
        """Send 'leave' with a process whose node is to, or 'join' with the CPUs of a new node; wait for its line."""
        print(command, number, file=self.process.stdin, flush=True)


@pytest.fixture(scope="module")
def token() -> Iterator[None]:
    """ray.init() would make a token and keep it; these clusters are given one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


SOON = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "3"}
"""With Ray's own settings it takes 15 s until a node is known to have left."""


@contextmanager
def cluster_of(*cpus: int, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[Nodes]:
    """A cluster of nodes with so many CPUs each, of which the first one, the head, stays."""
    command = [sys.executable, "-c", NODES, *map(str, cpus)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield Nodes(process)
        finally:
            process.communicate("", timeout=DEADLINE_S)


def wait_for(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    ends_at = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.05)


@contextmanager
def training(directory: Path, name: str, **more: Any) -> Iterator["subprocess.Popen[str]"]:
    """`rlcore train` as a process."""
    settings = {"train.name": name, "train.max_steps": 400, "checkpoint.every_steps": 1, **more}
    plugins = [part for path in ("null", *directory.glob("*.py")) for part in ("--plugin", str(path))]
    command = [sys.executable, "-m", "rlcore", "train", *plugins]
    command += [f"{key}={value}" for key, value in run_settings(directory, 400, **settings).items()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def checkpoints(directory: Path, name: str) -> list[Path]:
    """Those of a run."""
    return list((directory / "runs" / name / "checkpoints").glob("step_*"))


def has(driver: "subprocess.Popen[str]", holds: Callable[[], bool]) -> Callable[[], bool]:
    """True if it holds; fails when the driver has ended before."""

    def check() -> bool:
        assert driver.poll() is None, driver.communicate()[1]
        return holds()

    return check


def test_a_node_that_leaves_with_the_actor_ends_the_run_with_the_last_checkpoint(token: None, tmp_path: Path) -> None:
    with cluster_of(0, 2) as nodes:
        joined = {"plugins.ray.address": nodes.head}
        with training(tmp_path, "run", **joined, **{"plugins.null.update_s": 0.2}) as driver:
            wait_for("two checkpoints", has(driver, lambda: len(checkpoints(tmp_path, "run")) >= 2))
            workers = [pid for pid in descendants(nodes.process.pid) if b"ActorHost" in command_of(pid)]
            everything = descendants(driver.pid)
            nodes.tell("leave", workers[0])
            _, errors = driver.communicate(timeout=DEADLINE_S)
        assert driver.returncode == 2, errors
        [last] = errors.strip().splitlines()
        assert "actor[0]" in last, last
        assert "ended: " in last
        assert "node" in last
        saved = re.search(r"last checkpoint: (\S+/checkpoints/step_\d+), continue with --resume", last)
        assert saved is not None, last
        assert json.loads((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[0])
        assert (Path(saved[1]) / "model" / "logits_V.npy").is_file()
        nodes.wait_for_line("done: leave")
        wait_for("the end of every process", lambda: not any(map(is_running, [*workers, *everything])), 20)


SERVERS = '''
"""A rollout and a reward replica that tell who they are, and hold their work while a file says so."""
RLCORE_API = "1"

import asyncio, os

from rlcore import RawScore, RewardReplica, WorkerClass, hookimpl
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullReplica


async def held(worker):
    hold = worker.context.run_dir / f"hold {os.getpid()}"
    if hold.exists():
        hold.rename(f"{hold}, held")
        await asyncio.sleep(3600)


class Telling(NullReplica):
    def setup(self):
        super().setup()
        print("process", os.getpid())

    async def generate(self, requests):
        if requests[0].n > 1:  # not the check of the weights
            await held(self)
        async for completion in super().generate(requests):
            yield completion


class Judge(RewardReplica):
    def setup(self):
        print("process", os.getpid())

    async def score(self, requests):
        await held(self)
        return [RawScore(request.id, float(sum(map(ord, request.messages[-1]["content"])) % 7)) for request in requests]

    async def health(self):
        return "fine"


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(RolloutWorker, "telling", Telling, isolated=True),
        WorkerClass(RewardReplica, "telling", Judge, isolated=True),
    ]
'''
JUDGED = {
    "plugins.reward_loop": json.dumps(
        {
            "rewards": {"liked": {"kind": "model", "served_by": "judge"}},
            "models": {"judge": {"path": "none", "backend": "telling", "health_s": 0.1, "deadline_s": 45}},
        }
    ),
    "plugins.null.update_s": 0.5,
    "cluster.max_restarts": 2,
}
IN_A_POOL = {"rollout.backend": "telling", "rollout.pool": "rollout"}


def log_of(directory: Path, name: str) -> str:
    """A run's log."""
    path = directory / "runs" / name / "log.txt"
    return path.read_text() if path.exists() else ""


def process_of(directory: Path, name: str, replica: str) -> int:
    """The process that a replica had last."""
    return int(re.findall(rf" {re.escape(replica)}: process (\d+)\n", log_of(directory, name))[-1])


def at_work(directory: Path, driver: "subprocess.Popen[str]", name: str, replica: str) -> int:
    """The process of a replica that holds a request from now on."""
    records = directory / "runs" / name / "metrics.jsonl"
    wait_for("a step", has(driver, lambda: records.exists() and bool(records.read_text())))
    process = process_of(directory, name, replica)
    hold = directory / "runs" / name / f"hold {process}"
    hold.touch()
    wait_for("a request", has(driver, lambda: Path(f"{hold}, held").exists()))
    return process


@pytest.mark.timeout(600)
def test_servers_whose_nodes_leave_are_restarted_elsewhere_or_the_run_says_who_finds_no_room(
    token: None, tmp_path: Path
) -> None:
    (tmp_path / "servers.py").write_text(SERVERS)
    whole = {**JUDGED, **IN_A_POOL, "train.max_steps": 12}
    with training(tmp_path, "here", **whole) as driver:
        assert driver.wait(DEADLINE_S) == 0, driver.communicate()[1]
    with cluster_of(0, 1, 1, 1, 1, environment=SOON) as nodes:
        joined = {"plugins.ray.address": nodes.head, "plugins.ray.placement_s": 30}
        with training(tmp_path, "there", **{**whole, **joined}) as driver:
            nodes.tell("leave", at_work(tmp_path, driver, "there", "rollout[0]"))
            nodes.wait_for_line("done: leave")
            wait_for("the rollout", has(driver, lambda: "rollout[0]: restarted" in log_of(tmp_path, "there")))
            judge = at_work(tmp_path, driver, "there", "judge[0]")
            for command, number in (("join", 1), ("leave", judge)):
                nodes.tell(command, number)
                nodes.wait_for_line(f"done: {command}")
            assert driver.wait(DEADLINE_S) == 0, driver.communicate()[1]
        log = log_of(tmp_path, "there")
        assert re.search(r"rollout\[0\]\.generate\(\): .*; 2 requests are asked again", log)
        assert "judge[0]: restarted" in log
        assert differing(tmp_path / "runs" / "here", tmp_path / "runs" / "there") == []
        small = {**JUDGED, **joined, "plugins.ray.placement_s": 8, "cluster.max_restarts": 1}
        small |= {"plugins.reward_loop.models.judge.deadline_s": 20, "reward.error_budget_frac": 0}
        for name, replica, pool, more, warned in (
            ("rollout", "rollout[0]", "rollout", IN_A_POOL, []),
            ("judge", "judge[0]", "reward", {}, ["judge[0] is left alone"]),
        ):
            with training(tmp_path, name, **{**small, **more}) as driver:
                nodes.tell("leave", at_work(tmp_path, driver, name, replica))
                _, errors = driver.communicate(timeout=DEADLINE_S)
            nodes.wait_for_line("done: leave")
            assert driver.returncode == 2, errors
            *before, last = errors.strip().splitlines()
            assert [line.partition(" (")[0] for line in before] == warned, before
            assert f"{replica}: " in last, last
            assert f"its restart failed: cluster: pool '{pool}' wants 1 CPU in 1 bundles" in last, last
            assert "the cluster has CPU " in last
            assert re.search(r"last checkpoint: \S+/checkpoints/step_\d+, continue with --resume", last), last


def command_of(process: int) -> bytes:
    """A process's command line; nothing when it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


class Lost:
    """An actor of which every call ends in the next of these errors."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = iter(errors)
        self.watch = self

    async def remote(self) -> None:
        """A call of it."""
        raise next(self._errors)


def test_an_actor_that_cannot_be_reached_is_reported_with_the_reason_that_ray_finds_later() -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError
    from rlcore_ray.body import ActorBody
    from rlcore_ray.output import ActorOutput

    unreachable = ActorUnavailableError("The actor is temporarily unavailable", b"a" * 16)
    died = ActorDiedError()
    body = ActorBody("actor[0]", [Lost(unreachable, unreachable, died)], ActorOutput())
    reason = asyncio.run(body.ended())
    assert reason == f"its actor ended: ActorDiedError: {str(died).rstrip('.')} (actor[0])"
    assert not body.alive
