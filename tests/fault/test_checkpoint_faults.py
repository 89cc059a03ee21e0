"""Whatever happens while a checkpoint is saved, the run resumes from the newest complete one."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError
from rlcore.report.files import FileOperations
from rlcore.train.checkpoint import latest, load, publish, settle, staging

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SAVES = 3


class PowerLoss(BaseException):
    """The machine stopped: nothing of the program runs any more."""


class CountedFiles(FileOperations):
    """The real operations; calls `stop` in the middle of the k-th one."""

    def __init__(self, stop_at: int, stop: Callable[[], None]) -> None:
        self.count, self._stop_at, self._stop = 0, stop_at, stop

    def _due(self) -> bool:
        self.count += 1
        return self.count == self._stop_at

    def make_directory(self, path: Path) -> None:
        if self._due():
            self._stop()
        super().make_directory(path)

    def write(self, path: Path, data: bytes) -> None:
        if self._due():
            super().write(path, data[: len(data) // 2])
            self._stop()
        super().write(path, data)

    def sync(self, path: Path) -> None:
        if self._due():
            self._stop()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._due():
            self._stop()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        if self._due():
            self._stop()
        super().remove(path)

    def remove_directory(self, path: Path) -> None:
        if self._due():
            self._stop()
        super().remove_directory(path)


class VolatileFiles(CountedFiles):
    """A disk that keeps synced data; `lose` drops unsynced contents, and renames if asked to."""

    def __init__(self, stop_at: int, stop: Callable[[], None]) -> None:
        super().__init__(stop_at, stop)
        self.unsynced: set[Path] = set()
        self.renamed: list[tuple[Path, Path]] = []

    def write(self, path: Path, data: bytes) -> None:
        self.unsynced.add(path)
        super().write(path, data)

    def sync(self, path: Path) -> None:
        # Not asked of the real disk, which takes most of the time: what is safe is what these lists say.
        if self._due():
            self._stop()
        self.unsynced.discard(path)
        self.renamed = [(old, new) for old, new in self.renamed if new.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.renamed.append((source, target))
        self.unsynced = {
            target / path.relative_to(source) if path.is_relative_to(source) else path for path in self.unsynced
        }

    def lose(self, renames: bool) -> None:
        for path in self.unsynced:
            if path.exists():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        for old, new in reversed(self.renamed if renames else []):
            if new.exists() and not old.exists():
                new.rename(old)


class FullDisk(FileOperations):
    """A disk with `room` bytes left."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data[: self.room])
        if len(data) > self.room:
            self.room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.room -= len(data)


def save(run_dir: Path, step: int, keep: int, files: FileOperations) -> Path:
    """Saves as a run does: the engine's files, then `publish`."""
    directory = staging(run_dir, step, files)
    files.make_directory(directory / "model")
    for name in ("model/config.json", "model/model.safetensors", "optimizer.safetensors"):
        files.write(directory / name, f"{name} of step {step}".encode() * 50)
    return publish(directory, run_dir, step, {"step": step}, keep, files)


def save_all(run_dir: Path, keep: int, files: FileOperations, journal: Path) -> None:
    """A run of `SAVES` saves that notes in `journal` which it believes to be done; the last step is saved twice."""
    for step in (*range(1, SAVES + 1), SAVES):
        save(run_dir, step, keep, files)
        journal.write_text(str(step))


def check_resumable(run_dir: Path, keep: int, journal: Path, files: FileOperations) -> None:
    """At most the running save is lost, and the next one, through `files`, succeeds."""
    believed = int(journal.read_text()) if journal.exists() else 0
    newest = latest(run_dir)
    found = 0 if newest is None else load(newest).step
    assert believed <= found <= believed + 1
    if newest is not None:
        assert load(newest).state == {"step": found}
        assert (newest / "model" / "config.json").read_bytes() == f"model/config.json of step {found}".encode() * 50
        settle(run_dir, found, keep, files)
        assert (run_dir / "checkpoints" / "latest").read_text() == f"step_{found}\n"
        assert len([*(run_dir / "checkpoints").glob("*step*")]) <= keep
    again = save(run_dir, found + 1, keep, files)
    assert latest(run_dir) == again
    assert not [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".step")]


