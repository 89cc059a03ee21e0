"""Processes that a child leaves in another session hold up nothing and end with it."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.errors import WorkerError
from rlcore.testing.leaks import is_running, leaks

SERVED = """
import os, time

class Served:
    def die(self):
        print("famous last words")
        os._exit(3)
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


def strays_of(text: str) -> list[int]:
    """The process ids that the log says a child left behind."""
    return [int(line.rsplit(" ", 1)[1]) for line in text.splitlines() if " stray " in line]


@pytest.mark.fault
@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("dies", [False, True])
def test_a_process_that_left_group_and_session_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clean: bool, dies: bool
) -> None:
    (tmp_path / "served.py").write_text(SERVED)

    async def work() -> None:
        children = ChildProcesses()
        child = await children.start(f"{tmp_path}/served.py:Served", name="served")
        assert await child.call("stray", clean, deadline_s=20)
        if dies:
            with pytest.raises(WorkerError, match="famous last words"):
                await child.call("die", deadline_s=60)
        began = time.monotonic()
        await children.close()
        assert time.monotonic() - began < 20  # it would wait for ten minutes

    with caplog.at_level("INFO", "rlcore"), leaks():
        asyncio.run(work())
    [stray] = strays_of(caplog.text)
    if clean:  # it has nothing of ours by which it could be found
        os.kill(stray, signal.SIGKILL)
    else:
        assert not is_running(stray)


@pytest.mark.fault
def test_closing_ends_also_where_a_stray_cannot_be_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.cluster.strays.end_strays", lambda mark: None)
    (tmp_path / "served.py").write_text(SERVED)

    async def work() -> None:
        children = ChildProcesses()
        child = await children.start(f"{tmp_path}/served.py:Served", name="served")
        assert await child.call("stray", False, deadline_s=20)
        began = time.monotonic()
        await children.close()
        assert time.monotonic() - began < 20

    with caplog.at_level("INFO", "rlcore"):
        asyncio.run(work())
    [stray] = strays_of(caplog.text)
    os.kill(stray, signal.SIGKILL)
