"""Processes that a child leaves in another session hold up nothing and end with it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.errors import WorkerError
from rlcore.testing.leaks import is_running, leaks

SERVED = """
import ctypes, os, time

class Served:
    def exits(self):
        print("famous last words")
        os._exit(3)
    def crashes(self):
        ctypes.string_at(0)
    def kill_the_keeper(self):
        os.kill(os.getppid(), 9)
        time.sleep(600)
    def hangs(self):
        time.sleep(600)
    def stray(self, clean):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork() == 0:
                print("stray", os.getpid(), flush=True)
                if clean:
                    os.execve("/bin/sleep", ["sleep", "600"], {})
                while True:
                    time.sleep(1)
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.2)
        return True
"""


def has_ended(process: int) -> bool:
    """True if it has; one that has not is killed, so that a test that fails leaves nothing."""
    running = is_running(process)
    if running:
        os.kill(process, signal.SIGKILL)
    return not running


def strays_of(text: str) -> list[int]:
    """The process ids that the log says a child left behind."""
    return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if " stray " in line]


ENDS = {"": "", "exits": "exit code 3; .*famous last words", "crashes": "killed by signal 11", "hangs": "no result"}


@pytest.mark.fault
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_left_group_session_and_environment_ends_with_the_child(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clean: bool, end: str
) -> None:
    (tmp_path / "served.py").write_text(SERVED)

    async def work() -> None:
        children = ChildProcesses()
        child = await children.start(f"{tmp_path}/served.py:Served", name="served")
        assert await child.call("stray", clean, deadline_s=20)
        if end:
            with pytest.raises((WorkerError, TimeoutError), match=ENDS[end]):
                await child.call(end, deadline_s=1 if end == "hangs" else 60)
        began = time.monotonic()
        await children.close()
        assert time.monotonic() - began < 20  # it would wait for ten minutes

    with caplog.at_level("INFO", "rlcore"), leaks():
        asyncio.run(work())
    [stray] = strays_of(caplog.text)
    assert has_ended(stray)


CONTROLLER = """
import asyncio, logging, os, sys
from rlcore.cluster.child import ChildProcesses

async def main():
    children = ChildProcesses()
    child = await children.start(sys.argv[1] + ":Served", name="served")
    await child.call("stray", True, deadline_s=20)
    await asyncio.sleep(600)

logging.basicConfig(level="INFO", stream=sys.stdout, format=" %(message)s")
asyncio.run(main())
"""


@pytest.mark.fault
def test_a_process_that_left_everything_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    command = [sys.executable, "-u", "-c", CONTROLLER, str(tmp_path / "served.py")]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        line = next(line for line in controller.stdout if " stray " in line)
        controller.kill()
    [stray] = strays_of(line)
    limit = time.monotonic() + 10
    while is_running(stray) and time.monotonic() < limit:
        time.sleep(0.01)
    assert has_ended(stray)


def test_a_process_of_the_controller_outlives_the_children() -> None:
    async def work() -> None:
        children = ChildProcesses()
        await children.start("collections:OrderedDict", name="served")
        await children.close()

    with subprocess.Popen(["sleep", "600"], start_new_session=True) as own:
        asyncio.run(work())
        assert is_running(own.pid)
        own.kill()


@pytest.mark.fault
def test_closing_ends_also_where_a_stray_cannot_be_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "served.py").write_text(SERVED)

    async def work() -> None:
        children = ChildProcesses()
        child = await children.start(f"{tmp_path}/served.py:Served", name="served")
        assert await child.call("stray", True, deadline_s=20)
        with pytest.raises(WorkerError, match="killed by signal 9"):
            await child.call("kill_the_keeper", deadline_s=60)
        began = time.monotonic()
        await children.close()
        assert time.monotonic() - began < 20

    with caplog.at_level("INFO", "rlcore"):
        asyncio.run(work())
    [stray] = strays_of(caplog.text)
    os.kill(stray, signal.SIGKILL)
