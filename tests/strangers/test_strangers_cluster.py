"""A stranger's cluster is planned, shown, refused and started like ours, from public names alone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError, PlanError, RlcoreError
from rlcore.imports import import_target
from rlcore.plan import RunPlan, plan_to_json
from rlcore.plugins.planning import plan_run
from rlcore.testing import ClusterSuite
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package
from rlcore.testing.runs import differing, run_settings

SOURCE = Path(__file__).with_name("counting.py")
CHOSEN = ("cluster.backend=counting", "rollout.backend=null_replica")
PUBLIC = re.compile(r"rlcore|rlcore\.contracts\.\w+|rlcore\.cluster\.kit")


class TestCountingCluster(ClusterSuite):
    target = property(lambda self: import_target(f"{SOURCE}:rlcore_clusters")()[0])

    @pytest.fixture(autouse=True)
    def _installed(self, site: Path) -> None:
        self.plugins = ("counting",)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as place:
        write_package(place, "counting", SOURCE.read_text())
        yield place


def planned(*overrides: str) -> RunPlan:
    return plan_run([], [*SETTINGS, *CHOSEN, *overrides], ["null", "counting"])


def test_it_imports_public_names_only() -> None:
    found = re.findall(r"^(?:from|import) (rlcore[\w.]*)", SOURCE.read_text(), re.MULTILINE)
    assert len(found) == 3
    assert [module for module in found if not PUBLIC.fullmatch(module)] == []


def test_it_is_planned_and_shown(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_to_json(planned())["cluster"] == {"name": "counting", "provided_by": "plugin 'counting' (counting 1.0)"}
    assert main(["plan", *SETTINGS, *CHOSEN, "--plugin", "null", "--plugin", "counting"]) == 0
    assert re.search(r"^cluster +counting +plugin 'counting' \(counting 1\.0\)", capsys.readouterr().out, re.MULTILINE)
    assert main(["plugins", "--plugin", "counting", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["counting"]["offers"] == ["section counting", "cluster counting"]


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (
            ("rollout.replicas=9",),
            PlanError,
            "cluster.backend=counting: role 'rollout' has 9 replicas, plugins.counting.most=8",
        ),
        (
            ("actor.data_parallel=2",),
            PlanError,
            "cluster.backend=counting: role 'actor' of core has 2 ranks, each a process, and this cluster starts "
            "threads only; needs one rank, or another cluster.backend",
        ),
        (
            ("cluster.pools.main.nodes=2",),
            PlanError,
            "pool 'main' of config (cluster.pools): 2 nodes; cluster.backend=counting has one with these settings; "
            "needs nodes=1, or a cluster of several nodes: set plugins.counting.racks=2",
        ),
        (
            ("cluster.pools.main.labels={tier: fast}",),
            PlanError,
            "pool 'main' of config (cluster.pools): asks for labels, which cluster.backend=counting does not obey with "
            "these settings; needs a pool that asks for less, or a cluster that does: set plugins.counting.racks=2",
        ),
        (
            ("plugins.counting.most=0",),
            ConfigError,
            "plugins.counting.most: found 0 (override 'plugins.counting.most=0'); needs at least 1",
        ),
    ],
)
def test_what_it_cannot_start_is_refused_when_planning(
    site: Path, overrides: tuple[str, ...], kind: type[RlcoreError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        planned(*overrides)
    assert str(caught.value) == message


def test_with_other_settings_it_can_do_more(site: Path) -> None:
    assert planned("cluster.pools.main.nodes=2", "plugins.counting.racks=2").pools[0].nodes == 2


@pytest.mark.slow
def test_a_run_on_it_is_that_on_the_local_cluster_bit_for_bit_and_it_counted(site: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = run_settings(
        tmp_path, 16, **{"rollout.backend": "null_replica", "rollout.replicas": 3, "cluster.in_process": True}
    )

    def trained(name: str, *more: str) -> Path:
        values = [f"{key}={value}" for key, value in settings.items()]
        assert main(["train", "--plugin", "null", *values, f"train.name={name}", *more]) == 0
        return tmp_path / "runs" / name

    here = trained("here")
    del settings["cluster.in_process"]
    there = trained("there", "--plugin", "counting", "cluster.backend=counting")
    assert differing(here, there) == []
    assert json.loads((there / "counts.json").read_text()) == {"opened": 1, "launched": 4, "closed": 1}
