"""Refusals of roles inside others, pools, links and plugins that nothing else in the tests meets: each by its words."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.errors import PlanError, PluginError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import Hooks, configure
from rlcore.plugins.enabled import load_plugin
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

HEAD = """
    from rlcore.contracts.actor import ACTOR, ActorWorker
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from rlcore.contracts.workers import Worker

    class Judge(Worker):
        def setup(self): ...

    class Clerk(Worker):
        def setup(self): ...

    JUDGE, CLERK, GHOST = Role("judge", Judge), Role("clerk", Clerk), Role("ghost", Judge)
    NAMESAKE = Role("actor", Judge)

    def request(**more):
        return WorkerRequest(**{"role": JUDGE, "backend": "null", **more})

    def offer(**more):
        return WorkerClass(**{"interface": Judge, "backend": "null", "cls": Judge, **more})

    def manager(*requests):
        stated = lambda config, section: list(requests)
        return Component("judged", lambda context: None, stated, uses_reward_functions=True)
"""
HOOKS = """
    @hookimpl
    def rlcore_reward_managers():
        return [manager({requests})]

    @hookimpl
    def rlcore_worker_classes():
        return [{classes}]

    @hookimpl
    def rlcore_resource_pools():
        return [{pools}]
"""
INSIDE = "offer(embedded_in=ACTOR)"
CASES = {
    "no request": ('"a judge"', "offer()", "", (), "returned a list with 'a judge'; needs WorkerRequest"),
    "inside another role": (
        "request(embedded_in=GHOST)",
        INSIDE,
        "",
        (),
        "asked for inside 'ghost', but refusals.Judge is served inside 'actor'",
    ),
    "two classes": ("request()", "offer(), offer()", "", (), "2 are offered, refusals.Judge by plugin"),
    "inside nothing": (
        "request()",
        "offer(embedded_in=GHOST)",
        "",
        (),
        "inside role 'ghost' (Judge), which was not asked",
    ),
    "inside a namesake": (
        "request()",
        "offer(embedded_in=NAMESAKE)",
        "",
        (),
        "inside role 'actor' (Judge), which was not asked",
    ),
    "inside one that is inside": (
        "request(), request(role=CLERK)",
        f"{INSIDE}, offer(interface=Clerk, cls=Clerk, embedded_in=JUDGE)",
        "",
        (),
        "is served inside 'judge', which is itself served inside another role",
    ),
    "isolated inside": ("request(isolated=True)", INSIDE, "", (), "so it cannot be isolated"),
    "replicas inside": ("request(replicas=2)", INSIDE, "", (), "as many replicas and ranks (1 x 1)"),
    "ranks inside": ("request(ranks=2)", INSIDE, "", (), "as many replicas and ranks (1 x 1)"),
    "pool inside": ('request(pool="judges")', INSIDE, 'PoolSpec("judges")', (), "but its host is in pool 'main'"),
    "union with nothing": (
        'request(pool="judges")',
        "offer()",
        'PoolSpec("judges", colocates=("left",))',
        (),
        "is a union with 'left', which is not declared",
    ),
    "union of a union": (
        'request(pool="judges")',
        "offer()",
        'PoolSpec("judges", colocates=("both",)), PoolSpec("both", colocates=("main",))',
        (),
        "is a union with 'both', which is itself a union",
    ),
    "devices of a machine without": (
        'request(pool="judges")',
        "offer()",
        'PoolSpec("judges", 1)',
        ("cluster.device=cpu",),
        "cluster.device=cpu, but pool 'judges' has GPUs",
    ),
    "inside a part of the weights": (
        'request(backend="hf")',
        'offer(backend="hf", embedded_in=ACTOR, on_every_rank=True)',
        "",
        ("actor.backend=hf", "rollout.backend=hf", "actor.data_parallel=2", "actor.sharding=fsdp2"),
        "is served inside 'actor', each of whose ranks has a part of the weights only",
    ),
    "a link to where the weights are": (
        "request()",
        "offer()",
        "",
        ("rollout.weight_sync=tcp",),
        "the rollout is served inside 'actor' and has no copy of the weights",
    ),
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def plan(requests: str, classes: str, pools: str, *overrides: str, site: Path) -> RunPlan:
    """The plan of a null run whose reward manager has these requests, with a plugin that offers this."""
    hooks = HOOKS.replace("{requests}", requests).replace("{classes}", classes).replace("{pools}", pools)
    write_package(site, "refusals", HEAD + hooks)
    settings = [*SETTINGS, "reward.manager=judged", *overrides]
    found, loaded = configure([], settings, ["null", "refusals"])
    return make_plan(loaded, found, Facts(cpus=2, gpus=2))


@pytest.mark.parametrize("case", CASES)
def test_what_no_role_pool_or_link_can_be_is_refused_by_its_words(case: str, site: Path) -> None:
    requests, classes, pools, overrides, words = CASES[case]
    with pytest.raises((PlanError, PluginError)) as caught:
        plan(requests, classes, pools, *overrides, site=site)
    line = str(caught.value)
    assert words in line
    assert "\n" not in line


def test_the_plugin_of_these_cases_is_taken_where_nothing_is_wrong(site: Path) -> None:
    made = plan("request()", INSIDE, "", site=site)
    assert "Judge" in {worker.cls.__name__ for worker in made.workers}


def hooks_of(site: Path, text: str, **more: object) -> str:
    """The refusal of a plugin with that hook."""
    write_package(site, "hooked", f"{HEAD}\n{text}")
    with pytest.raises(PluginError) as caught:
        Hooks([load_plugin("hooked")])
    return str(caught.value)


def test_hooks_that_pluggy_would_take_and_nothing_calls_so_are_refused(site: Path) -> None:
    wrapper = """
    @hookimpl(hookwrapper=True)
    def rlcore_worker_classes():
        yield
    """
    assert "rlcore_worker_classes is a wrapper" in hooks_of(site, wrapper)


def test_an_argument_that_is_given_by_name_only_is_refused(site: Path) -> None:
    text = """
    @hookimpl
    def rlcore_resource_pools(*, requests):
        return []
    """
    assert "has the argument 'requests', which it is not given" in hooks_of(site, text)


def test_one_plugin_twice_and_one_name_for_two_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "one" / "same.py", tmp_path / "other" / "same.py"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("RLCORE_API = '1'\n")
    with pytest.raises(PluginError, match=r"two plugins of one name: plugin 'same' .*leave one of them out"):
        Hooks([load_plugin(str(path)) for path in paths])


def test_an_entry_point_that_names_an_object_is_refused(site: Path) -> None:
    write_package(site, "objected", "mine = 1", entry_points={"rlcore": {"objected": "objected:mine"}})
    with pytest.raises(PluginError, match="its entry point 'objected:mine' names an object; needs a module"):
        load_plugin("objected")


def test_a_file_whose_stem_is_not_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "2 judges.py"
    path.write_text("RLCORE_API = '1'\n")
    with pytest.raises(PluginError, match="the file's stem is the plugin's name; needs a Python identifier"):
        load_plugin(str(path))
