"""The entry of a killable child process: `python -m rlcore.cluster.child_main`, spoken to over pipes by
`rlcore.cluster.child`.

The child gets the import *target* of a callable, calls it, and serves the methods of the resulting object, or calls
that object's `serve_calls(pipe, calls)`. It imports only the standard library, `rlcore.errors`, and what the target
needs. Frames are a length and a call's number followed by a pickle. Code in the child can write to the pipe of answers,
so the parent reads them with `rlcore.cluster.answers`, which runs no code from them. Only `rlcore.cluster.serve`, for
workers, sends arbitrary objects.

The first frame is empty: its number is the child's process id.

A child never outlives its parent. Three mechanisms ensure it, each covering failures of the one before: the end of the
request pipe; a lifeline pipe on which nothing is ever sent and whose end makes the *kernel* kill the child's process
group, even while C code holds the interpreter lock; and PR_SET_PDEATHSIG.
"""

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from rlcore.cluster import answers
from rlcore.cluster.answers import OK, OURS, RAISED
from rlcore.cluster.keeper import PR_SET_PDEATHSIG, fork_below_keeper
from rlcore.errors import ChildError, RlcoreError, boundary, trace_of
from rlcore.errors.redaction import beginning
from rlcore.imports import FILE_DIRECTORIES, import_target

FRAME = struct.Struct("!QQ")
"""Number of bytes of the pickle, and number of the call it belongs to."""


SETUP = 0
"""Number of the call that creates the object; method calls start at 1."""


WHERE = 1 << 63
"""Bit of the number of a question where the main thread is; it is answered while that thread computes or waits."""


MOST_FRAMES = 200


CLOSE_GRACE_S = 1.0
"""Seconds that a child may take to exit after the parent closed the pipe."""


KEPT = "kept"
"""The last argument of a child that runs foreign code: it runs below a keeper, see `rlcore.cluster.keeper`."""


def end_copy(process: int) -> None:
    """End this process if it is not that one, but its copy: foreign code forked, and returned in both."""
    if os.getpid() != process:
        os.kill(os.getpid(), signal.SIGKILL)


class Pipe:
    """The child's end of the two pipes."""

    def __init__(self, requests_fd: int, answers_fd: int) -> None:
        self._requests = os.fdopen(requests_fd, "rb")
        self._answers = os.fdopen(answers_fd, "wb", buffering=0)
        self._lock = threading.Lock()
        self.max_bytes = 1 << 26
        self.dumps: Callable[[Any], bytes] = answers.dumps
        self._process = os.getpid()

    def announce(self) -> None:
        """Send this process's id, as the number of an empty frame, before any foreign code runs."""
        self._answers.write(FRAME.pack(0, os.getpid()))

    def read(self) -> tuple[int, bytes] | None:
        """The next call's number and pickle; None at the end of the pipe."""
        header = self._requests.read(FRAME.size)
        if len(header) < FRAME.size:
            return None
        size, number = FRAME.unpack(header)
        payload = self._requests.read(size)
        return (number, payload) if len(payload) == size else None

    def answer(self, number: int, kind: str, value: Any) -> None:
        """Send an answer; one that cannot be pickled or is too long is replaced by an error that says so."""
        end_copy(self._process)
        with self._lock:  # what `dumps` sends over another connection has the order of the answers
            payload = self._payload(kind, value)
            frame = memoryview(FRAME.pack(len(payload), number) + payload)
            while frame:
                frame = frame[self._answers.write(frame) :]

    def _payload(self, kind: str, value: Any) -> bytes:
        try:
            with boundary("the result cannot be sent to the parent", ChildError):
                payload = self.dumps((kind, value))
            if len(payload) > self.max_bytes:
                raise ChildError(
                    f"the result has {len(payload)} bytes; at most {self.max_bytes} can be sent to the parent"
                )
        except ChildError as cause:
            return pickle.dumps((RAISED, (str(cause), "")))
        return payload


def answered(pipe: Pipe, number: int, work: Callable[[], Any]) -> bool:
    """Run `work` and send its result or error; False if it raised.

    Every exception of user code is sent as an error, including SystemExit, KeyboardInterrupt and CancelledError:
    without an answer the parent waits until the deadline, and then kills every call of this process.
    """
    try:
        with boundary("", ChildError, BaseException):
            value = work()
    except ChildError as error:
        cause = error.__cause__ or error
        text = str(error).removeprefix(": ")  # the exception itself, or the message of a ChildError
        pipe.answer(number, RAISED, (beginning(text), trace_of(cause)))
    except RlcoreError as error:
        pipe.answer(number, OURS, (type(error).__name__, beginning(str(error))))
    else:
        pipe.answer(number, OK, value)
        return True
    return False


