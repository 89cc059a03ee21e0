"""Two sides of a comparison, each in a separate process environment. Both are loaded, and one computes at a time.

A side is a program with a `Channel`. It reads JSON lines from stdin, and writes one answer per line to its original
stdout; output of libraries goes to stderr. The parent holds a `Side` for each and asks them in turn. This file uses
only the standard library, because it runs in the environments of peers.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class SideError(RuntimeError):
    """A side died, or did not answer in time."""


class Channel:
    """The side's end of the channel."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next question; None when the parent has closed the channel."""
        line = sys.stdin.readline()
        return dict(json.loads(line)) if line else None

    def send(self, answer: Mapping[str, Any]) -> None:
        """Answer the last question."""
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


class Side:
    """The parent's end: starts the program, sends questions, and stops the program at the end of the block."""

    def __init__(self, name: str, python: Path, program: Path, spec: Mapping[str, Any], threads: int) -> None:
        self.name = name
        pythonpath = os.pathsep.join([str(program.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": pythonpath,
        }
        self._process = subprocess.Popen(
            [str(python), str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._unread = b""
        self._say(spec)

    @property
    def pid(self) -> int:
        """Id of the side's process."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The side's answer; SideError when it dies or does not answer within `deadline_s`."""
        self._say(question)
        return self.answer(deadline_s)

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """The answer to the last question, or to the spec; SideError if the side has no memory left for it."""
        line = self._read_line(time.monotonic() + deadline_s, deadline_s)
        answer = dict(json.loads(line))
        if "out_of_memory" in answer:
            raise SideError(f"{self.name}: {answer['out_of_memory']}")
        return answer

    def _say(self, message: Mapping[str, Any]) -> None:
        pipe = self._process.stdin
        if pipe is None:
            raise SideError(f"{self.name}: it has no stdin")
        try:
            pipe.write((json.dumps(message) + "\n").encode())
            pipe.flush()
        except BrokenPipeError as cause:
            raise SideError(f"{self.name}: its process ended with code {self._process.wait(10)}; see above") from cause

    def _read_line(self, until: float, deadline_s: float) -> bytes:
        pipe = self._process.stdout
        if pipe is None:
            raise SideError(f"{self.name}: it has no stdout")
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise SideError(f"{self.name}: no answer within {deadline_s:g} s")
            more = os.read(pipe.fileno(), 65536)
            if not more:
                raise SideError(f"{self.name}: its process ended with code {self._process.wait(10)}; see above")
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def close(self) -> None:
        """Close the channel, so that the side ends; kill the side if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
