"""A node that leaves a Ray cluster with the actor on it ends the run in one line, and nothing stays behind."""

import asyncio
import json
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.runs import run_settings

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("machine"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

DEADLINE_S = 60.0
NODES = """
import os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=0, object_store_memory=100 * 2**20, include_dashboard=False)
node = cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
cluster.wait_for_nodes(60)
print("head:", cluster.address, flush=True)
sys.stdin.readline()
cluster.remove_node(node, allow_graceful=False)
print("left", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator["subprocess.Popen[str]"]:
    """A cluster whose head has no room for workers, and a node that leaves when a line comes."""
    # ray.init() would make a token and keep it; this cluster is given one.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with subprocess.Popen(
        [sys.executable, "-c", NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.communicate("", timeout=DEADLINE_S)


def said(process: "subprocess.Popen[str]", start: str) -> str:
    """The rest of the line that begins so."""
    for line in process.stdout or ():
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"the cluster ended before it said '{start}'")


def wait_for(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    ends_at = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.05)


def test_a_node_that_leaves_with_the_actor_ends_the_run_with_the_last_checkpoint(
    nodes: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    more = {
        "train.name": "run",
        "train.max_steps": 400,
        "checkpoint.every_steps": 1,
        "plugins.null.update_s": 0.2,
        "cluster.backend": "ray",
        "cluster.address": said(nodes, "head: "),
    }
    command = [sys.executable, "-m", "rlcore", "train"]
    command += [f"{key}={value}" for key, value in run_settings(tmp_path, 400, **more).items()]
    run = tmp_path / "runs" / "run"

    def saved_twice() -> bool:
        assert driver.poll() is None, driver.communicate()[1]
        return len(list((run / "checkpoints").glob("step_*"))) >= 2

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            wait_for("two checkpoints", saved_twice)
            workers = [each for each in descendants(nodes.pid) if b"ActorHost" in command_of(each)]
            assert workers
            everything = descendants(driver.pid)
            print("leave", file=nodes.stdin, flush=True)
            _, errors = driver.communicate(timeout=DEADLINE_S)
        finally:
            driver.kill()
    assert driver.returncode == 2, errors
    [last] = errors.strip().splitlines()
    assert "actor[0]" in last, last
    assert "ended: " in last
    assert "node" in last
    saved = re.search(r"last checkpoint: (\S+/checkpoints/step_\d+), go on with --resume", last)
    assert saved is not None, last
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert (Path(saved[1]) / "model" / "logits_V.npy").is_file()
    said(nodes, "left")
    wait_for("the end of every process", lambda: not any(map(is_running, [*workers, *everything])), 20)


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
        """As a call of it."""
        raise next(self._errors)


def test_an_actor_that_cannot_be_reached_is_reported_with_the_reason_that_ray_finds_later() -> None:
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    from rlcore.cluster.ray.actor import ActorBody

    unreachable = ActorUnavailableError("The actor is temporarily unavailable", b"a" * 16)
    died = ActorDiedError()
    body = ActorBody("actor[0]", [Lost(unreachable, unreachable, died)])
    reason = asyncio.run(body.ended())
    assert reason == f"its actor ended: ActorDiedError: {str(died).rstrip('.')} (actor[0])"
    assert not body.alive
