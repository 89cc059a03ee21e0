"""A fresh interpreter for a moment: what a module imports can only be seen where nothing was imported before."""

import subprocess
import sys
from dataclasses import dataclass
from tempfile import TemporaryFile


@dataclass(frozen=True)
class FreshRun:
    """The ending of a fresh interpreter."""

    code: int
    output: str
    errors: str


def run_fresh(code: str, deadline_s: float) -> FreshRun | None:
    """Run Python code in a fresh interpreter; None when the deadline passed, and it was killed."""
    command = [sys.executable, "-c", code]
    # Into files: a process that the code leaves behind would hold a pipe open.
    with TemporaryFile() as output, TemporaryFile() as errors:
        try:
            done = subprocess.run(command, stdout=output, stderr=errors, timeout=deadline_s, check=False)
        except subprocess.TimeoutExpired:
            return None
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode("utf-8", "replace"))
    return FreshRun(done.returncode, *said)
