"""A fresh interpreter for a moment: what a module imports can only be seen where nothing was imported before."""

import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class FreshRun:
    """How a fresh interpreter ended."""

    code: int
    output: str
    errors: str


def run_fresh(code: str, deadline_s: float) -> FreshRun | None:
    """Run Python code in an interpreter of its own; None when the deadline passed, and it was killed."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return None
    return FreshRun(done.returncode, done.stdout, done.stderr)
