"""Child processes that fork, leave their session, hold or close the pipes: calls end, closing ends, nothing is left."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.errors import ChildError, WorkerError
from rlcore.testing.leaks import leaks

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

SERVED = """
import os, signal, struct, subprocess, sys, time

def note(directory):
    open(os.path.join(directory, f"{os.getpid()}.pid"), "w").close()

def daemon(directory, work):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(directory)
            work()
            time.sleep(600)
        os._exit(0)
    time.sleep(0.3)

class Served:
    def fine(self):
        return "fine"
    def both_return(self, directory):
        os.fork()
        return "fine"
    def both_raise(self, directory):
        os.fork()
        raise ValueError("twice")
    def holds_the_pipe_and_dies(self, directory):
        daemon(directory, lambda: None)
        os._exit(3)
    def floods_the_pipe_and_dies(self, directory):
        def flood():
            frame = struct.pack("!QQ", 8, 99) + b"x" * 8
            while True:
                for descriptor in range(3, 64):
                    try:
                        os.write(descriptor, frame)
                    except OSError:
                        pass
        daemon(directory, flood)
        os._exit(3)
    def deaf_to_signals(self, directory):
        def deaf():
            for number in range(1, 32):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
        daemon(directory, deaf)
        return "fine"
    def nohup(self, directory):
        subprocess.Popen(["nohup", "sleep", "600"], start_new_session=True)
        return "fine"
    def fifty(self, directory):
        for _ in range(50):
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
        return "fine"
    def breeds(self, directory):
        def breed():
            ends = time.monotonic() + 5
            while time.monotonic() < ends:
                if os.fork():
                    os._exit(0)
                time.sleep(0.005)
            os._exit(0)
        daemon(directory, breed)
        os._exit(3)
    def closes_its_pipes(self, directory):
        os.closerange(3, 64)
        return "fine"
    def closes_its_output(self, directory):
        os.closerange(0, 3)
        return "fine"
    def becomes_another_program(self, directory):
        os.execvp("sleep", ["sleep", "600"])
    def stops_itself(self, directory):
        os.kill(os.getpid(), signal.SIGSTOP)
    def stops_its_group(self, directory):
        os.killpg(0, signal.SIGSTOP)
    def prints_for_ever(self, directory):
        daemon(directory, lambda: [sys.stdout.write("y" * 65536) for _ in iter(int, 1)])
        return "fine"
    def half_a_frame(self, directory):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, struct.pack("!QQ", 1 << 20, 1) + b"x")
            except OSError:
                pass
        os._exit(3)
    def a_frame_of_an_exabyte(self, directory):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, struct.pack("!QQ", 1 << 60, 1))
            except OSError:
                pass
        time.sleep(600)
"""
ATTACKS = [line.split("(")[0].split()[1] for line in SERVED.splitlines() if "(self, directory)" in line]
ANSWERLESS = {"stops_itself", "stops_its_group"}
"""Attacks whose call ends at its deadline and not before."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_child_that_forks_or_plays_with_its_pipes_holds_up_nothing(attack: str, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)

    async def work() -> None:
        children = ChildProcesses()
        child = await children.start(f"{tmp_path}/served.py:Served", name="served", deadline_s=60.0)
        began = time.monotonic()
        with suppress(WorkerError, ChildError, TimeoutError):
            deadline_s = 0.5 if attack in ANSWERLESS else 5.0
            assert await child.call(attack, str(tmp_path), deadline_s=deadline_s) == "fine"
        assert time.monotonic() - began < 15.0
        with suppress(WorkerError, TimeoutError):
            assert await child.call("fine", deadline_s=5.0) == "fine"
        other = await children.start(f"{tmp_path}/served.py:Served", name="other", deadline_s=60.0)
        assert await other.call("fine", deadline_s=30.0) == "fine"
        began = time.monotonic()
        await children.close()
        assert time.monotonic() - began < 20.0

    try:
        with leaks():
            asyncio.run(work())
    finally:
        for path in tmp_path.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(path.stem), signal.SIGKILL)
