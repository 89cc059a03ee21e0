"""The command line, as a user calls it."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlcore
from rlcore.cli import COMMANDS, main
from rlcore.testing import write_prompts
from rlcore.testing.packages import importable, write_package
from rlcore.testing.runs import run_settings
from rlcore.train import checkpoint

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run of the null model; two steps."""
    prompts, heldout = write_prompts(tmp_path / "p.jsonl", 8), write_prompts(tmp_path / "h.jsonl", 2, "Other {index}.")
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"""
        model: {{path: none, tokenizer: bytes}}
        data: {{sources: {{all: {{path: {prompts}}}}}}}
        eval: {{sources: {{heldout: {{path: {heldout}}}}}, at_start: false}}
        rollout: {{backend: 'null', samples_per_prompt: 2, max_tokens: 4}}
        reward: {{functions: {{letters: {{fn: count_letter, children: 1}}}}}}
        actor: {{backend: 'null'}}
        train: {{prompts_per_step: 2, max_steps: 2, dir: {tmp_path / "runs"}}}
        plugins: {{'null': {{}}}}
        """
    )
    return file


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr that a command fails with."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("rlcore: ")
    assert err.count("\n") == 1
    return err


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output of a command."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def in_a_process(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rlcore", *arguments]
    env = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=env, check=False)


def test_help_names_every_command_and_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    assert printed(capsys) == text
    for name in COMMANDS:
        assert f"\n  {name}" in text
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0
        assert f"usage: rlcore {name}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"rlcore {rlcore.__version__}\n"


def test_an_unknown_command_or_option_is_one_line_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'train'?" in failing(capsys, "trian")
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--resum"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("rlcore: unrecognized arguments: --resum")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "plan", "config", "eval"])
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    command: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean 'actor.lr'?" in failing(capsys, command, str(config), "lr=1")
    assert "no such configuration file" in failing(capsys, command, "nowhere.yaml")
    assert not (config.parent / "runs").exists()


