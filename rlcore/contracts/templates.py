"""Chat templates, rendered within limits of time, memory and text.

A template is a program that comes with a model. It may loop for hours or double a string thirty times, and a thread
that renders it can neither be stopped nor handle a signal. So it runs in a child process, one per process of rlcore.
"""

import atexit
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from rlcore.contracts.template_child import FRAME, REFUSED, TOO_LARGE
from rlcore.errors import ConfigError, boundary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S = 5.0
"""Seconds of processor time that one conversation may take; real templates take milliseconds."""
WALL_S = 60.0
"""Timeout of one answer in seconds of wall-clock time. It is long, because a process may be stopped and a machine may
swap."""
START_S = 120.0
"""Seconds that the child may take to import transformers."""
MEMORY = 1 << 30
"""Bytes that a template may use."""
MAX_TEXT = 8 << 20
"""The most bytes of a conversation's text: more than the longest context windows hold."""
PASSED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "RLCORE_CHILD_OF", "TMPDIR", "TZ")
"""Environment variables that the child gets. By RLCORE_CHILD_OF, the owner of a killable child also ends this one."""


WAY_OUT = "needs a template that only writes out its messages; name another in model.chat_template"


class TemplateRefused(ConfigError):
    """The template raised an exception: it does not render these messages."""


class TemplateChild:
    """The one child process that renders templates for this process. A request starts it when none runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """The child process; None if there is none."""
        return self._process if self._owner == os.getpid() else None

    def request(self, message: bytes, whose: str) -> bytes:
        """The child's answer. ConfigError when it exceeds a limit; the child is then ended, and the next request starts
        another."""
        with self._lock:
            process = self.process or self._start(whose)
            answered = False
            try:
                answer = _exchange(process, message, WALL_S, whose)
                answered = True
                return answer
            finally:
                if not answered:
                    self._end()

    def close(self) -> None:
        """End the child. May be called more than once."""
        with self._lock:
            self._end()

    def _start(self, whose: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "rlcore.contracts.template_child", str(MEMORY), str(CPU_S)]
        environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        self._owner = os.getpid()
        ready = False
        try:
            path = pickle.dumps([entry or os.getcwd() for entry in sys.path])
            _exchange(self._process, path, START_S, f"{whose}: the process that renders it")
            ready = True
        finally:
            if not ready:
                self._end()
        return self._process

    def _end(self) -> None:
        process, self._process = self.process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            process.wait()


_CHILD = TemplateChild()
atexit.register(_CHILD.close)


def template_child() -> "subprocess.Popen[bytes] | None":
    """The process that renders templates for this one, if there is one."""
    return _CHILD.process


def end_template_child() -> None:
    """End the process that renders templates; the next conversation starts another."""
    _CHILD.close()


def render(tokenizer: "PreTrainedTokenizerBase", messages: list[Any], whose: str, **arguments: Any) -> str:
    """The text of a conversation, as the tokenizer's `apply_chat_template(..., tokenize=False)` gives it.

    `arguments` are those of `apply_chat_template`; `whose` names the template in errors. TemplateRefused when the
    template raises, ConfigError when it exceeds a limit.
    """
    known: Any = tokenizer
    with boundary(whose, TemplateRefused):
        variables = {**arguments, "conversation": messages}
        message = pickle.dumps(
            (known.chat_template, dict(known.special_tokens_map), variables), pickle.HIGHEST_PROTOCOL
        )
    answer = _CHILD.request(message, whose)
    kind, text = answer[:1], answer[1:].decode("utf-8", "replace")  # no tokenizer takes a lone surrogate
    if kind == REFUSED:
        raise TemplateRefused(f"{whose}: {text}")
    if kind == TOO_LARGE:
        raise ConfigError(f"{whose}: it used more than {MEMORY >> 20} MiB of memory; {WAY_OUT}")
    return text


def _exchange(process: "subprocess.Popen[bytes]", message: bytes, patience_s: float, whose: str) -> bytes:
    """Send the message and wait for the answer; ConfigError when the process ends, is late or answers too much."""
    deadline = time.monotonic() + patience_s
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    try:
        process.stdin.write(FRAME.pack(len(message)) + message)
        process.stdin.flush()
        size = FRAME.unpack(_read(process.stdout, FRAME.size, deadline))[0]
        if size > MAX_TEXT + 1:
            raise ConfigError(f"{whose}: it wrote {size - 1} bytes of text; at most {MAX_TEXT} are allowed; {WAY_OUT}")
        return _read(process.stdout, size, deadline)
    except TimeoutError as cause:
        raise ConfigError(f"{whose}: it has not ended within {patience_s:g} s; {WAY_OUT}") from cause
    except (EOFError, BrokenPipeError) as cause:
        code = process.wait()
        how = (
            f"it took more than {CPU_S:g} s" if code == -signal.SIGPROF else f"it ended its process (exit code {code})"
        )
        raise ConfigError(f"{whose}: {how}; {WAY_OUT}") from cause


def _read(pipe: IO[bytes], size: int, deadline: float) -> bytes:
    """Exactly this many bytes. EOFError when the pipe ends earlier, TimeoutError at the deadline."""
    found, poll = bytearray(), select.poll()
    poll.register(pipe, select.POLLIN)
    while len(found) < size:
        if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
            raise TimeoutError
        chunk = os.read(pipe.fileno(), size - len(found))
        if not chunk:
            raise EOFError
        found += chunk
    return bytes(found)
