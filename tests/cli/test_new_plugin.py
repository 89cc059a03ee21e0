"""`rlcore plugins new`: what it writes passes its tests and the check, and trains; a wrong request writes nothing."""

import os
import re
import sys
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from rlcore.cli import main, new_plugin, plugin_package, plugin_trial
from rlcore.cluster.forks import CommandEnd, ForkedCommands, run_in_forks
from rlcore.errors import ConfigError
from rlcore.testing.packages import importable

KINDS = tuple(plugin_package.known_offers())
PUBLIC = re.compile(
    r"rlcore|rlcore\.(contracts|algo|testing)(\.\w+)*|rlcore\.(types|errors|config|cluster\.kit)|"
    r"rlcore_@name@(\.\w+)?|rlcore_agent_loop(\.suites)?"
)

IMPORT_PROBE = """import os, sys
class Probe:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch._C":
            with open({seen!r}, "a") as file:
                file.write(str(os.getpid()) + "\\n")
sys.meta_path.insert(0, Probe)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(kinds: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, whose commands were not run."""
    monkeypatch.setattr(new_plugin, "try_package", lambda package: 0.0)
    assert main(["plugins", "new", "mine", "--offers", kinds]) == 0
    return Path("rlcore-mine")


@pytest.fixture
def torch_imports(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of processes that have imported torch since, this one aside."""
    directory = tmp_path_factory.mktemp("probe")
    seen = directory / "seen"
    seen.touch()
    (directory / "sitecustomize.py").write_text(IMPORT_PROBE.format(seen=str(seen)))
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return lambda: len(set(seen.read_text().split()))


@pytest.mark.slow
def test_two_offers_pass_their_tests_and_the_check_and_train_and_torch_is_imported_once(
    place: Path, capsys: pytest.CaptureFixture[str], torch_imports: Callable[[], int]
) -> None:
    assert main(["plugins", "new", "mine", "--offers", "reward,critic"]) == 0
    assert torch_imports() == 1
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[-3:]] == [
        "python -m pytest -q tests",
        "rlcore plugins --check mine",
        "rlcore train try.yaml --plugin null --plugin mine",
    ]
    assert not (place / "rlcore-mine" / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("kept_interpreter")
@pytest.mark.parametrize("kind", [*KINDS, "tool,critic,loss"])
def test_every_kind_passes_its_tests_and_the_check_and_trains(
    place: Path, kind: str, torch_imports: Callable[[], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "new", "mine", "--offers", kind, "--into", str(place)]) == 0
    # Tests and training share an import; the check probes algorithms in a process that may be killed.
    assert torch_imports() == ({"estimator", "loss"} & set(kind.split(",")) != set())
    took = re.search(r"next \(run just now, in ([\d.]+) s together", capsys.readouterr().out)
    assert took
    print(f"{kind}: {took[1]} s")


def test_every_kind_has_a_file_a_test_and_a_key_that_uses_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [kind for kind in KINDS if kind not in ("agent", "critic")]
    package = written(",".join(kinds), monkeypatch)
    for kind in kinds:
        assert (package / "rlcore_mine" / f"{kind}.py").is_file()
        assert (package / "tests" / f"test_{kind}.py").is_file()
    with importable(package):
        module = __import__("rlcore_mine")
        assert [offer.name for offer in module.rlcore_algorithms()] == ["mine_centred", "mine_bounded"]
        assert len(module.rlcore_worker_classes()) == 2
        assert [offer.name for offer in (*module.rlcore_clusters(), *module.rlcore_trackers())] == ["mine", "mine"]
        for name in [name for name in sys.modules if name.split(".")[0] == "rlcore_mine"]:
            del sys.modules[name]
    settings = yaml.safe_load((package / "try.yaml").read_text())
    assert (settings["rollout"]["backend"], settings["cluster"]["backend"]) == ("mine", "mine")
    assert settings["algo"] == {"advantage": "mine_centred", "policy_loss": "mine_bounded"}
    texts = [path.read_text() for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert not re.search("@[a-z]+@", "".join(texts))


def test_every_kind_that_an_author_may_ask_for_has_a_template() -> None:
    wanted = "reward judge tool environment agent estimator loss critic worker pool cluster tracker order"
    assert sorted(KINDS) == sorted(wanted.split())


def test_names_of_package_distribution_and_entry_point(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_plugin, "try_package", lambda package: 0.0)
    assert main(["plugins", "new", "two_words", "--offers", "tool"]) == 0
    project = tomllib.loads((place / "rlcore-two-words" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "rlcore-two-words"
    assert project["entry-points"]["rlcore"] == {"two_words": "rlcore_two_words"}
    assert project["dependencies"] == ["rlcore>=0.1,<0.2", "rlcore-agent-loop>=0.1,<0.2"]
    assert (place / "rlcore-two-words" / "rlcore_two_words" / "reward.py").is_file()  # a plugin needs a hook


def test_templates_import_public_names_only() -> None:
    templates = list(files("rlcore.cli").joinpath("templates", "plugin").iterdir())
    text = "".join(path.read_text("utf-8") for path in templates if path.name.endswith(".py.txt"))
    modules = set(re.findall(r"^from (rlcore[\w.@]*) import", text, re.MULTILINE))
    assert len(modules) > 10
    assert [module for module in modules if not PUBLIC.fullmatch(module)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (("rlcore_mine/reward.py", "1, len(text)", "1, 2 * len(text)"), "FAILED tests/test_reward.py::TestLetters"),
        (("rlcore_mine/__init__.py", "reward:letters", "reward:gone"), "'rlcore plugins --check' ended with 2"),
        (("try.yaml", "max_steps", "max_step"), "'rlcore train try.yaml' ended with 2"),
    ],
)
def test_a_command_that_fails_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, str, str], named: str
) -> None:
    directory = written("reward", monkeypatch)
    monkeypatch.undo()
    monkeypatch.chdir(place)
    path = directory / broken[0]
    path.write_text(path.read_text().replace(*broken[1:]))
    if "FAILED" not in named:  # its test would be the first to fail
        for test in (directory / "tests").iterdir():
            test.write_text("def test_nothing():\n    pass\n")
    package = plugin_package.PluginPackage("mine", directory, {"reward": plugin_package.known_offers()["reward"]})
    with pytest.raises(ConfigError, match=re.escape(named)):
        plugin_package.try_package(package)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["taken"], "'rlcore-taken' exists; choose another name"),
        (["json"], "is a module of the standard library; choose another name, such as json_reward"),
        (["my-plugin"], "is not a lower-case Python identifier"),
        (["Mine"], "is not a lower-case Python identifier"),
        (["m" * 101], "has 101 letters; needs a name of at most 100"),
        (["class"], "is not a lower-case Python identifier"),
        (["core"], "the name belongs to rlcore itself"),
        (["null"], "is installed; choose another name than 'null'"),
        (["mine", "--offers", "rewards"], "the offer 'rewards' has no template; did you mean 'reward'?"),
        (["mine", "--offers", ""], "the offer '' has no template"),
        (["mine", "--offers", "agent,tool"], "choose one of the two"),
        (["mine", "--into", "gone"], "'gone' is not a directory to write into"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (place / "rlcore-taken").mkdir()
    assert main(["plugins", "new", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["rlcore-taken"]


def test_a_directory_that_is_not_writable_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert main(["plugins", "new", "mine"]) == 2
    assert "directory '.' is not writable; choose another with --into" in capsys.readouterr().err


def test_a_tool_without_the_plugin_of_tools_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin_package, "find_spec", lambda name: None)
    assert main(["plugins", "new", "mine", "--offers", "tool"]) == 2
    assert (
        "needs the plugin agent_loop, which is not installed; `pip install ./plugins/agent_loop` in a clone of rlcore"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_command_that_does_not_end_is_stopped(place: Path) -> None:
    (place / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    where, environment = str(place), {"PYTHONPATH": str(place)}
    endings = run_in_forks(ForkedCommands([["sleeps"], ["json.tool"]], where, environment, (), 0.9))
    assert endings == [CommandEnd(None, "it wrote nothing")]


@pytest.mark.parametrize(
    ("endings", "words"),
    [
        ([CommandEnd(None, "")], "where 'pytest -q -p' was not done after 180 s"),
        ([CommandEnd(0, ""), CommandEnd(2, "no")], "'rlcore plugins --check' ended with 2: no"),
        ("ImportError: torch", "where no command was run: ImportError: torch"),
    ],
)
def test_the_first_command_that_fails_is_named(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    endings: list[CommandEnd] | str,
    words: str,
) -> None:
    monkeypatch.setattr(plugin_trial, "run_in_forks", lambda commands: endings)
    assert main(["plugins", "new", "mine"]) == 2
    assert words in capsys.readouterr().err
