"""Plugins: what is found, what is imported, and what is refused by name."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PathDistribution, entry_points
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from rlcore import __version__
from rlcore.errors import PlanError, PluginError
from rlcore.plan.catalog import install_hint
from rlcore.plugins import configure, installed, load
from rlcore.plugins.planning import plan_run
from rlcore.testing import check_plugin
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

NULL = [
    "model.path=none",
    "data.sources.all.path=prompts.jsonl",
    "reward.functions.letters.fn=half",
]
GOOD = """
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import RewardFunction

    @hookimpl
    def rlcore_reward_functions():
        return [RewardFunction("half", "math:sqrt")]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def every_offer(names: tuple[str, ...]) -> None:
    """Load, and call the hooks that the tests break."""
    hooks = load(names)
    for hook in (hooks.reward_functions, hooks.config_sections, hooks.worker_classes):
        hook()


def refused(*names: str) -> str:
    """The one line with which loading is refused."""
    with pytest.raises(PluginError) as caught:
        every_offer(names)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_an_installed_plugin_is_listed_and_not_imported(site: Path) -> None:
    write_package(site, "demo_listed", "raise RuntimeError('imported')", distribution="demo-dist", version="2.5")
    found = {plugin.name: plugin for plugin in installed()}
    assert str(found["demo_listed"].provider) == "plugin 'demo_listed' (demo-dist 2.5)"
    load([]).reward_functions()
    assert "demo_listed" not in sys.modules


def test_a_plugin_is_enabled_by_either_spelling_of_its_name(site: Path) -> None:
    write_package(site, "demo_spelt", GOOD, entry_points={"rlcore": {"demo-spelt": "demo_spelt"}})
    for name in ("demo-spelt", "demo_spelt"):
        offers = load([name]).reward_functions()
        assert ("half", "demo_spelt") in {(offer.value.name, offer.provider.plugin) for offer in offers}


def test_an_unknown_plugin_is_refused_with_the_nearest_name(site: Path) -> None:
    write_package(site, "demo_near", GOOD)
    assert "did you mean 'demo_near'" in refused("demo_neat")


def test_a_first_party_plugin_that_is_missing_is_named_with_what_to_install() -> None:
    assert install_hint("reward_loop") == "`pip install ./plugins/reward_loop` in a clone of rlcore"
    assert install_hint("vllm") == "`pip install './plugins/vllm[engine]'` in a clone of rlcore"
    assert install_hint("somebody_elses") == ""


def test_two_distributions_with_one_plugin_name_are_both_named(site: Path) -> None:
    write_package(site, "demo_twice", GOOD, distribution="first-dist")
    other = {"rlcore": {"demo_twice": "demo_other"}}
    write_package(site, "demo_other", GOOD, distribution="second-dist", entry_points=other)
    line = refused("demo_twice")
    assert "first-dist 1.0" in line
    assert "second-dist 1.0" in line


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        (("rlcore>=9",), "needs rlcore>=9"),
        (("rlcore<0.1",), f"this is rlcore {__version__}"),
        ((), "does not say which rlcore"),
        (('rlcore>=0.1; extra == "test"',), "does not say which rlcore"),
        (("rlcore >=>= 1",), "malformed"),
    ],
)
def test_the_range_of_rlcore_is_checked_before_the_import(site: Path, requires: tuple[str, ...], message: str) -> None:
    write_package(site, "demo_range", "raise RuntimeError('imported')", requires=requires)
    line = refused("demo_range")
    assert message in line
    assert "demo-range 1.0" in line
    assert "demo_range" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(3)", "sys.exit(3)"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plugin_whose_import_fails_is_named_with_the_cause(site: Path, source: str, message: str) -> None:
    write_package(site, "demo_import", source)
    line = refused("demo_import")
    assert "plugin 'demo_import' (demo-import 1.0)" in line
    assert message in line


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@hookimpl\ndef rlcore_reward_function(): return []", "did you mean 'rlcore_reward_functions'"),
        ("def rlcore_reward_functions(): return []", "lacks the marker"),
        ("@hookimpl(specname='rlcore_rewards')\ndef f(): return []", "no hook rlcore_rewards"),
        ("@hookimpl\ndef rlcore_reward_functions(config): return []", "config"),
        ("@hookimpl\ndef rlcore_resource_pools(config, request): return []", "request"),
        ("@hookimpl\ndef rlcore_reward_functions(): return None", "returned NoneType"),
        ("@hookimpl\ndef rlcore_reward_functions(): return {}", "returned dict"),
        ("@hookimpl\ndef rlcore_reward_functions(): yield 1", "returned generator"),
        ("@hookimpl\ndef rlcore_reward_functions(): return ['x']", "'x'"),
        ("@hookimpl\ndef rlcore_reward_functions(): return 1 / 0", "ZeroDivisionError"),
        ("@hookimpl(wrapper=True)\ndef rlcore_reward_functions():\n    return (yield)", "is a wrapper"),
        ("@hookimpl\ndef rlcore_reward_functions(): return [RewardFunction('x', lambda t: 1)]", "needs 'module:attr'"),
        ("@hookimpl\ndef rlcore_reward_functions(): return [RewardFunction('x', 'a:f.<locals>.g')]", "top level"),
        (
            "@hookimpl\ndef rlcore_config_sections(): return [ConfigSection('x', Provider)]",
            "needs the plugin's name",
        ),
        ("@hookimpl\ndef rlcore_config_sections(): return [ConfigSection('demo_broken', int)]", "frozen dataclass"),
        ("@hookimpl\ndef rlcore_worker_classes(): return [WorkerClass(int, 'x', int)]", "subclass of"),
    ],
)
def test_a_broken_hook_is_refused_naming_plugin_and_distribution(site: Path, source: str, message: str) -> None:
    head = (
        "from rlcore.contracts.hooks import hookimpl\n"
        "from rlcore.contracts.offers import *\n"
        "from rlcore.contracts.components import *\n"
        "from rlcore.config.providers import *\n"
    )
    write_package(site, "demo_broken", head + source)
    line = refused("demo_broken")
    assert "plugin 'demo_broken' (demo-broken 1.0)" in line
    assert message in line


