"""The cluster `ray`: the same numbers as `local`, and errors that say what was wanted and what there is."""

import asyncio
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.clusters import Shipment
from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.runs import differing, run_settings
from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]

DEADLINE_S = 120.0
RAY = ("plugins.ray.object_store_gib=0.1",)
HEAD = """
    import os, sys
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray
    context = ray.init("local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False)
    print("head:", context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster with two CPUs, which was started from another directory than the runs."""
    command = [sys.executable, "-c", textwrap.dedent(HEAD)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path_factory.mktemp("elsewhere"),
    )
    try:
        for line in process.stdout or ():
            if line.startswith("head: "):
                yield line.split()[1]
                break
        process.communicate("", timeout=60)
    finally:
        process.kill()
        process.wait()


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    """A run of two steps on the null backend."""
    return run_settings(directory, 16, **{"cluster.threads": 2} | more)


def rlcore(
    name: str, values: Mapping[str, Any], *more: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`rlcore train`, with the plugin null."""
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", f"train.name={name}"]
    command += [f"{key}={value}" for key, value in values.items()]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=cwd)


def test_local_and_ray_give_the_same_run_bit_for_bit_and_ray_leaves_nothing(tmp_path: Path) -> None:
    values = settings(
        tmp_path,
        **{
            "model.path": write_tiny_model(tmp_path / "tiny"),
            "actor.backend": "hf",
            "rollout.backend": "hf",
            "algo.kl.placement": "loss",
            "actor.lr": "1e-3",
        },
    )
    done = rlcore("here", values)
    assert done.returncode == 0, done.stderr
    before = descendants(1)
    done = rlcore("there", values, *RAY)
    assert done.returncode == 0, done.stderr
    assert differing(tmp_path / "runs" / "here", tmp_path / "runs" / "there") == []
    ours = [pid for pid in descendants(1) - before if is_running(pid) and b"ray" in _command_of(pid)]
    assert [worker for worker in ours if str(tmp_path).encode() in _command_of(worker)] == []


def _command_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_run_joins_a_cluster_and_leaves_it_as_it_was_also_when_its_paths_are_relative(
    head: str, tmp_path: Path
) -> None:
    relative = settings(tmp_path) | {"data.sources.all.path": "prompts.jsonl", "train.dir": "runs"}
    for name, values in {"first": settings(tmp_path), "second": relative}.items():
        done = rlcore(name, values, f"plugins.ray.address={head}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs" / "second" / "checkpoints").glob("step_*/model/logits_V.npy"))
    assert differing(tmp_path / "runs" / "first", tmp_path / "runs" / "second") == []


def test_a_node_without_the_directory_of_the_driver_is_named() -> None:
    pytest.importorskip("ray")
    from rlcore_ray.actor import FAILED, ActorHost

    answer = asyncio.run(ActorHost([], "/nowhere/at/all").build(Shipment("actor[0]", "actor", "", (), b"")))
    assert answer[0] == FAILED
    assert answer[1][:2] == (
        "WorkerError",
        f"actor[0]: node {os.uname().nodename} has no directory '/nowhere/at/all', from which the run was started; "
        "start it from one that all nodes share",
    )


def test_a_cluster_that_is_too_small_is_refused_with_what_is_wanted_and_what_it_has(head: str, tmp_path: Path) -> None:
    plugin = tmp_path / "crowd.py"
    plugin.write_text(textwrap.dedent(CROWD))
    done = rlcore(
        "large",
        settings(tmp_path, **{"rollout.agent": "crowd", "plugins.ray.placement_s": 2}),
        *(f"plugins.ray.address={head}", "--plugin", str(plugin)),
    )
    assert done.returncode == 2
    assert "pool 'main' wants 6 CPU in 5 bundles (largest: CPU 2)" in done.stderr
    assert "the cluster has CPU 2, free 2" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


CROWD = """
    RLCORE_API = "1"
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.components import Component
    from rlcore.contracts.requests import Role, WorkerRequest
    from rlcore.contracts.offers import WorkerClass
    from rlcore.contracts.workers import Worker

    class Extra(Worker):
        def setup(self):
            pass

    asks = [WorkerRequest(Role("extra", Extra), "x", replicas=5)]

    @hookimpl
    def rlcore_agent_loops():
        return [Component("crowd", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Extra, "x", Extra)]
"""


def test_an_address_where_nothing_answers_is_named_at_once(tmp_path: Path) -> None:
    done = rlcore("nowhere", settings(tmp_path), "plugins.ray.address=127.0.0.1:9")
    assert done.returncode == 2
    assert "plugins.ray.address=127.0.0.1:9: nothing answers there" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_isolated_replicas_on_ray_stream_fail_by_name_and_are_restarted(head: str, tmp_path: Path) -> None:
    script = tmp_path / "story.py"
    script.write_text(textwrap.dedent(STORY))
    (tmp_path / "probing.py").write_text(textwrap.dedent(PROBING))
    done = subprocess.run(
        [sys.executable, script, head], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["threads"] == ["3", "3"]
    assert len(set(results["processes"])) == 2
    assert results["inner"] == results["processes"]
    assert results["items"] == list(range(300))
    assert results["ended"] == 1
    where = r" \(\S+:\d+\)"
    assert re.fullmatch(r"probe\[1\]\.fail\(\): ValueError: a first line" + where, results["failed"])
    assert results["died"].startswith("probe[0].forever(): its actor ended: ")
    assert results["events"] == [["lost", 0], ["restored", 0]]
    assert results["prepared"] == ["weights"]
    assert results["after"] not in results["processes"]


PROBING = """
    RLCORE_API = "1"
    import asyncio, os
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.components import Component
    from rlcore.contracts.requests import Role, WorkerRequest
    from rlcore.contracts.offers import WorkerClass
    from rlcore.contracts.workers import Worker

    class Probe(Worker):
        def setup(self):
            self.ended = 0

        def where(self):
            return os.getpid(), os.environ["OMP_NUM_THREADS"]

        def echo(self, value):
            return value

        async def forever(self):
            await asyncio.sleep(3600)

        def fail(self):
            raise ValueError("a first line\\nand a second")

        async def count(self, num):
            try:
                for index in range(num):
                    yield index
                    await asyncio.sleep(0)
            finally:
                self.ended += 1

        def num_ended(self):
            return self.ended

    class Inner(Probe):
        pass

    PROBE = Role("probe", Probe)
    INNER = Role("inner", Inner)

    @hookimpl
    def rlcore_agent_loops():
        asks = [
            WorkerRequest(PROBE, "p", replicas=2, threads=3, cpus=0.5, isolated=True),
            WorkerRequest(INNER, "p", replicas=2),
        ]
        return [Component("probing", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Probe, "p", Probe), WorkerClass(Inner, "p", Inner, embedded_in=PROBE)]
"""
STORY = """
    import asyncio, contextlib, json, os, signal, sys
    from pathlib import Path
    from rlcore.contracts.clusters import Deadlines
    from rlcore.cluster.worker_context import cluster_context
    from rlcore_ray.cluster import RayCluster
    from rlcore.errors import WorkerError
    from rlcore.plan import Facts, make_plan
    from rlcore.plugins import configure
    from rlcore.testing.null import SETTINGS

    HERE = Path(__file__).parent
    hooks, loaded = configure(
        [],
        [*SETTINGS, "rollout.agent=probing", f"plugins.ray.address={sys.argv[1]}"],
        ["null", str(HERE / "probing.py")],
    )
    plan = make_plan(loaded, hooks, Facts(cpus=2))
    Probe = sys.modules["rlcore_file_probing"].Probe

    async def story():
        cluster = RayCluster(cluster_context(plan, HERE, Deadlines(setup_s=60, call_s=60, close_s=10)))
        found = {"events": [], "prepared": []}
        try:
            await cluster.open()
            ours = [worker for worker in plan.workers if worker.asked_by != "core"]
            groups = {worker.request.role.name: await cluster.start(worker) for worker in ours}
            group, inner = groups["probe"], groups["inner"]
            restored = asyncio.Event()

            def seen(event):
                found["events"].append([event.kind, event.index])
                if event.kind == "restored":
                    restored.set()

            async def prepare(replica):
                found["prepared"].append(await replica.call(Probe.echo, "weights"))

            group.on_event(seen)
            group.before_return(prepare)
            found["processes"], found["threads"] = zip(*await group.each(Probe.where))
            found["inner"] = [process for process, _ in await inner.each(Probe.where)]
            probe = group.replicas[0]
            found["items"] = [number async for number in probe.stream(Probe.count, 300)]
            async with contextlib.aclosing(group.replicas[1].stream(Probe.count, 10**9)) as items:
                async for number in items:
                    if number == 5:
                        break
            found["ended"] = await group.replicas[1].call(Probe.num_ended)
            try:
                await group.replicas[1].call(Probe.fail)
            except WorkerError as error:
                found["failed"] = str(error)
            waiting = asyncio.ensure_future(probe.call(Probe.forever))
            await asyncio.sleep(0.2)
            os.kill(found["processes"][0], signal.SIGKILL)
            try:
                await waiting
            except WorkerError as error:
                found["died"] = str(error)
            await asyncio.wait_for(restored.wait(), 60)
            found["after"] = (await probe.call(Probe.where))[0]
        finally:
            await cluster.close()
        print(json.dumps(found))

    asyncio.run(story())
"""
