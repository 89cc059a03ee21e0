"""Nodes with other software than the controller's are refused where their workers join."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import rlcore
from rlcore.cluster import host, same_software
from rlcore.cluster.host import WorkerHost
from rlcore.cluster.local import LocalCluster
from rlcore.cluster.same_software import check_code, code_of, digest
from rlcore.cluster.worker_context import cluster_context
from rlcore.config.providers import Provider
from rlcore.contracts.clusters import ClusterContext, Deadlines, RunCode, Shipment
from rlcore.errors import WorkerError
from rlcore.plugins import discover
from rlcore.plugins.planning import plan_run
from rlcore.runtime import starting
from rlcore.testing.null import SETTINGS
from rlcore.train import train

SHIPMENT = Shipment("actor[0].1", "actor", "", (), b"no pickle is read", same_software.versions_here())


@pytest.mark.parametrize("name", ["Python", "rlcore", "torch"])
def test_a_process_with_another_version_is_refused_before_anything_is_read(name: str) -> None:
    ours = same_software.versions_here()
    with pytest.raises(WorkerError) as caught:
        WorkerHost().build(replace(SHIPMENT, versions={**ours, name: "0.0.1"}, files=(("mine", "/not/here.py"),)))
    expected = (
        f"actor[0].1.setup(): node {os.uname().nodename} has {name} {ours[name]}, and the run was started with "
        f"{name} 0.0.1; needs the same on every node"
    )
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_all_that_differs_is_named() -> None:
    with pytest.raises(WorkerError, match=r"started with Python 2\.7, torch 1\.0; needs"):
        same_software.check_versions({**same_software.versions_here(), "Python": "2.7", "torch": "1.0"})


def test_the_versions_are_those_of_the_installation() -> None:
    import torch

    assert same_software.versions_here()["torch"] == torch.__version__
    assert same_software.versions_here()["rlcore"] == rlcore.__version__
    same_software.check_versions(same_software.versions_here())


@pytest.mark.slow
def test_a_run_ends_in_a_line_where_a_process_has_other_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller says that it has another torch than the process of its replica finds."""
    monkeypatch.setattr(host, "versions_here", lambda: {"torch": "0.4.1"})
    place = (f"train.dir={tmp_path}", "train.max_steps=1", "rollout.backend=null_replica")
    with pytest.raises(WorkerError, match=r"rollout\[0\]\.setup\(\): node .* the run was started with torch 0\.4\.1"):
        train({}, *SETTINGS, *place, plugins=["null"])


CODE = code_of([])
ELSEWHERE = replace(CODE, machine="another-node 1234")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed plugin `a-digest` in the package `digested`."""
    package, info = tmp_path / "digested", tmp_path / "digested_rewards-1.0.dist-info"
    for directory in (package / "inner", info):
        directory.mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    (package / "inner" / "__init__.py").write_text("")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Digested.Rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlcore]\na-digest = digested.inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    digest.cache_clear()
    yield package
    digest.cache_clear()


def test_a_node_with_another_checkout_is_refused_before_anything_is_read() -> None:
    ours, theirs = CODE.digests["rlcore"], "0123456789ab"
    wrong = replace(ELSEWHERE, digests={"rlcore": theirs})
    with pytest.raises(WorkerError) as caught:
        WorkerHost().build(replace(SHIPMENT, code=wrong, files=(("mine", "/not/here.py"),)))
    expected = (
        f"actor[0].1.setup(): node {os.uname().nodename} has code with the digests rlcore {ours}, and the run was "
        f"started on another-node with rlcore {theirs}; needs the same files on every node"
    )
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
    check_code(ELSEWHERE)


def test_files_that_controller_and_worker_share_may_be_edited() -> None:
    edited = replace(CODE, digests={"rlcore": "0123456789ab"})
    check_code(edited)
    with pytest.raises(WorkerError, match="the same files on every node"):
        check_code(replace(edited, places={"rlcore": "/another/checkout/rlcore"}))


def test_a_digest_is_of_names_and_contents_of_python_files(package: Path) -> None:
    found = {digest("digested")}
    (package / "notes.txt").write_text("not code")
    for path, text in [("__init__.py", "one = 2\n"), ("inner/more.py", ""), ("inner/most.py", "")]:
        digest.cache_clear()
        (package / path).write_text(text)
        found.add(digest("digested"))
    (package / "inner" / "most.py").rename(package / "most.py")
    digest.cache_clear()
    found.add(digest("digested"))
    assert len(found) == 5
    (package / "notes.txt").unlink()
    digest.cache_clear()
    assert digest("digested") in found
    assert digest("not_installed_anywhere") == "missing"


def test_the_code_is_that_of_rlcore_and_of_the_enabled_plugins(package: Path, tmp_path: Path) -> None:
    file = tmp_path / "alone.py"
    file.write_text("two = 2\n")
    installed = next(plugin.provider for plugin in discover.installed() if plugin.name == "a_digest")
    code = code_of([installed, Provider("alone", str(file), "API 1")])
    assert set(code.digests) == {"rlcore", "digested", str(file)}
    assert code.places["digested"] == str(package.resolve())
    file.write_text("two = 3\n")
    (package / "__init__.py").unlink()
    (package / "inner" / "__init__.py").write_text("changed = True\n")
    check_code(replace(code, machine=ELSEWHERE.machine))  # digests are taken once per process, when a run starts
    digest.cache_clear()
    with pytest.raises(WorkerError, match=f"digests digested [0-9a-f]{{12}}, {file} [0-9a-f]{{12}}, and the run"):
        check_code(replace(code, machine=ELSEWHERE.machine))


def test_only_runs_whose_workers_may_be_on_other_machines_take_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def context(*more: str, plugins: tuple[str, ...] = ()) -> ClusterContext:
        plan = plan_run([], [*SETTINGS, f"train.dir={tmp_path}", *more], ["null", *plugins])
        return cluster_context(plan, tmp_path, Deadlines())

    joined = context("cluster.backend=ray", "plugins.ray.address=auto", plugins=("ray",))
    assert joined.code is not None
    assert set(joined.code.digests) == {"rlcore", "rlcore_ray"}
    here = context("rollout.backend=null_replica")
    assert here.code is None
    assert context("cluster.backend=ray", plugins=("ray",)).code is None
    cluster = LocalCluster(replace(here, code=ELSEWHERE))
    worker = next(worker for worker in here.workers if worker.request.role.name == "rollout")
    assert cluster._shipment("rollout[0]", worker, 0, 0, "").code == ELSEWHERE


@pytest.mark.slow
def test_a_run_ends_in_a_line_where_a_process_has_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller says that it has other code, and that it is on another machine than the process of its replica."""
    wrong = RunCode(ELSEWHERE.machine, ELSEWHERE.places, {"rlcore": "0123456789ab"})
    monkeypatch.setattr(starting, "cluster_context", lambda *of: replace(cluster_context(*of), code=wrong))
    place = (f"train.dir={tmp_path}", "train.max_steps=1", "rollout.backend=null_replica")
    with pytest.raises(WorkerError, match=r"rollout\[0\]\.setup\(\): node .* with rlcore 0123456789ab"):
        train({}, *SETTINGS, *place, plugins=["null"])
