"""The directory of a run: names, refusal, the lock, and what changed since."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.config import load_config
from rlcore.errors import CheckpointError, ConfigError, RewardError, WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.report.files import FileOperations, write_atomically
from rlcore.report.metrics import MetricsLog
from rlcore.report.status import is_held
from rlcore.testing.null import SETTINGS
from rlcore.train import run_dir
from rlcore.train.run_dir import (
    LOCK,
    READ_WHOLE,
    WRITTEN,
    choose_directory,
    differences,
    is_unused,
    locked,
    open_directory,
    removed_without_results,
    write_plan,
)
from rlcore.train.signals import Stopped

HOLD = """
import sys
from pathlib import Path
from rlcore.train.run_dir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    directory = open_directory(tmp_path / "run", resume=False)
    (directory / "config.yaml").write_text("{}")
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"continue that run with --resume \(in Python: resume=True\)"):
        open_directory(directory, resume=False)
    assert open_directory(directory, resume=True) == directory
    with pytest.raises(ConfigError, match=r"found no run '.*rnu'; did you mean 'run'\?"):
        open_directory(tmp_path / "rnu", resume=True)
    with pytest.raises(ConfigError, match=r"found no run '.*run'; begin it without --resume$"):
        open_directory(tmp_path / "other" / "run", resume=True)


@pytest.mark.parametrize("result", ["metrics.jsonl", "trajectories/step_000001.jsonl", "checkpoints/.step_1.staging/x"])
def test_a_start_that_came_to_nothing_is_made_again_and_one_with_any_result_is_not(tmp_path: Path, result: str) -> None:
    directory = open_directory(tmp_path / "run", resume=False)
    for name in ("config.yaml", "plan.json", "log.txt", "metrics.jsonl"):
        (directory / name).write_text("{}" if name != "metrics.jsonl" else "")
    with pytest.raises(ConfigError, match=r"run' exists"):  # a file of the user's own
        open_directory(directory, resume=False)
    with locked(directory):
        (directory / "trajectories").mkdir()
    assert open_directory(directory, resume=False) == directory
    assert (directory / "log.txt").read_text() == "{}"
    (directory / result).parent.mkdir(parents=True, exist_ok=True)
    (directory / result).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"run' exists"):
        open_directory(directory, resume=False)


@pytest.mark.fault
def test_a_second_process_on_a_directory_is_refused_and_a_dead_one_leaves_no_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is training"), locked(tmp_path):
            pass
        holder.kill()
    with locked(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_differences_name_each_leaf_that_changed() -> None:
    before = {"actor": {"lr": 1e-6, "epochs": 1}, "pools": ["main"]}
    now = {"actor": {"lr": 1e-5, "epochs": 1}, "pools": ["main", "reward"], "seed": 1}
    assert list(differences(before, now)) == [
        "actor.lr: 1e-06 -> 1e-05",
        'pools: ["main"] -> ["main", "reward"]',
        "seed: null -> 1",
    ]


def test_texts_that_name_one_file_are_equal_and_other_texts_and_files_are_not(tmp_path: Path) -> None:
    for name in ("one.py", "other.py"):
        (tmp_path / name).touch()
    pairs = {
        "same": ("one.py", f"{tmp_path}/./one.py"),
        "same_name": (f"{tmp_path}/one.py:score", "one.py:score"),
        "other": ("one.py", f"{tmp_path}/other.py"),
        "other_name": ("one.py:score", f"{tmp_path}/one.py:grade"),
        "missing": ("none.py", f"{tmp_path}/none.py"),
        "empty": ("", str(tmp_path)),
    }
    before, now = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
    found = [change.partition(":")[0] for change in differences(before, now, places=[tmp_path])]
    assert found == ["empty", "missing", "other", "other_name"]


OF_STEPS = ("trajectories/step_000001.jsonl", "tokens/step_000001.train.safetensors", "rewards/f_reward.py")


@pytest.mark.parametrize("name", [*WRITTEN, *OF_STEPS])
@pytest.mark.parametrize("resume", [False, True])
def test_a_link_in_the_place_of_a_file_is_refused_and_its_target_left_alone(
    tmp_path: Path, name: str, resume: bool
) -> None:
    (tmp_path / "precious").write_text("kept")
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / LOCK).touch()
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=r"is a symbolic link|exists"):
        open_directory(directory, resume=resume)
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("name", ["trajectories", "tokens", "rewards", "weights", "tensorboard", "wandb"])
def test_a_link_in_the_place_of_a_directory_that_a_run_writes_is_refused(tmp_path: Path, name: str) -> None:
    """A resume would cut back the steps of the run that it leads to; a weight sync would remove its versions."""
    (tmp_path / "other").mkdir()
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / name).symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match=rf"/{name}' is a symbolic link, and a run writes into its directory only"):
        open_directory(directory, resume=True)