@pytest.mark.slow
def test_files_overrides_and_options_stand_in_any_order(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = str(config)
    orders = [
        (text, "--origins", "actor.lr=0.5", "--plugin", "null", "train.seed=3"),
        ("actor.lr=0.5", "--plugin", "null", text, "train.seed=3", "--origins"),
        ("--plugin=null", "train.seed=3", "--origins", "actor.lr=0.5", text),
    ]
    plans = [printed(capsys, "plan", *order) for order in orders]
    assert "override 'actor.lr=0.5'" in plans[0]
    assert len({tuple(sorted(plan.splitlines())) for plan in plans}) == 1


def test_the_plan_shows_roles_pools_arithmetic_rewards_and_algorithms(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "plan", str(config), "reward.functions.letters.weight=0.25")
    rows = [line.split() for line in text.splitlines()]
    assert ["actor", "NullActor", "plugin", "'null'"] in [row[:4] for row in rows]
    assert ["rollout", "NullRollout"] in [row[:2] for row in rows]
    assert ["samples", "4"] in rows
    assert ["updates", "1"] in rows
    assert ["letters", "0.25", "sample"] in [row[:3] for row in rows]
    assert ["advantage", "grpo", "group"] in [row[:3] for row in rows]
    assert "note: no canary" in text
    assert "origins" not in text


def test_the_plan_as_json_is_the_plan(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(printed(capsys, "plan", str(config), "--json"))
    assert plan["workers"]["actor"]["class"].endswith("NullActor")
    origins = json.loads(printed(capsys, "plan", str(config), "actor.lr=0.5", "--json", "--origins"))["origins"]
    assert (origins["actor.lr"], origins["actor.backend"]) == ("override 'actor.lr=0.5'", str(config))
    assert plan["arithmetic"]["samples"] == 4
    assert plan["config"]["train"]["max_steps"] == 2


def test_config_prints_every_value_with_its_origin(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "config", str(config), "actor.lr=0.5").splitlines()
    assert "actor.lr=0.5  # override 'actor.lr=0.5'" in lines
    assert f"train.max_steps=2  # {config}" in lines
    assert "actor.beta1=0.9  # default" in lines
    assert 'algo.advantage="grpo"  # preset grpo' in lines


def test_config_prints_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "config", "--reference") == (ROOT / "examples" / "reference.yaml").read_text("utf-8")


@pytest.fixture
def secret() -> Iterator[str]:
    os.environ["RLCORE_TEST_TOKEN"] = "very-secret-value"
    yield "very-secret-value"
    del os.environ["RLCORE_TEST_TOKEN"]


@pytest.mark.slow
def test_no_command_prints_a_secret(config: Path, secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    override = "reward.functions.letters.kwargs.token=${oc.env:RLCORE_TEST_TOKEN}"
    for arguments in (["config"], ["plan", "--origins"], ["plan", "--json"], ["train", "--dry-run"]):
        text = printed(capsys, *arguments, str(config), override)
        assert secret not in text
        assert ("${oc.env:RLCORE_TEST_TOKEN}" in text) is (arguments != ["train", "--dry-run"])
    error = failing(capsys, "plan", str(config), "train.name=${oc.env:RLCORE_TEST_TOKEN}/x")
    assert secret not in error


def test_a_dry_run_shows_the_plan_and_starts_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "train", str(config), "--dry-run")
    assert text == printed(capsys, "plan", str(config))
    assert not (config.parent / "runs").exists()


@pytest.mark.slow
def test_train_eval_resume_and_export_work_together(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, runs = str(config), config.parent / "runs"
    assert "trained 2 steps" in printed(capsys, "train", text)
    [run] = runs.iterdir()
    assert run.name.startswith("tiny-2")
    assert (run / "config.yaml").is_file()
    assert "trained 3 steps" in printed(capsys, "train", text, "--resume", "train.max_steps=3")
    assert "all 3 steps had been taken already" in printed(
        capsys, "train", text, "--resume-from", str(run), "train.max_steps=3", "train.name=other"
    )
    assert [path.name for path in sorted(runs.iterdir())] == ["other", run.name]
    metrics = json.loads(printed(capsys, "eval", text, "--checkpoint", str(run), "--json"))
    assert "eval/heldout/mean" in metrics
    assert "eval/heldout/mean" in printed(capsys, "eval", text)
    assert "exists" in failing(capsys, "train", text, "train.name=other")
    assert "no checkpoint is there" in failing(capsys, "export", str(config.parent), str(config.parent / "out"))


@pytest.mark.slow
def test_view_writes_a_page_of_a_run_with_its_tokens(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config), "--plugin", "null", "train.name=run"]) == 0
    capsys.readouterr()
    page = tmp_path / "run.html"
    assert main(["view", str(tmp_path / "runs" / "run"), "--out", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"rlcore: 10 samples of 2 steps in {page}\n")
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert main(["view", "find", str(tmp_path / "runs" / "run"), "lane == 'train'", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_export_writes_the_model_of_a_checkpoint_that_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    staged = checkpoint.staging(run, 4)
    (staged / "model").mkdir()
    (staged / "model" / "config.json").write_text("{}")
    published = checkpoint.publish(staged, run, 4, {}, keep=1)
    assert "the model of step 4" in printed(capsys, "export", str(run), str(out))
    assert (out / "config.json").read_text() == "{}"
    assert "is not empty" in failing(capsys, "export", str(run), str(out))
    assert "needs a LoRA checkpoint" in failing(capsys, "export", str(published), str(tmp_path / "x"), "--form=adapter")
    (published / "model" / "config.json").write_text("[]")
    assert "config.json" in failing(capsys, "export", str(published), str(tmp_path / "y"))
    assert not (tmp_path / "y").exists()


@pytest.mark.slow
def test_what_a_run_saved_can_be_planned_again(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "train", str(config), "train.name=run")
    saved = config.parent / "runs" / "run" / "config.yaml"
    again = json.loads(printed(capsys, "plan", str(saved), "--json"))
    before = json.loads((saved.parent / "plan.json").read_text())
    for plan in (again, before):  # what was chosen for the machine is set by the file when it is read again
        plan["choices"] = {key: choice["value"] for key, choice in plan["choices"].items()}
    assert again == before


def test_plugins_lists_what_is_installed_and_loads_only_what_is_enabled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with importable(tmp_path / "site") as site:
        write_package(site, "never_imported", "raise RuntimeError('imported')", version="2.5")
        rows = {row["name"]: row for row in json.loads(printed(capsys, "plugins", "--json", "--plugin", "null"))}
    assert rows["null"]["enabled"]
    assert "rlcore_worker_classes" in rows["null"]["hooks"]
    assert "ActorWorker for backend null" in rows["null"]["offers"]
    assert rows["never_imported"] | {"problems": []} == {
        "name": "never_imported",
        "distribution": "never-imported",
        "version": "2.5",
        "enabled": False,
        "source": "never_imported",
        "hooks": None,
        "offers": None,
        "problems": [],
        "warnings": [],
    }
    assert "not loaded" in printed(capsys, "plugins")


@pytest.mark.fault  # a process for each plugin
def test_checking_plugins_reports_every_problem_and_heavy_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with importable(tmp_path / "site") as site:
        write_package(site, "broken_one", "raise RuntimeError('no luck')")
        write_package(site, "leaving_one", "import os\nos._exit(7)")
        write_package(site, "heavy_one", "print('hello')\nimport ray\n")
        (site / "ray.py").write_text("")
        code = main(["plugins", "--check", "--json", "--plugin", str(plain_file(tmp_path))])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == 2
    assert "no luck" in rows["broken_one"]["problems"][0]
    assert "broken-one 1.0" in rows["broken_one"]["problems"][0]
    assert "it called os._exit(7)" in rows["leaving_one"]["problems"][0]
    assert any("imports ray" in warning for warning in rows["heavy_one"]["warnings"])
    assert "RLCORE_API is '0'" in rows["mine"]["problems"][0]
    assert rows["null"]["problems"] == []


def test_a_plugin_in_a_plain_file_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "RLCORE_API is '0'" in failing(capsys, "plugins", "--plugin", str(plain_file(tmp_path)))


def plain_file(directory: Path) -> Path:
    """A plugin of another interface version."""
    file = directory / "mine.py"
    file.write_text("RLCORE_API = '0'")
    return file


def test_ctrl_c_is_130_and_a_bug_is_a_traceback_without_secrets(
    config: Path, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise RuntimeError(f"cannot write {secret}")

        def flush(self) -> None:
            return None

    class Interrupted(Broken):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    settings = ["config", str(config), "reward.functions.letters.kwargs.a=${oc.env:RLCORE_TEST_TOKEN}"]
    with contextlib.redirect_stdout(Interrupted()):
        assert main(settings) == 130
    with contextlib.redirect_stdout(Broken()):
        assert main(settings) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "cannot write ${oc.env:RLCORE_TEST_TOKEN}" in err
    assert secret not in err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["config --reference", "plugins", "plan --plugin null {settings}"])
def test_a_reader_that_leaves_early_is_not_an_error_and_a_full_disk_is_one_line(tmp_path: Path, command: str) -> None:
    settings = " ".join(f"'{key}={value}'" for key, value in run_settings(tmp_path, 4).items())
    shown = f"{sys.executable} -m rlcore {command.format(settings=settings)}"
    ends = [
        subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False)
        for line in (f"set -o pipefail; {shown} | true", f"{shown} > /dev/full")
    ]
    assert [(done.returncode, done.stderr.count("\n")) for done in ends] == [(0, 0), (2, 1)], ends
    assert ends[1].stderr.startswith("rlcore: OSError: [Errno 28] No space left on device; needs room")


@pytest.mark.slow
def test_help_is_immediate_and_plans_are_fast(tmp_path: Path) -> None:
    def seconds(*arguments: str) -> float:
        start = time.perf_counter()
        assert in_a_process(*arguments).returncode == 0
        return time.perf_counter() - start

    # Ten times the targets of 0.3 s and 1 s, because the machine may be busy.
    assert min(seconds("--help") for _ in range(2)) < 3
    data = f"data.sources.all.path={write_prompts(tmp_path / 'p.jsonl', 1000)}"
    needed = ("model.path=none", "model.tokenizer=bytes", data, "reward.functions.letters.fn=count_letter")
    assert seconds("plan", *needed, "--plugin", "null") < 10


def test_an_exit_outside_every_boundary_is_not_a_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlcore.cli.export.run", lambda arguments: sys.exit(0))
    assert main(["export"]) == 1
    assert capsys.readouterr().err == (
        "rlcore: the run ended before its time, in code that it calls: it called sys.exit(0)\n"
    )


@pytest.mark.slow
def test_a_plan_shows_the_data_and_refuses_what_training_would(
    capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    text = printed(capsys, "plan", str(config), "train.max_steps=0", "train.epochs=3")
    assert re.search(r"data\.sources\.all +8 +8 +\d+ tokens", text)
    assert re.search(r"steps per epoch +4 *\nsteps +12", text)
    assert "found no file" in failing(capsys, "plan", str(config), f"data.sources.all.path={tmp_path}/q.jsonl")
    wrong = "data.sources.all.prompt_column=promt"
    assert "did you mean 'prompt'" in failing(capsys, "plan", str(config), "--json", wrong)
    assert "found no directory './m'" in failing(
        capsys, "plan", str(config), "model.path=./m", "model.tokenizer=''", "actor.backend=hf", "rollout.backend=hf"
    )
    (tmp_path / "mine.py").write_text("def score(completions, target): ...\n")
    fn = f"reward.functions.letters.fn={tmp_path}/mine.py:score"
    assert "needs target, which source all does not have" in failing(capsys, "plan", str(config), fn)
    assert "read when training starts" in printed(
        capsys, "plan", str(config), "data.sources.all.path=''", "data.sources.all.task=chain_sum"
    )
