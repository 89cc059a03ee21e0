"""Starts `rlcore` commands as forks of a process that has imported torch, which takes most of a short run's time.

The process starts with the fixture `forked_runs` and is this file as a program: it reads requests as lines of JSON and
answers each with a line. A fork ends as its command would, through the end of its interpreter; what differs from a
command in a shell is that its modules were imported before. Tests of how a command starts do not fork it.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

SHARED = ("rlcore.cli.train", "rlcore.plugins.planning", "rlcore.train.session", "rlcore.testing.null")
_started: list["subprocess.Popen[str]"] = []
"""The process that is forked, while there is one."""


class ForkedRun:
    """A command in a fork, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; TimeoutExpired if it has not ended by then."""
        if self.returncode is None:
            self.returncode = _answer_to({"pid": self.pid, "timeout": timeout})
        if self.returncode is None:
            raise subprocess.TimeoutExpired(["rlcore"], timeout or 0.0)
        return self.returncode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def prepare_forks() -> None:
    """Import what runs on the null backend import, and plan one: planning imports and caches more.

    What is there now is not collected in forks, which would copy its pages.
    """
    for module in SHARED:
        import_module(module)
    from rlcore.plugins.planning import plan_run
    from rlcore.testing.null import SETTINGS

    plan_run([], SETTINGS, ["null"])
    gc.freeze()


def fork_run(arguments: Sequence[str], output: Path) -> ForkedRun:
    """Start `rlcore ARGUMENTS`; what it writes is appended to `output`."""
    return ForkedRun(_answer_to({"arguments": list(arguments), "output": str(output)}))


@contextmanager
def to_be_forked() -> Iterator[None]:
    """Have the process that is forked inside the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True) as process:
        _started.append(process)
        try:
            yield
        finally:
            _started.pop()
            process.communicate(timeout=60)


def _answer_to(request: dict[str, Any]) -> Any:
    [process] = _started
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the process that is forked has ended"
    return json.loads(answer)


def _serve() -> int:
    """Answer requests until there are none; in a fork, be the command."""
    sys.path[0] = os.getcwd()  # as with `python -m rlcore`
    prepare_forks()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "pid" in request:
            answer = _code_of(request["pid"], request["timeout"])
        elif not (answer := os.fork()):
            return _be(request["arguments"], request["output"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def _code_of(pid: int, limit_s: float | None) -> int | None:
    """The exit code of a fork; None if it runs for longer."""
    handle = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if ended else None


def _be(arguments: Sequence[str], output: str) -> int:
    from rlcore.__main__ import main

    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor, standard in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(descriptor, standard)
    os.close(nothing)
    os.close(written)
    sys.argv = ["rlcore", *arguments]
    return main()


if __name__ == "__main__":
    sys.exit(_serve())
