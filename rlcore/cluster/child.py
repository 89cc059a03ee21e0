"""The parent's side of killable child processes: see `rlcore.cluster.child_main` for what runs in one."""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.cluster import answers
from rlcore.cluster.child_main import CLOSE_GRACE_S, FRAME, KEPT, SETUP
from rlcore.cluster.environment import inherited, start_message
from rlcore.cluster.stack import StackDump
from rlcore.cluster.strays import VARIABLE, Strays
from rlcore.cluster.streams import lines, pipe_reader
from rlcore.cluster.worker_output import WorkerOutput
from rlcore.contracts.children import Child
from rlcore.errors import ChildError, WorkerError, boundary

MAX_MESSAGE_BYTES = 1 << 26
"""Longest call and longest result."""
TOGETHER_FRAC = 0.05
"""If a call's deadline kills the child, other calls with less than this share of their time left time out, too."""
POLL_S = 0.005
OUTPUT_S = 0.1
"""Seconds in which lines arrive that were printed before an answer."""
STACK_BEFORE_S, STACK_FRAC = 0.5, 0.2
"""A child that is not ready prints its stack this long before the deadline, or by that share of a short deadline."""


@dataclass
class PendingCall:
    """A call that a child has not answered."""

    future: "asyncio.Future[Any]"
    due: float
    deadline_s: float
    where: str


