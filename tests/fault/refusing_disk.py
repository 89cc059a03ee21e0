"""Runs `rlcore` in forked children whose k-th change of a directory the operating system refuses.

As a program: `refusing_disk.py DIRECTORY ERROR STAYS` trains on the null backend below the directory, once
per kind of change that such a run asks for, and prints a line of JSON about each.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forked_runs import prepare_forks

CHANGES = ("fsync", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "link", "symlink", "truncate")
"""Functions of `os` that change a file system and take a path or a descriptor first."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run with a refused change, and of the one that went on from it."""

    change: str
    code: int
    output: str
    log: str
    resumed_code: int
    resumed_output: str
    differences: list[str]
    """Files that the two runs wrote together and an undisturbed one otherwise."""


class Disk:
    """Refuses the k-th change below a directory with `error`, and with `stays` all that follow."""

    def __init__(self, directory: Path, refuse_at: int, error: int, stays: bool) -> None:
        self._directory, self._refuse_at, self._error, self._stays = str(directory), refuse_at, error, stays
        self._pid, self.changes = os.getpid(), list[str]()

    def ask(self, kind: str, place: Any) -> None:
        """OSError if this change is refused."""
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.path.abspath(os.fspath(place))
        if os.getpid() != self._pid or not path.startswith(self._directory):
            return
        self.changes.append(f"{kind} {os.path.relpath(path, self._directory)}")
        count = len(self.changes)
        if self._refuse_at and (count == self._refuse_at or (self._stays and count > self._refuse_at)):
            raise OSError(self._error, os.strerror(self._error), path)

    def install(self) -> None:
        """Put it between Python and the operating system."""
        disk, really_open = self, io.open

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                disk.ask("write", self.name)
                return super().write(data)

            def truncate(self, size: int | None = None) -> int:
                disk.ask("truncate", self.name)
                return super().truncate(size)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wax+"):
                return really_open(file, mode, buffering, *rest, **more)
            disk.ask("open", file)
            raw = File(file, mode.replace("b", "").replace("t", ""))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, *rest, **more, line_buffering=buffering == 1)

        builtins.open = io.open = open_file  # type: ignore[assignment]
        for name in CHANGES:
            setattr(os, name, self._asking(name, getattr(os, name)))

    def _asking(self, name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def ask_first(place: Any, *rest: Any, **more: Any) -> Any:
            self.ask(name, place)
            return really(place, *rest, **more)

        return ask_first


def run(
    arguments: Sequence[str],
    directory: Path,
    log: Path,
    refuse_at: int = 0,
    error: int = errno.EIO,
    stays: bool = False,
) -> tuple[int, str, list[str]]:
    """(exit code, output, changes) of the command in a forked child. Call it from a process without threads."""
    pid = os.fork()
    if not pid:
        _run_here(arguments, log, Disk(directory, refuse_at, error, stays))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, log.read_text(), json.loads(log.with_suffix(".json").read_text())


def _run_here(arguments: Sequence[str], log: Path, disk: Disk) -> None:
    code = 99
    try:
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        from rlcore.cli import main
        from rlcore.testing.here import letters_here

        disk.install()
        try:
            with letters_here():
                code = main(arguments)
        finally:
            log.with_suffix(".json").write_text(json.dumps(disk.changes))
    except BaseException:  # noqa: BLE001  # a fork must not continue as its parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(base: Path, error: int, stays: bool) -> None:
    """Print the outcome of every change that is the first of its kind."""
    prepare_forks()
    from rlcore.testing.runs import differing, run_settings

    settings = run_settings(base, 8, **{"train.max_steps": 2, "checkpoint.every_steps": 1})

    def command(name: str) -> list[str]:
        values = [f"{key}={value}" for key, value in settings.items()]
        return ["train", "--plugin", "null", *values, f"train.name={name}"]

    reference = base / "runs" / "reference"
    code, output, changes = run(command("reference"), reference, base / "reference.log")
    if code:
        raise SystemExit(output)
    kinds = dict[str, int]()
    for number, change in enumerate(changes, 1):
        kinds.setdefault(re.sub(r"\d+", "#", change), number)
    for number in kinds.values():
        name = f"run{number}"
        directory = base / "runs" / name
        code, output, asked_changes = run(command(name), directory, base / f"{name}.log", number, error, stays)
        refused = asked_changes[number - 1] if number <= len(asked_changes) else ""
        log = (directory / "log.txt").read_text() if (directory / "log.txt").exists() else ""
        again = ["--resume", "--from-start"] if directory.exists() else []
        resumed_code, resumed, _ = run([*command(name), *again], directory, base / f"{name}.again.log")
        unlike = [] if resumed_code else differing(reference, directory)
        outcome = Outcome(refused, code, output, log, resumed_code, resumed, unlike)
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "stays")
