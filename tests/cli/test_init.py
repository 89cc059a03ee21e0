"""`rlcore init`: what it writes trains, its commands were run, and a name that cannot serve is refused."""

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.cli.init import _try
from rlcore.data import load_prompts, refuse_overlap
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.train import train

NULL = (
    "model.tokenizer=bytes", "actor.backend=null", "rollout.backend=null", "train.max_steps=2", "eval.every_steps=1",
    "eval.max_tokens=2", "reward.functions.correct.children=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what `init` wrote, and with what it printed in out.txt."""
    directory, printed = tmp_path_factory.mktemp("written"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(directory)
        assert main(["init", "spelling", "--model", "Some/model"]) == 0
    (directory / "out.txt").write_text(printed.getvalue())
    return directory


@pytest.fixture
def project(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return tmp_path / "spelling"


def run_test(path: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the written test as the printed command does, with the interpreter's own assert statements."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    command = [sys.executable, str(path)]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
def test_the_project_has_data_a_reward_with_its_test_and_a_configuration(project: Path) -> None:
    assert {path.name for path in project.iterdir() if path.is_file()} == {
        "train.jsonl", "held.jsonl", "reward.py", "test_reward.py", "config.yaml",
    }  # fmt: skip
    assert "@" not in "".join(path.read_text() for path in project.iterdir() if path.is_file())
    config = plan_run([project / "config.yaml"], []).config
    refuse_overlap(load_prompts(config.data.sources, config.data), load_prompts(config.eval.sources, config.data))
    assert config.model.path == "Some/model"
    keys = [line for line in (project / "config.yaml").read_text().splitlines() if "#" in line[1:]]
    assert 10 <= len(keys) <= 16


@pytest.mark.slow
def test_the_printed_commands_do_what_they_say(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (project.parent / "out.txt").read_text().splitlines()
    test, plan, run = (line.strip() for line in lines[-3:])
    done = run_test(project.parent / test.split()[1])
    assert done.returncode == 0
    assert done.stdout == "the reward's test passed\n"
    assert main(plan.split()[1:]) == 0
    assert "data.sources.train" in capsys.readouterr().out
    assert run == "rlcore train spelling/config.yaml"


@pytest.mark.slow
def test_what_it_writes_trains_with_its_canary(project: Path) -> None:
    result = train(project / "config.yaml", *NULL, plugins=["null"])
    assert (result.steps, len(result.evaluations)) == (2, 3)


@pytest.mark.slow
def test_the_third_command_is_run_for_a_step_and_leaves_nothing(project: Path) -> None:
    out = (project.parent / "out.txt").read_text()
    assert "next (all were run just now, the third for one step with a stand-in for the model):" in out
    assert {path.name for path in project.parent.iterdir()} == {"spelling", "out.txt"}
    config = project / "config.yaml"
    config.write_text(config.read_text().replace('canary: "{answer}"', 'canary: "not {answer}"'))
    with pytest.raises(ConfigError, match=r"whose plan is refused: reward\.canary: the known-good response 'not"):
        _try(Path("spelling"))
    reward = project / "reward.py"
    reward.write_text(reward.read_text() + "import http\n")  # so the plan does not call it
    with pytest.raises(
        ConfigError, match=r"whose first step fails without its model, too: rlcore: reward\.canary: the known-"
    ):
        _try(Path("spelling"))


@pytest.mark.slow
def test_a_reward_whose_test_fails_is_not_handed_out(project: Path) -> None:
    (project / "reward.py").write_text((project / "reward.py").read_text().replace("return 1.0", "return 0.25"))
    assert run_test(project / "test_reward.py").returncode == 1


def test_a_reward_is_not_called_tested_where_python_skips_assert(project: Path) -> None:
    done = run_test(project / "test_reward.py", PYTHONOPTIMIZE="1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "run this without -O" in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("taken", "'taken' exists; choose another name"),
        ("json", "is a module of the standard library"),
        ("rlcore", "is a module of rlcore"),
        ("3d", "is not a Python identifier"),
        ("my-task", "is not a Python identifier"),
        ("class", "is not a Python identifier"),
        ("", "is not a Python identifier"),
        (".", "is not a Python identifier"),
        ("gone/task", "found no directory 'gone'"),
    ],
)
def test_a_name_that_cannot_serve_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    assert main(["init", name]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_sizes_suit_the_machine(project: Path) -> None:
    text = (project / "config.yaml").read_text()
    assert "max_tokens: 16 " in text or "max_tokens: 64 " in text
    rows = [json.loads(line) for line in (project / "train.jsonl").read_text().splitlines()]
    assert len(rows) >= plan_run([project / "config.yaml"], []).config.train.prompts_per_step


def test_the_printed_commands_quote_a_path_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlcore.cli.init._try", lambda directory: None)
    (tmp_path / "my dir").mkdir()
    assert main(["init", "my dir/spelling"]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert [shlex.split(line)[-1] for line in lines] == [
        f"my dir/spelling/{name}" for name in ("test_reward.py", "config.yaml", "config.yaml")
    ]