class ChildProcess(Child):
    """One child: its process, the calls in flight, and its last output."""

    def __init__(
        self,
        name: str,
        threads: int,
        max_message_bytes: int,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        *,
        kept: bool = False,
    ) -> None:
        """`descriptors`: open files that the child inherits with their numbers, in addition to its pipes. `kept`: it
        runs below a keeper, `rlcore.cluster.keeper`, because foreign code runs in it."""
        self.name = name
        self._kept = kept
        self._descriptors = tuple(descriptors)
        self._max_bytes = max_message_bytes
        self._slots = asyncio.Semaphore(threads)
        self._mark = uuid.uuid4().hex
        self._environment = {**environment, VARIABLE: self._mark}
        self._calls: dict[int, PendingCall] = {}
        self._numbers = itertools.count(SETUP)
        self._printed = WorkerOutput(name)
        self._stack = StackDump()
        self._reason = ""
        self._alive = True

    @property
    def alive(self) -> bool:
        """False from the moment it is killed or seen to have ended."""
        return self._alive

    @property
    def ended(self) -> bool:
        """True when the process and everything it started are gone."""
        return self._serving.done() and self._strays.done

    @property
    def busy(self) -> bool:
        """True while calls are in flight."""
        return bool(self._calls)

    async def wait(self) -> None:
        """Return when the process and everything it started are gone."""
        await asyncio.shield(self._serving)

    @property
    def pid(self) -> int:
        """The id of the process and of its process group; before it has said so, that of its keeper."""
        return self._pid

    async def spawn(self) -> None:
        """Start the process and connect to it."""
        requests, self._requests_fd = os.pipe()
        answers_fd, their_answers = os.pipe()
        lifeline, self._lifeline_fd = os.pipe()
        theirs = (requests, their_answers, lifeline)
        command = [sys.executable, "-u", "-P", "-m", "rlcore.cluster.child_main", str(os.getpid()), *map(str, theirs)]
        command += [KEPT] * self._kept
        try:
            # Started from this thread, which lives as long as the loop: PR_SET_PDEATHSIG watches threads.
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*theirs, *self._descriptors),
                start_new_session=True,
                env=self._environment,
            )
        except OSError as cause:
            for descriptor in (self._requests_fd, answers_fd, self._lifeline_fd):
                os.close(descriptor)
            raise WorkerError(f"child '{self.name}': cannot start a process: {cause}") from cause
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._pid = self._process.pid
        self._answers, self._answers_transport = await pipe_reader(os.fdopen(answers_fd, "rb", 0))
        output = self._process.stdout
        if output is None:
            raise WorkerError(f"child '{self.name}': its output is not connected")
        self._output, self._output_transport = await pipe_reader(output)
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(self._requests_fd, "wb", 0)
        )
        self._writer = asyncio.StreamWriter(transport, protocol, None, loop)
        self._logging = asyncio.create_task(self._log_output(), name=f"log of child {self.name}")
        self._serving = asyncio.create_task(self._read_answers(), name=f"answers of child {self.name}")
        self._strays = Strays(self._process.pid, self._mark, self._serving, self._answers_transport.close)

    async def begin(self, spawn: Coroutine[Any, Any, None], start: dict[str, Any], deadline_s: float) -> None:
        """Await `spawn` and create the object; however that fails, or is cancelled, no process is left."""
        spawning = asyncio.create_task(spawn, name=f"start of child {self.name}")
        ready = False
        try:
            await asyncio.shield(spawning)
            await self.setup(start, deadline_s)
            ready = True
        finally:
            # A process that was started during the cancellation has to be ended, too.
            await asyncio.wait([spawning])
            if spawning.exception() is None and not ready:
                await self.close()

    async def setup(self, start: dict[str, Any], deadline_s: float) -> None:
        """Create the served object. An error of rlcore keeps its class, any other becomes a ChildError."""
        self._package = answers.package_of(start["target"])
        try:
            await self._exchange(pickle.dumps(start), deadline_s)
        except TimeoutError as cause:
            raise WorkerError(f"child '{self.name}': not ready within {deadline_s:g} s{self._stack.where}") from cause

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """See `rlcore.contracts.children.Child.call`. The clock starts when the child has a thread for the call."""
        with boundary(f"child '{self.name}': the arguments of {method} cannot be sent", ChildError):
            payload = pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL)
        if len(payload) > self._max_bytes:
            raise ChildError(
                f"child '{self.name}': the arguments of {method} have {len(payload)} bytes; at most {self._max_bytes}"
            )
        async with self._slots:
            return await self._exchange(payload, deadline_s)

    async def _exchange(self, payload: bytes, deadline_s: float) -> Any:
        if not self._alive:
            raise WorkerError(self.why_ended())
        number, call = self._expect(deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                self._post(number, payload)
                await self._drained()
                return await call.future
        except TimeoutError:
            if call.future.cancelled():  # by the timeout; else its result arrived in the same iteration
                self._expire(asyncio.get_running_loop().time())
            raise TimeoutError(f"no result within {deadline_s:g} s") from None
        except asyncio.CancelledError:
            self._kill("a call was cancelled")
            raise
        finally:
            self._forget(number, call)

    def _expect(self, deadline_s: float, where: str = "") -> tuple[int, PendingCall]:
        """A new call, whose future the child's answer or end will resolve."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        self._calls[number] = PendingCall(loop.create_future(), loop.time() + deadline_s, deadline_s, where)
        return number, self._calls[number]

    def _post(self, number: int, payload: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(FRAME.pack(len(payload), number))
            self._writer.write(payload)

    async def _drained(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    def _forget(self, number: int, call: PendingCall) -> None:
        """Remove a finished call; an error without a waiting caller is discarded."""
        del self._calls[number]
        if call.future.done() and not call.future.cancelled():
            call.future.exception()

    def _expire(self, now: float) -> None:
        """Kill the child; calls that are about to time out do, the others fail because the child died."""
        self._kill("it was killed because another call passed its deadline")
        for call in self._calls.values():
            if not call.future.done() and call.due - now <= TOGETHER_FRAC * call.deadline_s:
                call.future.set_exception(TimeoutError())

    def _kill(self, reason: str) -> None:
        if not self._alive:
            return
        self._alive = False
        self._reason = reason
        self._kill_group()

    def _kill_group(self) -> None:
        """Kill the process and what it started, unless its id was released and may belong to another process.

        A keeper does that on SIGTERM. SIGCONT comes first, in case foreign code has stopped it.
        """
        if self._process.returncode is None:
            for number in (signal.SIGCONT, signal.SIGTERM) if self._kept else (signal.SIGKILL,):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    async def _read_answers(self) -> None:
        """Until the child ends: hand each answer to its call. Then reap it and close every descriptor."""
        try:
            _, self._pid = FRAME.unpack(await self._answers.readexactly(FRAME.size))
            while True:
                size, number = FRAME.unpack(await self._answers.readexactly(FRAME.size))
                if size > 2 * self._max_bytes:
                    self._kill(f"it sent a message of {size} bytes; at most {self._max_bytes} are allowed")
                    break
                self._resolve(number, await self._answers.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._alive = False
            self._answers_transport.close()
            self._writer.close()
            await asyncio.shield(self._reap())

    def _resolve(self, number: int, payload: bytes) -> None:
        call = self._calls.get(number)
        if call is None or call.future.done():
            return
        try:
            with boundary(f"child '{self.name}': its result cannot be read", ChildError):
                kind, value = self._read(payload)
                self._settle(number, call, kind, value)
        except ChildError as error:
            if not call.future.done():
                call.future.set_exception(error)

    def _read(self, payload: bytes) -> Any:
        """The child's message: foreign code may have written it."""
        return answers.loads(payload, self._package)

    def _settle(self, number: int, call: PendingCall, kind: str, value: Any) -> None:
        if kind == answers.OK:
            call.future.set_result(value)
        else:
            call.future.set_exception(answers.error_of(kind, value, keeps_class=number == SETUP))

    async def _reap(self) -> None:
        """Wait for the process; kill what it started; only then release its id to the system."""
        patience = time.monotonic() + CLOSE_GRACE_S
        while self._process.returncode is None:
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._kill_group()
                self._process.wait()
                await self._group_ended()
                break
            if time.monotonic() > patience:
                self._kill("it closed its pipe and did not end")
                self._kill_group()
            await asyncio.sleep(POLL_S)
        os.close(self._lifeline_fd)
        await asyncio.wait([self._logging], timeout=CLOSE_GRACE_S)
        self._logging.cancel()
        self._output_transport.close()
        for call in self._calls.values():
            if not call.future.done():
                whose = f"{call.where}: " if call.where else ""
                call.future.set_exception(WorkerError(whose + self.why_ended()))
        # Closed transports close their descriptors in a later iteration of the loop.
        await asyncio.sleep(0)

    async def _group_ended(self) -> None:
        """Wait for the processes it started, which the kernel ends with a delay.

        If this process is the first of a container, orphans become its children, and nothing else would reap them.
        """
        patience = time.monotonic() + CLOSE_GRACE_S
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < patience:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-self._process.pid, os.WNOHANG)
                os.killpg(self._process.pid, 0)
                await asyncio.sleep(POLL_S)

    def why_ended(self) -> str:
        """The way in which the process ended, with its last output."""
        code = self._process.returncode
        how = self._reason or (f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}")
        return f"child '{self.name}' ended: {how}{'' if self._reason else self._printed.last_words}"

    async def printed_cause(self, error: str) -> str:
        """The tail of an error of its object: an exception in its output that the error does not name; else empty."""
        await asyncio.sleep(OUTPUT_S)
        return self._printed.cause(error)

    async def _log_output(self) -> None:
        """Copies the child's output into the log, line by line, within bounds."""
        async for line in lines(self._output):
            self._stack.add(line)
            self._printed.add(line)

    async def close(self) -> None:
        """End the process: immediately when calls are in flight, else after it has closed its object, within a
        timeout."""
        if self._calls:
            self._kill("it was closed")
        else:
            self._alive = False
            self._reason = self._reason or "it was closed"
            self._writer.close()
        done, _ = await asyncio.wait([self._serving], timeout=CLOSE_GRACE_S + 0.5)
        if not done:
            self._kill_group()
            await asyncio.wait([self._serving])
        await self._strays.ended()