def test_an_object_of_the_module_that_raises_when_it_is_looked_at_names_the_plugin(site: Path) -> None:
    odd = "class Odd:\n    def __getattr__(self, name):\n        raise KeyError(name)\n\nodd = Odd()\n"
    write_package(site, "demo_odd", odd, distribution="odd-dist")
    expected = r"plugin 'demo_odd' \(odd-dist 1\.0\): KeyError: 'rlcore_impl' \(\S+:\d+\)"
    assert re.fullmatch(expected, refused("demo_odd"))


def test_a_plain_file_is_a_plugin_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "my_plain.py"
    path.write_text("RLCORE_API = '1'\n" + dedent(GOOD))
    hooks = load([str(path)])
    assert [(p.plugin, p.distribution) for p in hooks.providers()] == [("my_plain", str(path))]
    theirs = [offer for offer in hooks.reward_functions() if offer.provider.plugin != "core"]
    assert [offer.value.name for offer in theirs] == ["half"]


@pytest.mark.parametrize("stated", ["", "RLCORE_API = '2'", "RLCORE_API = 1"])
def test_a_plain_file_states_the_api_it_was_written_for(tmp_path: Path, stated: str) -> None:
    path = tmp_path / "my_api.py"
    path.write_text(stated)
    assert "needs RLCORE_API = '1'" in refused(str(path))


def test_a_plain_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no file" in refused(str(tmp_path / "absent.py"))


def test_a_name_and_a_file_of_that_name_are_refused_together(site: Path, tmp_path: Path) -> None:
    write_package(site, "demo_both", GOOD)
    path = tmp_path / "demo_both.py"
    path.write_text("RLCORE_API = '1'")
    assert "enabled twice" in refused("demo_both", str(path))


def test_a_section_enables_its_plugin_and_the_saved_config_enables_it_again(site: Path, tmp_path: Path) -> None:
    write_package(site, "demo_section", GOOD)
    path = tmp_path / "my_saved.py"
    path.write_text("RLCORE_API = '1'")
    hooks, loaded = configure([], NULL, ["demo-section", str(path)])
    assert [p.plugin for p in hooks.providers()] == ["demo_section", "my_saved"]
    saved = tmp_path / "config.yaml"
    saved.write_text(loaded.yaml)
    again, _ = configure([saved], [], [])
    assert again.providers() == hooks.providers()


def test_a_file_plugin_takes_its_settings_from_the_section_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "my_settings.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from rlcore.contracts.hooks import hookimpl\n"
        "from rlcore.config.providers import ConfigSection\n"
        "RLCORE_API = '1'\n"
        "@dataclass(frozen=True)\n"
        "class Settings:\n"
        "    level: int = 1\n"
        "@hookimpl\n"
        "def rlcore_config_sections():\n"
        "    return [ConfigSection('my_settings', Settings)]\n"
    )
    _, loaded = configure([], [*NULL, "plugins.my_settings.level=3"], [str(path)])
    assert loaded.config.plugins["my_settings"].level == 3