def num_operations(tmp_path: Path, keep: int) -> int:
    files = CountedFiles(0, lambda: None)
    save_all(tmp_path / "whole", keep, files, tmp_path / "whole-journal")
    return files.count


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("renames", [False, True])
def test_power_loss_at_every_file_operation_loses_at_most_one_interval(
    tmp_path: Path, keep: int, renames: bool
) -> None:
    points = num_operations(tmp_path, keep)
    assert points >= 100

    def stop() -> None:
        raise PowerLoss

    for point in range(1, points + 1):
        run_dir, journal = tmp_path / f"run{point}", tmp_path / f"journal{point}"
        files = VolatileFiles(point, stop)
        with pytest.raises(PowerLoss):
            save_all(run_dir, keep, files, journal)
        files.lose(renames)
        check_resumable(run_dir, keep, journal, VolatileFiles(0, stop))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_checkpoint_faults as faults
base, stop = Path(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGKILL)
for point in map(int, sys.argv[3:]):
    if not (pid := os.fork()):
        try:
            faults.save_all(base / f"run{point}", 1, faults.CountedFiles(point, stop), base / f"journal{point}")
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, point
"""


def test_kill_at_file_operations_all_over_a_run_loses_at_most_one_interval(tmp_path: Path) -> None:
    points = range(1, num_operations(tmp_path, keep=1) + 1, 3)
    arguments = [str(tmp_path), str(Path(__file__).parent), *map(str, points)]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, timeout=120, check=True)
    for point in points:
        check_resumable(tmp_path / f"run{point}", 1, tmp_path / f"journal{point}", FileOperations())


def test_a_disk_full_at_any_byte_leaves_the_previous_checkpoint_intact(tmp_path: Path) -> None:
    total = sum(path.stat().st_size for path in save(tmp_path / "size", 2, 1, FileOperations()).rglob("*.*"))
    for room in [*range(0, total, total // 40), total - 1]:
        run_dir = tmp_path / f"run{room}"
        before = save(run_dir, 1, 1, FileOperations())
        with pytest.raises((CheckpointError, OSError), match="No space left") as caught:
            save(run_dir, 2, 1, FullDisk(room))
        if isinstance(caught.value, CheckpointError):
            assert "checkpoint of step 2 was not saved" in str(caught.value)
            assert [path.name for path in (run_dir / "checkpoints").glob(".*")] == []
        assert latest(run_dir) == before
        assert load(before).state == {"step": 1}
        assert load(save(run_dir, 2, 1, FileOperations())).step == 2


def test_a_disk_full_while_pointing_to_the_new_checkpoint_says_that_it_was_saved(tmp_path: Path) -> None:
    save(tmp_path, 1, 1, FileOperations())
    total = sum(path.stat().st_size for path in save(tmp_path / "size", 2, 1, FileOperations()).rglob("*.*"))
    with pytest.raises(CheckpointError, match="step 2 was saved, tidying up after it failed"):
        save(tmp_path, 2, 1, FullDisk(total))
    newest = latest(tmp_path)
    assert newest is not None
    assert load(newest).step == 2


LIMITED = """
import resource, signal, sys
from pathlib import Path
from rlcore.train.checkpoint import publish, staging
from rlcore.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run_dir = Path(sys.argv[1])
directory = staging(run_dir, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    publish(directory, run_dir, 2, {"text": "x" * 100_000}, 1)
except CheckpointError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("limit", [0, 1, 4096, 99_999])
def test_the_kernel_refusing_to_write_leaves_the_previous_checkpoint_intact(tmp_path: Path, limit: int) -> None:
    before = save(tmp_path, 1, 1, FileOperations())
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)],
        cwd=ROOT,
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 1
    assert child.stderr.startswith("checkpoint of step 2 was not saved, what was published before stands: OSError")
    assert latest(tmp_path) == before
    assert load(before).step == 1
