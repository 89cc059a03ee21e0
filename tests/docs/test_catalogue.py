"""The catalogue says what the repository's plugins are, its page is made from it, and a search finds them."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from rlcore import __version__
from rlcore.cli import main
from rlcore.plugins.catalogue import SuiteResult, read_catalogue, search
from rlcore.plugins.discover import installed

ROOT = Path(__file__).parents[2]
RUN = "run: python docs/catalogue.py"


def maker() -> ModuleType:
    """The script of docs/ that makes both files."""
    spec = importlib.util.spec_from_file_location("make_catalogue", ROOT / "docs" / "catalogue.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("docs/catalogue.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_plugin_of_the_repository_has_its_entry() -> None:
    make, here = maker(), {plugin.name for plugin in installed()}
    raw = {entry["plugin"]: entry for entry in json.loads(make.DATA.read_text("utf-8"))["plugins"]}
    places = make.distributions()
    assert {"agent_loop", "critic_engine", "ray", "reward_loop", "vllm", "digit_sum"} <= set(places)
    assert set(places) <= set(raw), RUN
    assert list(raw) == sorted(raw)
    for name in sorted(here & set(places)):
        assert raw[name] == make.described(name, places[name], raw[name]["results"]), RUN


def test_the_page_is_made_of_the_catalogue() -> None:
    make = maker()
    text = make.PAGE.read_text("utf-8")
    assert text == make.page(read_catalogue()), RUN
    assert all(f"| [{entry.plugin}](" in text for entry in read_catalogue())


def test_results_are_of_this_version_and_none_fails() -> None:
    for entry in read_catalogue():
        result = entry.results[__version__]
        assert (result.failed, result.problems) == (0, ()), entry.plugin
        assert result.passed or entry.plugin == "vllm", f"{entry.plugin}: no suite was run"


def test_a_result_says_what_was_run() -> None:
    assert SuiteResult(9, 0, 0, (), "3.11").words == "passes 9 tests"
    assert SuiteResult(9, 0, 2, (), "3.11").words == "passes 9 tests, 2 skipped"
    assert SuiteResult(0, 0, 3, (), "3.11").words == "not run, 3 skipped"
    assert SuiteResult(8, 1, 0, (), "3.11").words == "fails 1 of 9 tests, 0 problems"
    assert SuiteResult(9, 0, 0, ("x",), "3.11").words == "fails 0 of 9 tests, 1 problem"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["critic"], ["critic_engine"]),
        (["CLUSTER"], ["ray"]),
        (["rewards", "judges"], ["reward_loop"]),
        (["judges"], ["reward_loop", "vllm"]),
        (["last_number"], ["digit_sum"]),
        (["critic", "cluster"], []),
    ],
)
def test_a_search_finds_names_offers_and_summaries(words: list[str], found: list[str]) -> None:
    ours = ("agent_loop", "critic_engine", "digit_sum", "ray", "reward_loop", "vllm")
    entries = [entry for entry in read_catalogue() if entry.plugin in ours]
    assert [entry.plugin for entry in search(entries, words)] == found


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "search", "critic", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["plugin"] == "critic_engine"
    assert rows[0]["results"][__version__]["passed"] > 10
    assert main(["plugins", "search", "last_number"]) == 0
    assert "digit_sum" in capsys.readouterr().out
    assert main(["plugins", "search", "no_such_thing"]) == 0
    assert "no plugin of the catalogue has 'no_such_thing'; it has: agent_loop" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_imports_no_plugin_and_nothing_heavy() -> None:
    from rlcore.cluster.interpreter import run_in_new_interpreter

    heavy = "{'torch', 'rlcore_ray', 'rlcore_reward_loop', 'transformers'}"
    code = f"import sys; from rlcore.cli import main; main(['plugins', 'search']); print({heavy} & set(sys.modules))"
    done = run_in_new_interpreter(code, 100)
    assert done is not None
    assert done.output.rstrip().endswith("set()"), done.errors
