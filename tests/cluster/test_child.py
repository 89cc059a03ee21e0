"""Killable child processes: `rlcore.cluster.child_main` and `rlcore.cluster.child`."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.child import ChildProcess, ChildProcesses
from rlcore.errors import ChildError, ConfigError, PluginError, WorkerError
from rlcore.testing.here import HereChildren
from rlcore.testing.leaks import descendants, is_running, leaks

SERVED = """
import os, re, signal, subprocess, sys, threading, time
from rlcore.errors import ChildError, ConfigError

class Served:
    def __init__(self, *args):
        self.args = args
    def given(self):
        return self.args
    def add(self, a, b):
        return a + b
    def pid(self):
        return os.getpid()
    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds
    def fork(self):
        copy = os.fork()
        return "the copy" if copy == 0 else os.WTERMSIG(os.waitpid(copy, 0)[1])
    def divide(self):
        return 1 / 0
    def leave(self):
        sys.exit(4)
    def die(self):
        print("famous last words")
        os._exit(3)
    def loop(self):
        while True:
            pass
    def regex(self):
        return re.match(r"(a+)+$", "a" * 40 + "b")
    def zeros(self, num):
        return b"0" * num
    def unpicklable(self):
        return lambda: 0
    def child_error(self):
        try:
            self.divide()
        except ZeroDivisionError as cause:
            raise ChildError("no quotient") from cause
    def config_error(self):
        raise ConfigError("not here")
    def interrupted(self):
        def ring(*_):
            raise TimeoutError("rang")
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(5)
    def forgotten_alarm(self):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    def on_main_thread(self):
        return threading.current_thread() is threading.main_thread()
    def prints(self, text):
        print(text)
    def starts_a_process(self):
        return subprocess.Popen(["sleep", "60"]).pid
    def starts_large_processes(self):
        code = "held = bytearray(b'a') * (100 * 2**20); print(flush=True); input()"
        command = [sys.executable, "-S", "-c", code]
        all = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
        for process in all:
            process.stdout.readline()
        return [process.pid for process in all]
    def modules(self):
        return sorted(sys.modules)
    def close(self):
        if self.args and isinstance(self.args[0], str):
            open(self.args[0], "w").write("closed")

def refuses():
    raise ConfigError("kwargs.x is wrong")

def breaks():
    raise ValueError("no good")

def never():
    import time
    time.sleep(60)
