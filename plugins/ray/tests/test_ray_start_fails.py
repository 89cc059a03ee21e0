"""A Ray whose servers do not come up: its directory is removed, and the error names what can be done."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Cluster, Deadlines
from rlcore.errors import WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS

pytestmark = NEEDS_RAY

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."
HERE = "cluster: starting Ray on this machine: "
LESS_BUSY = (
    "needs a machine that is less busy; start the run again, or run `ray start --head` and set plugins.ray.address=auto"
)
REMEDY = f"its servers did not answer in the time that Ray allows; {LESS_BUSY}"


def opening(cluster: Cluster) -> str:
    """The error of opening the cluster, which is closed then."""

    async def run() -> None:
        try:
            await cluster.open()
        finally:
            await cluster.close()

    with pytest.raises(WorkerError) as raised:
        asyncio.run(run())
    return str(raised.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Exception(SLOW), HERE + REMEDY),
        (Exception("no luck"), HERE + "Exception: no luck; `ray status` there tells more"),
        (RuntimeError("no luck"), HERE + "RuntimeError: no luck; `ray status` there tells more"),
    ],
)
def test_a_ray_that_does_not_start_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    import ray
    from rlcore_ray.cluster import RayCluster

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    before = tmp_path / "ray" / f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    before.mkdir(parents=True)
    directory = tmp_path / "ray" / f"session_2026-01-02_00-00-00_000000_{os.getpid()}"

    def init(*args: Any, **kwargs: Any) -> None:
        (directory / "logs").mkdir(parents=True)
        (tmp_path / "ray" / "session_latest").symlink_to(directory)
        raise error

    monkeypatch.setattr(ray, "init", init)
    plan = plan_run([], [*SETTINGS, "plugins.ray.object_store_gib=0.1"], ["null"])
    cluster = RayCluster(cluster_context(plan, tmp_path / "run", Deadlines()))
    assert opening(cluster) == message
    assert list((tmp_path / "ray").iterdir()) == [before]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", f"{HERE}it took longer than 0.3 s; {LESS_BUSY}"),
        ("there:6379", "plugins.ray.address=there:6379: it took longer than 0.3 s; `ray status` there tells more"),
    ],
)
def test_a_ray_that_never_answers_is_left_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    import ray
    from rlcore_ray import session
    from rlcore_ray.cluster import RayCluster

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(session, "CONNECT_S", 0.3)
    monkeypatch.setattr(session, "_check_reachable", lambda address: None)
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: time.sleep(1))
    settings = (*SETTINGS, *([f"plugins.ray.address={address}"] if address else []))
    cluster = RayCluster(
        cluster_context(
            plan_run([], [*settings, "cluster.backend=ray"], ["null", "ray"]), tmp_path / "run", Deadlines()
        )
    )
    assert opening(cluster) == message
