"""Runs code in a fresh interpreter: a module's imports can only be observed where nothing was imported before."""

import subprocess
import sys
from dataclasses import dataclass
from tempfile import TemporaryFile


@dataclass(frozen=True)
class InterpreterResult:
    """The result of a fresh interpreter."""

    code: int
    output: str
    errors: str


def run_in_new_interpreter(code: str, deadline_s: float) -> InterpreterResult | None:
    """Run Python code in a fresh interpreter; None when the deadline passed, and it was killed."""
    command = [sys.executable, "-c", code]
    # Into files: a process that the code leaves behind would hold a pipe open.
    with TemporaryFile() as output, TemporaryFile() as errors:
        try:
            done = subprocess.run(command, stdout=output, stderr=errors, timeout=deadline_s, check=False)
        except subprocess.TimeoutExpired:
            return None
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return InterpreterResult(done.returncode, *texts)
