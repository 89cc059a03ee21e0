"""Nodes with other software than the controller's are refused where their workers join."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

import rlcore
from rlcore.cluster import host, same_software
from rlcore.cluster.host import WorkerHost
from rlcore.contracts.clusters import Shipment
from rlcore.errors import WorkerError
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
