"""`rlcore runs`: what is listed of each run, and which starts are removed."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import main
from rlcore.testing.runs import run_settings
from rlcore.train import train
from rlcore.train.run_dir import locked

ANOTHER_USER = 65534


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_only_starts_that_nothing_came_of_are_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(runs / "refused"):
        assert listed(capsys, str(runs), "--prune-failed").keys() == {"done", "refused"}
    assert listed(capsys, str(runs), "--prune-failed").keys() == {"done"}
    assert {path.name for path in runs.iterdir()} == {"done", "mine", "link"}


def test_a_run_whose_results_are_elsewhere_has_begun_and_is_kept(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log and status tell of steps; a volume with the rest may not be mounted."""
    moved = Path(shutil.copytree(runs / "done", runs / "moved"))
    (moved / "metrics.jsonl").unlink()
    for name in ("trajectories", "checkpoints"):
        shutil.rmtree(moved / name, ignore_errors=True)
    assert listed(capsys, str(runs), "--prune-failed")["moved"]["state"] == "finished"
    assert moved.is_dir()


def test_a_run_whose_process_was_killed_is_reported_as_killed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def of_another_user(command: Sequence[str]) -> tuple[int, str]:
    """(exit code, output) of a command in a child process that runs as another user."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 99
        try:
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout = sys.stderr = open(writer, "w")  # noqa: SIM115 (for the life of the child)
            os.setgroups([])
            os.setgid(ANOTHER_USER)
            os.setuid(ANOTHER_USER)
            code = main(command)
            sys.stdout.flush()
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as output:
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_run_of_another_user_is_left_out_or_refused_in_one_line(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "done", runs / "private").chmod(0o700)
    monkeypatch.chdir(runs)
    main(["where", "done"])  # imports what the child may not be able to read
    main(["view", "diagnose", "done"])
    parents = [path for path in (runs, *runs.parents) if path.owner() == "root" and not path.stat().st_mode & 1]
    modes = [path.stat().st_mode for path in parents]
    try:
        for path in parents:
            path.chmod(path.stat().st_mode | 0o5)
        code, text = of_another_user(["runs", "."])
        assert code == 0, text
        assert "rlcore: runs: 'private' is left out: PermissionError" in text
        assert "finished" in text
        for command in (["where", "private"], ["view", "diagnose", "private"], ["export", "private", "out"]):
            code, text = of_another_user(command)
            assert code == 2, text
            assert text.count("\n") == 1, text
    finally:
        for path, mode in zip(parents, modes, strict=True):
            path.chmod(mode)