"""


@pytest.fixture
def served(tmp_path: Path) -> str:
    """Path of a file with things to serve."""
    path = tmp_path / "served.py"
    path.write_text(SERVED)
    return str(path)


def run(use: Callable[[ChildProcesses], Awaitable[Any]], max_message_bytes: int = 1 << 20) -> Any:
    """The result of `use`; fails when it leaves a process, thread, descriptor or task behind."""

    async def main() -> Any:
        children = ChildProcesses(max_message_bytes)
        tasks = asyncio.all_tasks()
        try:
            return await use(children)
        finally:
            await children.close()
            assert asyncio.all_tasks() == tasks

    with leaks():
        return asyncio.run(main())


async def failure(child: ChildProcess, method: str, *args: Any, deadline_s: float = 10.0) -> Exception:
    """The exception that a call raises."""
    try:
        await child.call(method, *args, deadline_s=deadline_s)
    except (ChildError, WorkerError, TimeoutError) as error:
        return error
    raise AssertionError(f"{method} raised nothing")


def test_a_child_serves_the_methods_of_what_its_reference_makes(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", 1, {"a": 2}, name="x")
        assert await child.call("given", deadline_s=10) == (1, {"a": 2})
        assert await child.call("add", 1, 2, deadline_s=10) == 3
        assert await child.call("pid", deadline_s=10) == child.pid != os.getpid()

    run(use)


def test_a_copy_that_foreign_code_forks_answers_nothing(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x")
        assert await child.call("fork", deadline_s=10) == signal.SIGKILL
        here = await HereChildren().start(f"{served}:Served", name="x")
        assert await here.call("fork", deadline_s=10) == signal.SIGKILL

    run(use)


def test_a_child_imports_no_torch_and_runs_one_call_at_a_time_on_its_main_thread(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x")
        heavy = {"torch", "transformers", "omegaconf", "pluggy", "numpy"}
        assert not heavy & set(await child.call("modules", deadline_s=10))
        assert await child.call("on_main_thread", deadline_s=10)
        error = await failure(child, "interrupted")
        assert str(error) == "TimeoutError: rang"
        await child.call("forgotten_alarm", deadline_s=10)
        await asyncio.sleep(0.1)
        assert await child.call("add", 1, 1, deadline_s=10) == 2, "an alarm must not outlive its call"

    run(use)


def test_what_a_method_raises_is_a_child_error_with_its_trace_and_the_child_lives_on(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x")
        for method, message in [
            ("divide", "ZeroDivisionError: division by zero"),
            ("leave", "it called sys.exit(4)"),
            ("child_error", "no quotient"),
            ("config_error", "not here"),
            ("absent", "AttributeError: 'Served' object has no attribute 'absent'"),
        ]:
            error = await failure(child, method)
            assert isinstance(error, ChildError)
            assert str(error) == message
        error = await failure(child, "divide")
        assert isinstance(error, ChildError)
        assert "served.py" in error.trace
        assert await child.call("add", 1, 2, deadline_s=10) == 3

    run(use)


def test_results_and_arguments_that_cannot_be_sent_are_errors_and_the_child_lives_on(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x")
        assert "cannot be sent to the parent" in str(await failure(child, "unpicklable"))
        assert "at most 1000000" in str(await failure(child, "zeros", 2_000_000))
        assert "at most 1000000" in str(await failure(child, "add", b"0" * 2_000_000, b""))
        assert "cannot be sent" in str(await failure(child, "add", lambda: 0, 1))
        assert len(await child.call("zeros", 900_000, deadline_s=10)) == 900_000

    run(use, max_message_bytes=1_000_000)


def test_a_child_that_ends_by_itself_is_a_worker_error_with_its_last_words(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="judge")
        error = await failure(child, "die")
        assert isinstance(error, WorkerError)
        assert "child 'judge' ended: exit code 3; its last words: famous last words" in str(error)
        assert not child.alive
        assert isinstance(await failure(child, "add", 1, 2), WorkerError)

    run(use)


@pytest.mark.parametrize("method", ["loop", "regex"])
def test_a_call_past_its_deadline_kills_the_child_even_while_it_holds_the_interpreter_lock(
    served: str, method: str
) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x")
        began = time.monotonic()
        error = await failure(child, method, deadline_s=0.3)
        assert isinstance(error, TimeoutError)
        assert time.monotonic() - began < 3.0
        assert not child.alive

    run(use)


def test_calls_run_at_the_same_time_on_threads_and_a_hanging_one_takes_the_others_with_it(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x", threads=32)
        began = time.monotonic()
        await asyncio.gather(*(child.call("sleep", 0.5, deadline_s=10) for _ in range(32)))
        assert time.monotonic() - began < 5.0, "32 calls of half a second one after the other take 16 s"
        hang, innocent, together = await asyncio.gather(
            child.call("sleep", 60, deadline_s=0.5),
            child.call("sleep", 60, deadline_s=30),
            child.call("sleep", 60, deadline_s=0.501),
            return_exceptions=True,
        )
        assert isinstance(hang, TimeoutError)
        assert isinstance(innocent, WorkerError)
        assert "another call passed its deadline" in str(innocent)
        assert isinstance(together, TimeoutError), "as good as due when the child was killed"

    run(use)


@pytest.mark.fault
def test_the_deadline_of_a_call_does_not_run_while_it_waits_for_the_child(served: str) -> None:
    async def use(children: ChildProcesses) -> list[Any]:
        child = await children.start(f"{served}:Served", name="x")
        return await asyncio.gather(*(child.call("sleep", 0.3, deadline_s=0.9) for _ in range(5)))

    assert run(use) == [0.3] * 5


def test_a_cancelled_call_ends_its_child_at_once(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="x")
        call = asyncio.create_task(child.call("loop", deadline_s=60))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not child.alive

    run(use)


def test_a_start_that_fails_names_its_cause_and_leaves_nothing(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        cases: list[tuple[str, type[Exception], str]] = [
            (f"{served}:refuses", ConfigError, "kwargs.x is wrong"),
            (f"{served}:breaks", ChildError, "ValueError: no good"),
            (f"{served}:servd", PluginError, "there is no 'servd'"),
            ("/nowhere/x.py:f", PluginError, "the file does not exist"),
            ("no_such_module:f", PluginError, "there is no module 'no_such_module'"),
            ("nothing", PluginError, "needs the form module:name or file.py:name"),
        ]
        for reference, kind, message in cases:
            with pytest.raises(kind, match=r"^[^\n]*$") as caught:
                await children.start(reference, name="x")
            assert message in str(caught.value)
        with pytest.raises(WorkerError, match=r"child 'slow': not ready within 0\.5 s"):
            await children.start(f"{served}:never", name="slow", deadline_s=0.5)
        assert children.pids == []

    run(use)


def test_close_lets_the_object_close_and_kills_what_hangs_and_what_its_code_started(
    served: str, tmp_path: Path
) -> None:
    async def use(children: ChildProcesses) -> None:
        await children.start(f"{served}:Served", str(tmp_path / "closed"), name="good")
        hanging = await children.start(f"{served}:Served", name="hanging", threads=2)
        grandchild = await hanging.call("starts_a_process", deadline_s=10)
        call = asyncio.create_task(hanging.call("loop", deadline_s=60))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await children.close()
        assert time.monotonic() - began < 4.0
        assert (tmp_path / "closed").read_text() == "closed"
        assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], WorkerError)
        assert not is_running(grandchild)

    run(use)


@pytest.mark.fault
def test_nothing_runs_any_more_that_takes_the_kernel_long_to_end(served: str) -> None:
    async def use(children: ChildProcesses) -> None:
        for number in range(5):
            child = await children.start(f"{served}:Served", name=f"large {number}")
            processes = await child.call("starts_large_processes", deadline_s=30)
            await children.close()
            assert not any(map(is_running, processes))

    run(use)


def test_what_a_child_prints_goes_to_the_log_and_not_into_the_pipe(
    served: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(children: ChildProcesses) -> None:
        child = await children.start(f"{served}:Served", name="chatty")
        await child.call("prints", "hello", deadline_s=10)
        await child.call("prints", "x" * 100_000, deadline_s=10)
        assert await child.call("add", 1, 2, deadline_s=10) == 3

    with caplog.at_level("INFO", logger="rlcore"):
        run(use)
    assert "chatty: hello" in caplog.messages
    assert max(map(len, caplog.messages)) < 3000


PARENT = """
import asyncio, sys
from rlcore.cluster.child import ChildProcesses

async def main():
    children = ChildProcesses()
    child = await children.start(sys.argv[1] + ":Served", name="x")
    grandchild = await child.call("starts_a_process", deadline_s=10)
    print(child.pid, grandchild, flush=True)
    await child.call(sys.argv[2], deadline_s=60)

asyncio.run(main())
"""


@pytest.mark.parametrize("method", ["loop", "regex"])
def test_no_descendant_survives_a_parent_that_was_killed(served: str, method: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, served, method], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)
    assert set(pids) <= descendants(os.getpid())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    patience = time.monotonic() + 3.0
    while any(map(is_running, pids)) and time.monotonic() < patience:
        time.sleep(0.02)
    assert not any(map(is_running, pids))
