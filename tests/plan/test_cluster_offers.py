"""Clusters that are missing, garbage or offered twice are refused in one line before anything starts."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError, PlanError, PluginError, RlcoreError
from rlcore.plan import Facts, catalog, make_plan
from rlcore.plugins import configure
from rlcore.plugins.planning import plan_run
from rlcore.testing import check_plugin
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package
from rlcore.testing.runs import run_settings

HEAD = """
import sys
from rlcore import hookimpl
from rlcore.contracts.clusters import Cluster, ClusterAbilities, ClusterOffer, ProcessUse
from rlcore.cluster.kit import ReplicaGroup, ThreadWorkers

class Good(Cluster):
    def __init__(self, context):
        super().__init__(context)
        self.threads = ThreadWorkers(context)
    async def open(self): ...
    async def start(self, worker):
        count = range(worker.request.replicas)
        return ReplicaGroup([await self.threads.start(worker, index, "cpu") for index in count])
    async def close(self):
        await self.threads.close()

"""
OFFER = """
@hookimpl
def rlcore_clusters():
    return [{offer}]
"""
WHO = "plugin 'odd' (odd 1.0)"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as place:
        yield place


def written(site: Path, offer: str, more: str = "", name: str = "odd") -> str:
    """A plugin that offers a cluster."""
    return write_package(site, name, HEAD + more + OFFER.format(offer=offer))


def refused(kind: type[RlcoreError], *overrides: str, plugins: tuple[str, ...] = ("odd",)) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        plan_run([], [*SETTINGS, "cluster.backend=odd", *overrides], ["null", *plugins])
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("plugin", "library", "way_out"),
    [
        (True, True, "'ray' is installed; enable it with"),
        (True, False, "'ray' comes with `pip install ./plugins/ray` in a clone of rlcore, and"),
        (False, True, "'ray' comes with `pip install ./plugins/ray` in a clone of rlcore, and"),
    ],
)
def test_a_cluster_that_is_not_enabled_is_named_with_what_to_install_and_type(
    plugin: bool,
    library: bool,
    way_out: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is to be installed where the plugin and its library are."""
    found = {"rlcore_ray": plugin, "ray": library}
    monkeypatch.setattr(catalog, "find_spec", lambda name: object() if found[name] else None)
    assert main(["plan", *SETTINGS, "--plugin", "null", "cluster.backend=ray"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "cluster.backend: no plugin offers 'ray'; choose from: local; " in line
    assert f"{way_out} `rlcore train ... --plugin ray cluster.backend=ray`" in line
    line = refused(ConfigError, "cluster.backend=locla", plugins=())
    assert line.startswith("cluster.backend: no plugin offers 'locla'; did you mean 'local'?")


@pytest.mark.parametrize("name", ["address", "placement_s", "object_store_gib", "dashboard"])
def test_old_keys_are_refused_with_the_new_ones(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_run([{"cluster": {name: 1}}], SETTINGS, ["null"])
    assert str(caught.value).startswith(f"cluster.{name}: now plugins.ray.{name} (")
    assert f"cluster.{name}: now plugins.ray.{name} (override" in refused(ConfigError, f"cluster.{name}=1", plugins=())


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ("Good", "rlcore_clusters() returned a list with <class 'odd.Good'>; needs ClusterOffer"),
        ("ClusterOffer('o d d', Good)", "ClusterOffer 'o d d': name is 'o d d'; needs a name of letters"),
        ("ClusterOffer(7, Good)", "name is 7; needs a name of letters"),
        ("ClusterOffer('odd', 'odd:Good')", "cls is 'odd:Good'; needs a subclass of rlcore.contracts.clusters.Cluster"),
        ("ClusterOffer('odd', object)", "needs a subclass of rlcore.contracts.clusters.Cluster"),
        ("ClusterOffer('odd', Good, abilities=ClusterAbilities())", "abilities is ClusterAbilities("),
        ("ClusterOffer('odd', Good, abilities=lambda: None)", "abilities takes (), needs (config, section)"),
        ("ClusterOffer('odd', Good, problems=lambda config: [])", "problems takes (config), needs (config, section, "),
    ],
)
def test_an_offer_of_wrong_data_is_refused_with_the_field(site: Path, offer: str, message: str) -> None:
    written(site, offer)
    line = refused(PluginError)
    assert line.startswith(f"{WHO}: ")
    assert message in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("class Odd(Cluster): ...", "it is abstract: it does not define close, open, start"),
        ("class Odd(Good):\n    def open(self): ...", "open() is a plain `def`; needs an `async def`"),
        ("class Odd(Good):\n    async def start(self): ...", "start() takes (self), needs (self, worker)"),
        ("class Odd(Good):\n    close = 7", "close is 7; needs a method"),
        ("class Odd(Good):\n    def __init__(self): ...", "__init__() takes (), needs (context)"),
    ],
)
def test_a_class_that_is_not_a_cluster_is_refused_with_what_it_lacks(site: Path, more: str, message: str) -> None:
    written(site, "ClusterOffer('odd', Odd)", more)
    line = refused(PluginError)
    assert line.startswith(f"{WHO}: offers odd.Odd as cluster 'odd', but ")
    assert message in line
    assert check_plugin("odd").problems == (line,)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("abilities=lambda config, section: 1 / 0", "abilities() of cluster 'odd': ZeroDivisionError"),
        ("abilities=lambda config, section: sys.exit(0)", "abilities() of cluster 'odd': it called sys.exit(0)"),
        ("abilities=lambda config, section: {}", "abilities() of cluster 'odd': returned {}; needs ClusterAbilities"),
        ("abilities=lambda config, section: ClusterAbilities('all')", "processes is 'all'; needs one of ProcessUse"),
        ("abilities=lambda config, section: ClusterAbilities(labels=1)", "labels is 1; needs True or False"),
        (
            "abilities=lambda config, section: ClusterAbilities(placements={'tight'})",
            "placements is {'tight'}; needs a frozenset of: pack, spread, strict_spread, one_node",
        ),
        (
            "abilities=lambda config, section: ClusterAbilities(placements=frozenset({'tight'}))",
            "placements is frozenset({'tight'}); needs a frozenset of: pack",
        ),
        (
            "abilities=lambda config, section: ClusterAbilities(placements=('pack',))",
            "placements is ('pack',); needs a frozenset of: pack",
        ),
        ("abilities=lambda config, section: ClusterAbilities(more_with=3)", "more_with is 3; needs a str"),
        ("problems=lambda *given: 1 / 0", "problems() of cluster 'odd': ZeroDivisionError"),
        ("problems=lambda *given: 'none'", "problems() of cluster 'odd' returned str; needs a list or tuple of str"),
        ("problems=lambda *given: [7]", "problems() of cluster 'odd' returned a list with 7; needs str"),
    ],
)
def test_what_a_cluster_says_of_itself_wrongly_is_refused(site: Path, more: str, message: str) -> None:
    written(site, f"ClusterOffer('odd', Good, {more})")
    line = refused(PluginError)
    assert line.startswith(f"{WHO}: ")
    assert message in line