def test_every_hook_runs_once(site: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(site, "demo_once", GOOD)
    monkeypatch.setenv("RLCORE_TRACE_PLUGINS", "1")
    hooks = load(["demo_once"])
    hooks.reward_functions()
    hooks.reward_functions()
    traced = [line for line in capfd.readouterr().err.splitlines() if "demo_once" in line]
    assert len(traced) == 1
    assert "rlcore_reward_functions()" in traced[0]


def test_entry_point_rewards_are_offered_without_loading_them(site: Path) -> None:
    write_package(site, "demo_ten", "raise RuntimeError", entry_points={"rlcore.rewards": {"ten": "demo_ten:score"}})
    offers = {offer.value.name: offer for offer in load([]).entry_point_rewards()}
    assert offers["ten"].value.target == "demo_ten:score"
    assert str(offers["ten"].provider) == "entry point 'ten' (demo-ten 1.0)"
    assert "demo_ten" not in sys.modules


def test_the_null_plugin_is_declared_and_conforms() -> None:
    assert [entry.value for entry in entry_points(group="rlcore", name="null")] == ["rlcore.testing.null"]
    report = check_plugin("null")
    assert report.problems == ()


def test_the_conformance_kit_names_what_is_wrong(site: Path) -> None:
    write_package(
        site,
        "demo_check",
        """
        from rlcore.contracts.actor import ActorWorker
        from rlcore.contracts.hooks import hookimpl
        from rlcore.contracts.offers import RewardFunction, WorkerClass
        from rlcore.contracts.reference import ReferenceWorker

        class Half(ActorWorker):
            pass

        class Sibling(ReferenceWorker):
            def setup(self): ...
            def logprobs(self, batch): ...

        @hookimpl
        def rlcore_reward_functions():
            return [RewardFunction("gone", "math:no_such_function")]

        @hookimpl
        def rlcore_worker_classes():
            return [WorkerClass(ActorWorker, "a", Half), WorkerClass(ActorWorker, "b", Sibling)]
        """,
    )
    problems = "\n".join(check_plugin("demo_check").problems)
    assert "no_such_function" in problems
    assert "Half as ActorWorker for backend 'a', but it is abstract: it does not define" in problems
    assert "Sibling as ActorWorker for backend 'b', but it does not inherit from ActorWorker" in problems


def test_the_metadata_of_a_plugin_is_parsed_once_also_when_others_come_and_go(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = {"rlcore": {"demo_once": "demo_once"}, "rlcore.rewards": {"once": "math:sqrt"}}
    write_package(site, "demo_once", GOOD, entry_points=entered)
    parsed: list[str] = []
    metadata = PathDistribution.metadata

    def counted(distribution: PathDistribution) -> Any:
        parsed.append(str(distribution.locate_file("")))
        return metadata.__get__(distribution)

    monkeypatch.setattr(PathDistribution, "metadata", property(counted))
    for name in ("demo_here", "demo_there"):
        write_package(tmp_path / name, name, GOOD)
        with importable(tmp_path / name):
            assert {"demo_once", name} <= {plugin.name for plugin in installed()}
            assert "once" in {offer.value.name for offer in load([]).entry_point_rewards()}
    assert parsed.count(str(site)) == 1


@pytest.mark.parametrize(("directory", "where"), [(".", "."), ("rlcore-mine", "./rlcore-mine")])
def test_a_plugin_whose_project_is_here_is_installed_from_here(
    directory: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-broken").mkdir()
    (tmp_path / "a-broken" / "pyproject.toml").write_text("[project")
    (tmp_path / "b-other").mkdir()
    (tmp_path / "b-other" / "pyproject.toml").write_text("project = 3")
    (tmp_path / directory).mkdir(exist_ok=True)
    (tmp_path / directory / "pyproject.toml").write_text('[project.entry-points.rlcore]\nmy-own = "my_own"\n')
    with pytest.raises(
        PluginError, match=rf"'my_own' is not installed; .*; its project is here: `pip install -e {where}`$"
    ):
        load(["my_own"])
    with pytest.raises(PluginError) as raised:
        load(["my_other"])
    assert "pip install -e" not in str(raised.value)


def test_what_a_plugin_prints_when_it_is_imported_and_called_is_shown_as_it_may_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it cannot take standard output away."""
    monkeypatch.setenv("PRINTED_API_KEY", "sekrit-1234-5678")
    prints = 'print("\\x1b[31m", os.environ["PRINTED_API_KEY"], file=sys.stderr)'
    path = tmp_path / "my_printing.py"
    path.write_text(
        f"""import os
import sys
from rlcore.contracts.hooks import hookimpl

RLCORE_API = "1"
{prints}


@hookimpl
def rlcore_reward_functions():
    {prints}
    sys.stdout = sys.stderr = None
    return []
"""
    )
    with pytest.raises(PlanError, match="nothing of it is in the plan"):
        plan_run([], SETTINGS, ["null", str(path)])
    print("still there")
    shown = capsys.readouterr()
    assert shown.err == "\N{REPLACEMENT CHARACTER}[31m ${oc.env:PRINTED_API_KEY}\n" * 2
    assert shown.out == "still there\n"
