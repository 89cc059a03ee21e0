"""`rlcore runs`: what is listed of each run, and which starts are removed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import main
from rlcore.testing.runs import run_settings
from rlcore.train import train
from rlcore.train.run_dir import locked


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a run, a start that nothing came of, and what is not a run."""
    train(run_settings(tmp_path, 8, **{"train.name": "done"}), plugins=["null"])
    start = tmp_path / "runs" / "refused"
    start.mkdir()
    for name in (".lock", "config.yaml", "plan.json", "log.txt"):
        (start / name).touch()
    mine = tmp_path / "runs" / "mine"
    mine.mkdir()
    (mine / "config.yaml").touch()
    (tmp_path / "runs" / "link").symlink_to(start)
    return tmp_path / "runs"


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["runs", *arguments, "--json"]) == 0
    out = capsys.readouterr().out
    return {row["name"]: row for row in json.loads(out[out.index("[") :])}


def test_a_run_is_listed_with_state_step_metrics_and_disk(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys, str(runs))
    assert rows.keys() == {"done", "refused"}
    done = rows["done"]
    assert (done["state"], done["step"], done["steps"]) == ("finished", 2, 2)
    assert set(done["metrics"]) == {"reward/mean", "completion/length_mean"}
    files = [path for path in (runs / "done").rglob("*") if path.is_file()]
    assert done["disk_bytes"] == sum(path.stat().st_size for path in files)
    assert rows["refused"]["state"] == "not begun"
    assert main(["runs", str(runs)]) == 0
    assert "finished" in capsys.readouterr().out


def test_only_starts_that_nothing_came_of_are_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(runs / "refused"):
        assert listed(capsys, str(runs), "--prune-failed").keys() == {"done", "refused"}
    assert listed(capsys, str(runs), "--prune-failed").keys() == {"done"}
    assert {path.name for path in runs.iterdir()} == {"done", "mine", "link"}


def test_a_run_whose_process_was_killed_is_said_to_be(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = runs / "done" / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"running"'))
    assert listed(capsys, str(runs))["done"]["state"] == "killed"
    with locked(runs / "done"):
        assert listed(capsys, str(runs))["done"]["state"] == "running"


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "name the train.dir of your runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", ["directory", "pipe", '{"step": 1, "reward/mean": "x"}', '{"step": 1, "a": 1%s}', "[%s"]
)
def test_a_run_with_damaged_metrics_is_listed_and_hides_no_other(
    damage: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copytree(runs / "done", runs / "odd") / "metrics.jsonl"
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(damage.replace("1%s", "1" + "0" * 400).replace("[%s", "[" * 50_000) + "\n")
    rows = listed(capsys, str(runs))
    assert rows.keys() == {"done", "refused", "odd"}
    assert rows["done"]["step"] == 2
    assert (rows["odd"]["state"], rows["odd"]["step"], rows["odd"]["metrics"]) == ("finished", 0, {})