@pytest.mark.parametrize("name", READ_WHOLE)
def test_a_file_that_fits_no_memory_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(ConfigError, match=r"has 64 GiB, which no run writes"):
        open_directory(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("error", "made", "left", "stays"),
    [
        (ConfigError("wrong"), True, {"log.txt": "2026-01-01 INFO rlcore: launched\n"}, False),
        (
            RewardError("canary"),
            True,
            {"log.txt": "2026-01-01 ERROR rlcore: the run ended by an error: canary\n"},
            False,
        ),
        (Stopped(15, "stopped"), True, {"log.txt": "2026-01-01 INFO rlcore: stopped by SIGTERM\n"}, False),
        (Stopped(15, "stopped"), True, {"metrics.jsonl": '{"step": 0}\n'}, True),
        (Stopped(15, "stopped"), False, {"config.yaml": "{}"}, True),
        (RewardError("raised"), True, {"log.txt": "2026-01-01 WARNING rlcore: f raised:\nTraceback\n"}, True),
        (ConfigError("wrong"), True, {"metrics.jsonl": '{"step": 0}\n'}, True),
        (ConfigError("wrong"), False, {"config.yaml": "{}"}, True),
        (WorkerError("died"), True, {"config.yaml": "{}"}, True),
        (KeyError("bug"), True, {"config.yaml": "{}"}, True),
    ],
)
def test_a_start_without_results_leaves_no_directory_unless_its_log_says_more(
    tmp_path: Path, error: Exception, made: bool, left: dict[str, str], stays: bool
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    for name, text in left.items():
        (directory / name).write_text(text)
    with pytest.raises(type(error)), removed_without_results(directory, made):
        raise error
    assert directory.exists() == stays


def test_a_directory_is_unused_until_something_is_in_it(tmp_path: Path) -> None:
    assert is_unused(tmp_path / "new")
    assert is_unused(tmp_path)
    (tmp_path / "file").touch()
    assert not is_unused(tmp_path)
    assert not is_unused(tmp_path / "file")


@pytest.mark.parametrize("place", ["a file", "/dev/null/x", "/proc/x"])
def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match=r"^train\.dir: the run directory '.*run' cannot be made \(.*choose another$"):
        open_directory(tmp_path / place / "run", resume=False)
    settings = {"model.path": "m", "data.sources.a.path": "a.jsonl", "reward.functions.b.fn": "b.py:b"}
    loaded = load_config([{**settings, "train.dir": str(tmp_path / place)}], [], [])
    with pytest.raises(ConfigError, match=r"^train\.dir: the run directory .* cannot be made \("):
        choose_directory(loaded, resume=False)


def test_a_plan_that_the_disk_does_not_take_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileOperations, "write", refuse)
    with pytest.raises(CheckpointError, match=r"config\.yaml': records cannot be written: .*No space left"):
        write_plan(tmp_path, plan_run([], SETTINGS, ["null"]))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["link", "pipe", "leftover"])
def test_what_has_the_name_of_a_temporary_file_is_replaced_and_not_written_to(tmp_path: Path, kind: str) -> None:
    (tmp_path / "precious").write_text("kept")
    temporary = tmp_path / ".plan.json.tmp"
    if kind == "link":
        temporary.symlink_to("precious")
    elif kind == "pipe":
        os.mkfifo(temporary)
    else:
        temporary.write_text("half")
    write_atomically(tmp_path / "plan.json", b"{}")
    assert (tmp_path / "plan.json").read_text() == "{}"
    assert not (tmp_path / "plan.json").is_symlink()
    assert (tmp_path / "precious").read_text() == "kept"
    assert not os.path.lexists(temporary)


def test_a_directory_in_place_of_a_temporary_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / ".metrics.jsonl.tmp").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl': records cannot be written"):
        MetricsLog(tmp_path).cut_back(0)


def test_a_question_whether_a_run_is_held_refuses_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlcore runs` asks, and takes the lock for a moment; here until the start has waited for it."""
    (tmp_path / LOCK).touch()
    with (tmp_path / LOCK).open() as question:
        fcntl.flock(question, fcntl.LOCK_SH)
        monkeypatch.setattr(run_dir.time, "sleep", lambda seconds: fcntl.flock(question, fcntl.LOCK_UN))
        with locked(tmp_path):
            assert is_held(tmp_path)


def test_a_filesystem_without_locks_is_one_line_and_holds_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    words = (
        r"^train\.dir: the run directory '.*' cannot be locked \(.*not implemented.*\); needs .*flock; choose another$"
    )
    with pytest.raises(ConfigError, match=words), locked(tmp_path):
        pass
    assert not is_held(tmp_path)