def test_a_cluster_class_that_raises_when_it_is_looked_at_is_named(site: Path) -> None:
    meta = "class Meta(type(Good)):\n    __signature__ = property(lambda cls: 1 / 0)\n\n"
    written(site, "ClusterOffer('odd', Odd)", f"{meta}class Odd(Good, metaclass=Meta): ...")
    expected = re.escape(f"{WHO}: looking at odd.Odd: ZeroDivisionError: division by zero") + r" \(\S+:\d+\)"
    assert re.fullmatch(expected, refused(PluginError))


def test_ranks_are_refused_by_a_cluster_that_starts_no_processes(site: Path) -> None:
    written(site, "ClusterOffer('odd', Good, abilities=lambda *given: ClusterAbilities(processes=ProcessUse.NONE))")
    line = refused(PlanError, "actor.data_parallel=2", "rollout.backend=null_replica")
    assert line.startswith("cluster.backend=odd: role 'actor' of core has 2 ranks, each a process, and this cluster")


def test_two_plugins_that_offer_one_cluster_are_both_named(site: Path) -> None:
    written(site, "ClusterOffer('odd', Good)")
    written(site, "ClusterOffer('odd', Good)", name="odder")
    line = refused(PluginError, plugins=("odd", "odder"))
    assert line.startswith(f"cluster.backend=odd: offered twice, by {WHO} and plugin 'odder' (odder 1.0); ")