def serve_call(pipe: Pipe, served: Any, number: int, payload: bytes) -> None:
    """Run one call of a method and send its result."""

    def work() -> Any:
        method, args = pickle.loads(payload)
        return getattr(served, method)(*args)

    answered(pipe, number, work)


def serve_on_main_thread(pipe: Pipe, served: Any, calls: "queue.SimpleQueue[tuple[int, bytes] | None]") -> None:
    """Serve one call at a time on this thread, so that `signal.alarm` works; no alarm survives its call."""
    while (call := calls.get()) is not None:
        serve_call(pipe, served, *call)
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve_on_threads(
    pipe: Pipe, served: Any, calls: "queue.SimpleQueue[tuple[int, bytes] | None]", threads: int
) -> None:
    """Serve up to `threads` calls at a time."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="call")
    while (call := calls.get()) is not None:
        pool.submit(serve_call, pipe, served, *call)
    pool.shutdown(wait=False, cancel_futures=True)


def end_group() -> None:
    """Kill this process and every process that code in it started."""
    os.killpg(0, signal.SIGKILL)


def frames_of(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of the thread with that identifier, the innermost first."""
    frames: list[tuple[str, int, str]] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return frames


def read_calls(pipe: Pipe, calls: "queue.SimpleQueue[tuple[int, bytes] | None]") -> None:
    """Feed `calls` until the pipe ends; then give the main thread CLOSE_GRACE_S, and exit."""
    while (call := pipe.read()) is not None:
        if call[0] & WHERE:
            pipe.answer(call[0], OK, frames_of(threading.main_thread().ident or 0))
        else:
            calls.put(call)
    calls.put(None)
    threading.Event().wait(CLOSE_GRACE_S)
    end_group()


def tie_to_parent(parent: int, lifeline: int) -> None:
    """End with the parent: see the module's docstring. The parent made us the leader of a process group."""

    def parent_died(_signum: int, _frame: FrameType | None) -> None:
        end_group()

    signal.signal(signal.SIGTERM, parent_died)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgid(0))
            fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        end_group()


def main(arguments: list[str]) -> None:
    """Serve until the pipe ends. Arguments: the parent's id, the file descriptors of the three pipes, and KEPT."""
    parent, requests_fd, answers_fd, lifeline = (int(argument) for argument in arguments[:4])
    for descriptor in (requests_fd, answers_fd, lifeline):
        os.set_inheritable(descriptor, False)
    if arguments[4:] == [KEPT]:
        parent = fork_below_keeper(parent, (requests_fd, answers_fd, lifeline))
    tie_to_parent(parent, lifeline)
    pipe = Pipe(requests_fd, answers_fd)
    pipe.announce()
    first = pipe.read()
    if first is None:
        return
    start = pickle.loads(first[1])
    sys.path[:] = start["path"]
    FILE_DIRECTORIES.update(start["file_directories"])
    sys.argv[:] = [start["name"]]
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(start["environment"])
    pipe.max_bytes = start["max_bytes"]
    calls: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
    threading.Thread(target=read_calls, args=(pipe, calls), name="read_calls", daemon=True).start()
    served: list[Any] = []
    if start.get("stack_s"):  # also while C code holds the interpreter lock
        faulthandler.dump_traceback_later(start["stack_s"])
    is_ready = answered(
        pipe, SETUP, lambda: served.append(import_target(start["target"])(*pickle.loads(start["args"])))
    )
    faulthandler.cancel_dump_traceback_later()
    if is_ready:
        threads = start["threads"]
        serve_calls = getattr(served[0], "serve_calls", None)
        if callable(serve_calls):
            serve_calls(pipe, calls)
        elif threads == 1:
            serve_on_main_thread(pipe, served[0], calls)
        else:
            serve_on_threads(pipe, served[0], calls, threads)
        close = getattr(served[0], "close", None)
        if callable(close):
            close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    finally:
        if sys.exception() is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads that still run user code must not keep the process alive, so nothing waits for them.
        os._exit(0)
