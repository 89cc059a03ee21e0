"""`--resume` with checkpoints that are damaged or gone."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import CheckpointError, RewardError
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.train import Start, TrainResult, run_training, train


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """Four steps of the null policy, with a checkpoint every second step."""
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 30))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"letters": {"fn": "count_letter", "children": 1}}},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 4, "max_steps": 4, "dir": str(tmp_path / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 2},
    }


def run(config: dict[str, Any], *overrides: str, **more: Any) -> TrainResult:
    """Train with some overrides."""
    return train(config, *overrides, plugins=["null"], **more)


def damaged(checkpoint_dir: Path) -> None:
    """Change one byte of the checkpoint's model."""
    path = next(path for path in sorted((checkpoint_dir / "model").iterdir()) if path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.fault
def test_resume_names_a_damaged_checkpoint_and_takes_the_one_before(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(config, "train.name=whole", "checkpoint.every_steps=1").run_dir
    broken = run(config, "checkpoint.every_steps=1", "train.max_steps=3").run_dir
    damaged(broken / "checkpoints" / "step_3")
    capsys.readouterr()
    assert differing(whole, run(config, resume=True).run_dir) == []
    shown = capsys.readouterr().out
    assert "warning: passed over: checkpoint" in shown
    assert "step_3': 'model/" in shown
    assert "continuing after step 2" in shown


@pytest.mark.fault
@pytest.mark.parametrize("from_start", [False, True])
def test_a_damaged_checkpoint_takes_no_place_of_those_that_are_kept(config: dict[str, Any], from_start: bool) -> None:
    settings = ("checkpoint.every_steps=1", "checkpoint.keep=2")
    directory = run(config, *settings, "train.max_steps=3").run_dir / "checkpoints"
    damaged(directory / "step_3")
    (directory / "step_3").rename(directory / "step_5")
    if from_start:
        damaged(directory / "step_2")
    more = ("checkpoint.every_steps=2", "train.max_steps=4") if from_start else ("train.max_steps=4",)
    run(config, *settings, *more, resume=True, from_start=from_start)
    names = sorted(path.name for path in directory.iterdir() if path.name.startswith("step"))
    aside = ["step_5.passed_over"]
    assert names == [*(("step_2", "step_4") if from_start else ("step_3", "step_4")), *aside]
    run(config, *settings, "train.max_steps=5", resume=True)
    assert sorted(path.name for path in directory.iterdir() if path.name.startswith("step")) == ["step_4", "step_5"]


@pytest.mark.fault
def test_a_resume_after_the_last_step_ends_a_save_that_was_cut_short(config: dict[str, Any]) -> None:
    settings = ("checkpoint.every_steps=1", "checkpoint.keep=2")
    directory = run(config, *settings).run_dir / "checkpoints"
    whole = sorted(path.name for path in directory.iterdir())
    (directory / "step_4").rename(directory / ".step_4.replaced")
    shutil.copytree(directory / "step_3", directory / "step_2")
    (directory / "latest").write_text("step_3\n")
    result = run(config, *settings, resume=True)
    assert sorted(path.name for path in directory.iterdir()) == whole
    assert (directory / "latest").read_text() == "step_4\n"
    assert result.checkpoint == directory / "step_4"


@pytest.mark.fault
def test_a_resume_after_the_last_step_names_the_best_checkpoint_again(config: dict[str, Any], tmp_path: Path) -> None:
    heldout = write_prompts(tmp_path / "heldout.jsonl", 3, "Held out {index}.")
    config["eval"] = {"sources": {"heldout": {"path": str(heldout)}}, "every_steps": 1}
    settings = ("checkpoint.best=eval/heldout/mean", "checkpoint.best_mode=min")
    best = run(config, *settings).run_dir / "checkpoints" / "best"
    named = best.read_bytes()
    best.write_text("step_0\n")
    run(config, *settings, resume=True)
    assert best.read_bytes() == named


@pytest.mark.slow
def test_resume_without_a_checkpoint_that_verifies_changes_nothing(config: dict[str, Any]) -> None:
    run_dir = run(config, "checkpoint.every_steps=1", "train.max_steps=2").run_dir
    for directory in (run_dir / "checkpoints").glob("step_*"):
        damaged(directory)
    says_how_it_ended = ("log.txt", "status.json")
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name not in says_how_it_ended]
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(CheckpointError) as caught:
        run(config, resume=True)
    message = str(caught.value)
    assert "\n" not in message
    assert "no checkpoint in" in message
    assert "step_2': 'model/" in message
    assert "step_1': 'model/" in message
    assert "--resume --from-start" in message
    assert {path: path.read_bytes() for path in before} == before
    assert run(config, resume=True, from_start=True).steps == 4


@pytest.mark.slow
def test_resume_of_steps_whose_checkpoints_are_gone_is_refused(config: dict[str, Any]) -> None:
    whole = run(config, "train.name=whole").run_dir
    run_dir = run(config, "train.max_steps=2").run_dir
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").mkdir()
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint, but the run has reached step 2; .*volume.*from-start"
    ):
        run(config, resume=True)
    assert [row["step"] for row in metrics.read(run_dir)] == [1, 2]
    assert differing(whole, run(config, resume=True, from_start=True).run_dir) == []