def test_a_plugin_whose_cluster_is_not_chosen_stops_the_run(site: Path) -> None:
    written(site, "ClusterOffer('odd', Good)")
    line = refused(PlanError, "cluster.backend=local")
    assert line.startswith(f"{WHO} is enabled, but nothing of it is in the plan")


def test_a_plan_to_sample_has_no_rewards_and_does_not_miss_what_only_they_use(site: Path) -> None:
    written(site, "ClusterOffer('odd', Good)")
    hooks, loaded = configure([], [*SETTINGS, "reward.functions.gone.fn=gone.py:gone"], ["null", "odd"])
    assert make_plan(loaded, hooks, Facts(), only_sampling=True).rewards == ()


def test_memory_is_checked_on_other_machines_whose_devices_are_known(site: Path) -> None:
    elsewhere = "abilities=lambda config, section: ClusterAbilities(elsewhere=True)"
    written(site, f"ClusterOffer('odd', Good, {elsewhere})")
    settings = [*SETTINGS, "cluster.backend=odd", "cluster.device=cuda"]
    hooks, loaded = configure([], settings, ["null", "odd"])
    here = Facts(gpus=1, gpu_memory_bytes=8 * 2**30, parameters=10**9)
    assert make_plan(loaded, hooks, here).device_bytes == {}, "this machine's devices are not those of the workers"
    with pytest.raises(PlanError, match=r"role 'actor' needs about .* GiB a rank, a device has 8\.0"):
        make_plan(loaded, hooks, replace(here, of_workers=True))
    large = replace(here, gpu_memory_bytes=80 * 2**30, of_workers=True)
    assert make_plan(loaded, hooks, large).device_bytes["main"]["training"] > 16 * 10**9
    with pytest.raises(PlanError, match=r"the pools need 1 GPUs .* the machine has 0"):
        make_plan(loaded, hooks, replace(large, gpus=0))


WAYS = {
    "raises": (
        "class Odd(Good):\n    async def open(self):\n        raise OSError('no node')",
        f"cluster 'odd' of {WHO}: open(): OSError: no node",
    ),
    "exits": (
        "class Odd(Good):\n    async def open(self):\n        sys.exit(0)",
        f"cluster 'odd' of {WHO}: open(): it called sys.exit(0)",
    ),
    "is not built": (
        "class Odd(Good):\n    def __init__(self, context):\n        raise KeyError('x')",
        f"cluster 'odd' of {WHO}: building it: KeyError: 'x'",
    ),
    "starts nothing": (
        "class Odd(Good):\n    async def start(self, worker):\n        return None",
        f"cluster 'odd' of {WHO}: start() of role 'actor': returned None; needs a WorkerGroup",
    ),
    "starts too few": (
        "class Odd(Good):\n    async def start(self, worker):\n        return ReplicaGroup([])",
        f"cluster 'odd' of {WHO}: start() of role 'actor': returned 0 replicas; needs 1",
    ),
    "dies in start": (
        "class Odd(Good):\n    async def start(self, worker):\n        return 1 / 0",
        f"cluster 'odd' of {WHO}: start() of role 'actor': ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_cluster_that_dies_is_named_and_closed_and_leaves_nothing(
    site: Path, tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more, message = WAYS[way]
    closing = "\n    async def close(self):\n        await super().close()\n        print('closed', file=sys.stderr)"
    written(site, "ClusterOffer('odd', Odd)", more + closing)
    values = [f"{key}={value}" for key, value in run_settings(tmp_path, 8).items()]
    assert main(["train", "--plugin", "null", "--plugin", "odd", "cluster.backend=odd", *values]) == 2
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if line]
    assert lines.count("closed") == (way != "is not built")
    assert lines[-1].startswith(f"rlcore: {message}")