class ChildProcesses:
    """Starts children; `close` ends the remaining ones. Implements `rlcore.contracts.children.Children`."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_message_bytes
        self._children: set[ChildProcess] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the children that are alive."""
        return sorted(child.pid for child in self._children if child.alive)

    async def start(
        self,
        target: str,
        *args: Any,
        name: str,
        threads: int = 1,
        deadline_s: float = 60.0,
        env: Sequence[str] | None = None,
    ) -> ChildProcess:
        """See `rlcore.contracts.children.Children.start`.

        An error of rlcore in the child keeps its class; ChildError for any other exception, WorkerError if the child
        died or was not ready within the deadline.
        """
        child = ChildProcess(name, threads, self._max_bytes, inherited(env), kept=True)
        start = start_message(name, target, args, threads, self._max_bytes)
        stack_s = max(deadline_s - STACK_BEFORE_S, STACK_FRAC * deadline_s)
        await child.begin(self._spawn(child), {**start, "stack_s": stack_s}, deadline_s)
        return child

    async def _spawn(self, child: ChildProcess) -> None:
        await child.spawn()
        self._children = {other for other in self._children if not other.ended} | {child}

    async def close(self) -> None:
        """End every child, leaving no process, descriptor or task."""
        await asyncio.gather(*(child.close() for child in self._children))
        self._children.clear()