REMOVED = ("checkpoints", "metrics.jsonl", "trajectories", "tokens", "trace.json", "status.json", "log.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "named"),
    [
        ("tokens", "found 2 files of tokens/, plan.json without log.txt"),
        ("status.json", "found status.json of step 2, plan.json without log.txt"),
        ("log.txt", "found log.txt of step 2;"),
        ("trace.json", "found plan.json without log.txt, rewards.json without log.txt;"),
    ],
)
def test_resume_of_a_run_of_which_little_is_left_is_refused_however_often(
    config: dict[str, Any], kept: str, named: str
) -> None:
    run_dir = run(config, "train.max_steps=2").run_dir
    for name in REMOVED:
        path = run_dir / name
        if path.exists() and name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            run(config, resume=True)
        assert f"--resume: '{run_dir}' has no checkpoints, metrics and trajectories, but a run" in str(caught.value)
        assert named in str(caught.value)
        assert "--resume --from-start" in str(caught.value)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    assert run(config, resume=True, from_start=True).steps == 4


@pytest.mark.slow
def test_a_run_that_failed_in_its_first_step_is_resumed(config: dict[str, Any], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    config["reward"] = {"functions": {"mine": {"fn": f"{reward}:mine", "children": 1}}}
    reward.write_text("def mine(trajectory):\n    raise KeyError('gone')\n")
    with pytest.raises(RewardError):
        run(config)
    assert (tmp_path / "runs" / "run" / "log.txt").exists()
    reward.write_text("def mine(trajectory):\n    return 1.0\n")
    assert run(config, resume=True).steps == 4


@pytest.mark.slow
def test_a_resume_names_what_differs_in_a_checkpoint_of_another_run(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    other = run(config, "train.name=other", "train.max_steps=2", "actor.lr=0.9").run_dir
    run_dir = run(config, "train.max_steps=2").run_dir
    shutil.rmtree(run_dir / "checkpoints" / "step_2")
    shutil.copytree(other / "checkpoints" / "step_2", run_dir / "checkpoints" / "step_2")
    capsys.readouterr()
    assert run(config, "train.max_steps=2", resume=True).steps == 2
    shown = capsys.readouterr().out
    assert "changed since the checkpoint was saved: config.actor.lr: 0.9 -> 0.1" in shown
    assert 'changed since the checkpoint was saved: config.train.name: "other" -> "run"' in shown
    assert "changed since the last start" not in shown


@pytest.mark.slow
def test_a_resume_names_neither_another_spelling_of_a_path_nor_other_explanations(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def score(completions, **columns):\n    return [0.0] * len(completions)\n")
    config["reward"]["functions"]["mine"] = {"fn": f"{tmp_path}/mine.py:score", "children": 1}
    saved = run(config, "train.max_steps=1").run_dir / "plan.json"
    plan = json.loads(saved.read_text())
    plan["notes"].append("a note of that day")
    plan["facts"]["gpu_free_bytes"] = 1
    for choice in plan["choices"].values():
        choice["reason"] = "another"
        choice["set_by"] = "another"
    saved.write_text(json.dumps(plan))
    monkeypatch.chdir(tmp_path)
    paths = ("data.sources.train.path=./prompts.jsonl", "reward.functions.mine.fn=mine.py:score", "train.dir=runs")
    run(config, "train.max_steps=2", *paths, resume=True)
    shown = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
    assert plan["choices"]
    assert shown == [
        "changed since the last start: config.train.max_steps: 1 -> 2",
    ]


@pytest.mark.slow
def test_from_start_takes_a_checkpoint_that_can_be_used(config: dict[str, Any]) -> None:
    run(config, "train.max_steps=2")
    assert run(config, resume=True, from_start=True).steps == 4
    assert len(metrics.read(Path(config["train"]["dir"]) / "run")) == 4


@pytest.mark.slow
def test_a_run_is_not_begun_with_an_older_checkpoint_than_its_newest(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run(config, "checkpoint.every_steps=1", "train.max_steps=2").run_dir
    damaged(run_dir / "checkpoints" / "step_2")
    plan = plan_run([config], ["train.name=next"], ["null"])
    with pytest.raises(
        CheckpointError, match=r"newest checkpoint cannot be used: .*step_2.*name the one to use.*step_1"
    ):
        run_training(plan, Start(checkpoint=run_dir))
    capsys.readouterr()
    assert run_training(plan, Start(checkpoint=run_dir / "checkpoints" / "step_1")).steps == 4
    shown = capsys.readouterr().out
    assert 'changed since the checkpoint was saved: config.train.name: "run" -> "next"' in shown
    assert "changed since the last start" not in shown


@pytest.mark.slow
def test_a_torn_plan_does_not_hold_up_a_resume(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = run(config, "train.max_steps=2").run_dir
    (run_dir / "plan.json").write_text('{"plugins": {"nu')
    assert run(config, resume=True).steps == 4
    assert "plan.json' cannot be read (JSONDecodeError" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("state", [{}, {"step": "two"}, {"step": 2, "equal_steps": 0, "order": []}])
def test_an_odd_state_is_an_error_of_one_line(config: dict[str, Any], state: dict[str, Any], tmp_path: Path) -> None:
    run_dir = run(config, "train.max_steps=2").run_dir
    path = run_dir / "checkpoints" / "step_2"
    text = json.dumps(state).encode()
    (path / "state.json").write_bytes(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"step_2': its state cannot be restored: (KeyError|TypeError|ValueError)"
    ):
        run(config, resume=True)


COUNTS = [("step", None), ("step", 1), ("equal_steps", 0.5), ("retired", -1), ("order.position.issued.train", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("key", "value"), COUNTS, ids=str)
def test_a_count_of_a_state_that_is_none_is_an_error_of_one_line(config: dict[str, Any], key: str, value: Any) -> None:
    path = run(config, "train.max_steps=2").run_dir / "checkpoints" / "step_2"
    state = json.loads((path / "state.json").read_text())
    *above, last = key.split(".")
    holder = state
    for name in above:
        holder = holder[name]
    holder[last] = value
    text = json.dumps(state).encode()
    (path / "state.json").write_bytes(text)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"needs a whole number|its state is that of step 1"):
        run(config, resume=True)


@pytest.mark.slow
def test_the_log_of_a_whole_run_ends_by_saying_so(config: dict[str, Any]) -> None:
    *_, last = (run(config, "train.max_steps=2").run_dir / "log.txt").read_text().splitlines()
    assert "every step was taken: 2" in last


@pytest.mark.slow
def test_records_that_cannot_be_written_end_the_run_in_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    blocker = tmp_path / "runs" / "run" / "trajectories"
    source = f"""
from pathlib import Path

def score(completions, **columns):
    Path({str(blocker)!r}).touch()
    return [1.0] * len(completions)
"""
    (tmp_path / "blocks.py").write_text(source)
    config["reward"]["functions"] = {"blocks": {"fn": f"{tmp_path}/blocks.py:score", "children": 1}}
    with pytest.raises(
        CheckpointError, match=r"trajectories/step_000001.jsonl': records cannot be written: .*--resume"
    ):
        run(config)


@pytest.mark.slow
def test_a_resume_says_that_answers_have_changed_and_that_records_are_lost(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run(config, "train.max_steps=2").run_dir
    rows = (tmp_path / "prompts.jsonl").read_text()
    capsys.readouterr()
    assert run(config, "train.max_steps=3", resume=True).steps == 3
    shown = capsys.readouterr().out
    assert "warning" not in shown
    assert "the code of" not in shown
    (tmp_path / "prompts.jsonl").write_text(rows.replace("{", '{"level": 3, '))
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert run(config, resume=True).steps == 4
    shown = " ".join(capsys.readouterr().out.split())
    assert "data.sources.train: its rows have other answers, columns or system messages than when" in shown
    assert "the metrics end with step 1, and the checkpoint is of step 3: the steps after 1 have no record" in shown


@pytest.mark.slow
def test_a_resume_names_the_reward_functions_whose_code_has_changed(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "async def low(trajectory):\n    return 0.5\n"
    for name in ("same", "other"):
        (tmp_path / f"{name}.py").write_text(code)
    config["reward"]["functions"] = {name: {"fn": f"{tmp_path / name}.py:low"} for name in ("same", "other")}
    run(config, "train.max_steps=2")
    (tmp_path / "other.py").write_text(code.replace("0.5", "0.25"))
    capsys.readouterr()
    run(config, resume=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert "changed since the last start: the code of reward.functions.other," in shown
    assert "functions.same" not in shown
