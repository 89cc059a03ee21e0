"""Pools on a Ray of several nodes: nodes, placement, labels and custom resources are what Ray obeys."""

import json
import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.runs import run_settings

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine"), NEEDS_RAY]

DEADLINE_S = 120.0
NODES = """
import json, os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
from ray.cluster_utils import Cluster

common = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
cluster = Cluster()
cluster.add_node(num_cpus=0, **common)
names = {}
for name, more in {
    "one": {"num_gpus": 4},
    "two": {"num_gpus": 4},
    "fast": {"labels": {"tier": "fast"}, "resources": {"magic": 1}},
}.items():
    names[cluster.add_node(num_cpus=8, **common, **more).node_id] = name
cluster.wait_for_nodes(60)
print("head:", cluster.address, flush=True)
print("nodes:", json.dumps(names), flush=True)
sys.stdin.read()
cluster.shutdown()
"""
PLACING = """
import asyncio, json, sys
from pathlib import Path

import ray
from rlcore_ray.placement import Placement, bundles_of, slots_of
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.errors import WorkerError
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from ray.util.placement_group import placement_group_table

plugin, overrides = sys.argv[1], json.loads(sys.argv[2])
hooks, loaded = configure([], overrides[0], ["null", plugin])
ray.init(loaded.config.plugins["ray"].address, configure_logging=False, log_to_driver=False)
for case in overrides:
    hooks, loaded = configure([], case, ["null", plugin])
    plan = make_plan(loaded, hooks, Facts(cpus=2))
    placement = Placement("run", plan.pools)
    slots = slots_of(cluster_context(plan, Path("."), Deadlines()))
    try:
        asyncio.run(placement.place(bundles_of(slots, plan.pools), loaded.config.plugins["ray"].placement_s))
        table = placement_group_table(placement.group("rollout"))
        nodes = [table["bundles_to_node_id"][index] for index in sorted(table["bundles"])]
        print("placed:", json.dumps([nodes, [table["bundles"][index] for index in sorted(table["bundles"])]]))
    except WorkerError as error:
        print("placed:", json.dumps(str(error)))
    placement.close()
"""
PLUGIN = '''
"""A rollout that says on which node it is, with as many devices as `rollout.max_rows` says."""
RLCORE_API = "1"

from dataclasses import replace

from rlcore import WorkerClass, hookimpl
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullReplica


class Telling(NullReplica):
    def setup(self):
        super().setup()
        import ray

        print("node", ray.get_runtime_context().get_node_id())


def complete(config, section, request):
    return replace(request, pool="rollout", gpus=config.rollout.max_rows * request.gpus)


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "telling", Telling, isolated=True, complete=complete)]
'''


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a cluster of three nodes, and their names by id; two have devices, one a label and a resource."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        command = [sys.executable, "-c", NODES]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, text=True, **streams) as process:
            try:
                yield line_of(process, "head: "), json.loads(line_of(process, "nodes: "))
            finally:
                process.communicate("", timeout=DEADLINE_S)


def line_of(process: "subprocess.Popen[str]", start: str) -> str:
    """The rest of the line that begins so."""
    for line in process.stdout or ():
        if line.startswith(start):
            return line.removeprefix(start).strip()
    raise AssertionError(f"the cluster ended before it said '{start}'")


def overrides(directory: Path, address: str, **more: Any) -> list[str]:
    (directory / "telling.py").write_text(PLUGIN)
    joined = {"plugins.ray.address": address, "rollout.backend": "telling"}
    return [f"{key}={value}" for key, value in run_settings(directory, 8, **joined, **more).items()]


def placed(directory: Path, address: str, names: dict[str, str], *cases: dict[str, Any]) -> list[Any]:
    """For each case the names of the nodes of the bundles of pool `rollout` with what each holds, or the error."""
    arguments = json.dumps([overrides(directory, address, **case) for case in cases])
    command = [sys.executable, "-c", PLACING, str(directory / "telling.py"), arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("placed: ")]
    assert len(lines) == len(cases), done.stderr
    found = [json.loads(line.removeprefix("placed: ")) for line in lines]
    return [result if isinstance(result, str) else ([names[node] for node in result[0]], result[1]) for result in found]


def test_pools_are_placed_as_they_say(tmp_path: Path, cluster: tuple[str, dict[str, str]]) -> None:
    address, names = cluster
    pool, four = "cluster.pools.rollout", {"rollout.replicas": 4}
    packed, one, spread, apart, fast, refused, nodes, devices = placed(
        tmp_path,
        address,
        names,
        four,
        {**four, f"{pool}.placement": "one_node"},
        {**four, "rollout.replicas": 3, f"{pool}.placement": "spread"},
        {"rollout.replicas": 3, f"{pool}.placement": "strict_spread"},
        {f"{pool}.labels": "{tier: fast}", f"{pool}.resources": "{magic: 1}"},
        {f"{pool}.labels": "{tier: slow}", "plugins.ray.placement_s": 1},
        {**four, f"{pool}.nodes": 2},
        {
            "cluster.device": "cuda",
            "rollout.max_rows": 2,
            "rollout.replicas": 2,
            f"{pool}.nodes": 2,
            f"{pool}.gpus_per_node": 3,
        },
    )
    assert len(set(packed[0])) == 1
    assert len(set(one[0])) == 1
    assert len(set(spread[0])) == 3
    assert len(set(apart[0])) == 3
    assert fast == (["fast"], [{"CPU": 1.0, "magic": 1.0}])
    assert re.search(
        r"pool 'rollout' wants 1 CPU in 1 bundles \(.*, on nodes with tier=slow\), which were not", refused
    )
    assert len(set(nodes[0])) == 2
    assert nodes[1] == [{"CPU": 2.0}] * 2, "each node has its part of the ranks in one bundle"
    assert set(devices[0]) == {"one", "two"}
    assert devices[1] == [{"CPU": 1.0, "GPU": 3.0}] * 2, "a node's devices, used or not"


def test_a_run_has_as_many_ranks_on_each_node_as_its_pool_says(
    tmp_path: Path, cluster: tuple[str, dict[str, str]]
) -> None:
    address, _ = cluster
    more = {"rollout.replicas": 4, "cluster.pools.rollout.nodes": 2, "train.name": "run"}
    arguments = overrides(tmp_path, address, **more)
    plugins = ["--plugin", "null", "--plugin", str(tmp_path / "telling.py")]
    command = [sys.executable, "-m", "rlcore", "train", *plugins, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    nodes = dict(re.findall(r" (rollout\[\d\]): node (\w+)\n", log))
    assert sorted(Counter(nodes.values()).values()) == [2, 2], nodes
    assert nodes["rollout[0]"] == nodes["rollout[1]"], "neighbours are on one node"
