"""Plugins in one file: written, used, and made into packages; what cannot be is refused in one line."""

import ast
import re
from pathlib import Path

import pytest

from rlcore.cli import main, plugin_file, plugin_package, plugin_trial
from rlcore.cli.late_imports import is_heavy, with_late_imports
from rlcore.cluster.forks import CommandEnd
from rlcore.cluster.interpreter import run_in_new_interpreter
from rlcore.testing.packages import importable

KINDS = tuple(plugin_package.known_offers())
SUITES = {
    "reward": "RewardFunctionSuite",
    "estimator": "AdvantageEstimatorSuite",
    "loss": "PolicyLossSuite",
    "agent": "AgentLoopSuite",
    "critic": "CriticEngineSuite",
    "pool": "ResourcePoolSuite",
    "worker": "RolloutWorkerSuite",
    "cluster": "ClusterSuite",
    "tracker": "TrackerSuite",
    "order": "PromptOrderSuite",
    "judge": "RewardReplicaSuite",
    "tool": "ToolSuite",
    "environment": "EnvironmentSuite",
}
HEAD = 'from rlcore import Algorithm, AlgorithmKind, RewardFunction, Scope, hookimpl\n\nRLCORE_API = "1"\n\n\n'
REWARD = HEAD + (
    "def short(completions):\n    return [float(len(text) < 9) for text in completions]\n\n\n"
    "@hookimpl\ndef rlcore_reward_functions():\n    return [RewardFunction('short', TARGET)]\n"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text_of(kinds: str) -> str:
    """A plugin in one file with offers of these kinds."""
    return plugin_file.file_text("mine", plugin_package.chosen_offers(kinds, plugin_package.known_offers()))


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are not run."""
    monkeypatch.setattr(plugin_file, "try_package", lambda package: 0.0)
    monkeypatch.setattr(plugin_file, "run_trial", lambda *arguments: 0.0)


@pytest.mark.slow
def test_a_file_is_written_checked_and_trained_with(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "new", "mine", "--file", "--offers", "reward,tracker"]) == 0
    assert {path.name for path in place.iterdir()} - {"__pycache__"} == {"mine.py"}
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "wrote mine.py"
    assert re.fullmatch(r"next \(run just now, in [\d.]+ s\):", lines[1])
    assert lines[2] == "rlcore plugins --check mine.py"
    assert lines[3].startswith("rlcore train --plugin null --plugin mine.py ")
    assert lines[4] == "later: rlcore plugins package mine.py"


@pytest.mark.slow
@pytest.mark.usefixtures("kept_interpreter")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_every_kind_is_checked_and_trained_with(place: Path, kind: str) -> None:
    assert main(["plugins", "new", "mine", "--file", "--offers", kind]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("kept_interpreter")
@pytest.mark.parametrize("kind", [*KINDS, "reward,tracker,order"])
def test_a_written_file_becomes_a_package_that_passes_its_tests_and_trains(place: Path, kind: str) -> None:
    (place / "mine.py").write_text(text_of(kind))
    assert main(["plugins", "package", "mine.py"]) == 0
    assert (place / "rlcore-mine" / "tests" / "test_mine.py").is_file()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("left_out", ["agent", "tool,environment"])
def test_every_kind_stands_in_one_file(place: Path, left_out: str) -> None:
    kinds = [kind for kind in KINDS if kind not in left_out.split(",")]
    assert main(["plugins", "new", "mine", "--file", "--offers", ",".join(kinds)]) == 0
    text = (place / "mine.py").read_text()
    assert not re.search("@[a-z]+@", text)
    modules = re.findall(r"^from (\S+) import", text, re.MULTILINE)
    assert len(modules) == len(set(modules)) > 5
    defined = re.findall(r"^(?:def|class) (\w+)|^([A-Z_]+) = ", text, re.MULTILINE)
    assert len(defined) == len(set(defined)), "no two examples share a name"
    assert main(["plugins", "package", "mine.py"]) == 0
    tests = (place / "rlcore-mine" / "tests" / "test_mine.py").read_text()
    assert {SUITES[kind] for kind in kinds} <= set(re.findall(r"\((\w+)\):", tests))


@pytest.mark.slow
def test_planning_with_a_file_imports_no_torch(place: Path) -> None:
    (place / "mine.py").write_text(text_of("estimator,loss"))
    done = run_in_new_interpreter("import sys, mine; print('torch' in sys.modules)", 60.0)
    assert done is not None
    assert (done.output, done.errors) == ("False\n", "")


def test_heavy_imports_move_into_the_functions_that_use_them() -> None:
    source = """import torch
from rlcore.algo.loss import One, Two
from torch import Tensor


def first(one: One, n: int = 1) -> Tensor:
    \"\"\"Says it.\"\"\"
    return torch.zeros(n)


def second() -> int:
    found: Tensor = Two()
    return found
"""
    late = [node for node in ast.parse(source).body[:3] if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(is_heavy(node) for node in late)
    moved = with_late_imports(source, late)
    assert 'def first(one: "One", n: int = 1) -> "Tensor":' in moved
    assert '    """Says it."""\n    import torch\n\n    return torch.zeros(n)' in moved
    assert "def second() -> int:\n    from rlcore.algo.loss import Two\n\n    found: Tensor = Two()" in moved


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(
    "target",
    ['f"{__file__}:short"', '"mine.py:short"', '"./mine.py:short"', "'mine:short'", '"rlcore_file_mine:short"'],
)
def test_targets_in_the_file_name_the_package(place: Path, target: str) -> None:
    file = place / "mine.py"
    file.write_text(REWARD.replace("TARGET", target))
    assert main(["plugins", "package", "mine.py"]) == 0
    source = (place / "rlcore-mine" / "rlcore_mine" / "__init__.py").read_text()
    assert "RewardFunction('short', \"rlcore_mine:short\")" in source
    assert "RLCORE_API" not in source
    assert "RLCORE_API" in file.read_text(), "the file stays as it is"
    assert 'target = "rlcore_mine:short"' in (place / "rlcore-mine" / "tests" / "test_mine.py").read_text()
    with importable(place / "rlcore-mine" / "rlcore_mine"):
        assert compile(source, "mine", "exec")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["package", "gone.py"], "'gone.py' is not a .py file"),
        (["package", "notes.txt"], "'notes.txt' is not a .py file"),
        (["package", "json.py"], "is a module of the standard library"),
        (["package", "two-words.py"], "is not a lower-case Python identifier"),
        (["package", "broken.py"], "importing it: ZeroDivisionError"),
        (["package", "plain.py"], "RLCORE_API is None; needs RLCORE_API = '1'"),
        (["package", "empty.py"], "'empty.py' offers nothing; needs a hook"),
        (["package", "taken.py"], "'rlcore-taken' exists"),
        (["new", "taken", "--file"], "'taken.py' exists"),
        (["new", "mine", "--file", "--offers", "losses"], "the offer 'losses' has no template; did you mean 'loss'?"),
        (["new", "mine", "--file", "--into", "gone"], "'gone' is not a directory to write into"),
        (["new", "json", "--file"], "is a module of the standard library"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (place / "rlcore-taken").mkdir()
    for name in ("notes.txt", "json.py", "two-words.py", "plain.py"):
        (place / name).write_text("")
    (place / "broken.py").write_text("1 / 0\n")
    (place / "empty.py").write_text('RLCORE_API = "1"\n')
    (place / "taken.py").write_text(REWARD.replace("TARGET", 'f"{__file__}:short"'))
    before = sorted(place.rglob("*"))
    assert main(["plugins", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before


def test_a_file_whose_command_fails_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin_trial, "run_in_forks", lambda commands: [CommandEnd(2, "why")])
    assert main(["plugins", "new", "mine", "--file"]) == 2
    assert "wrote 'mine.py', where 'rlcore plugins --check' ended with 2: why" in capsys.readouterr().err
