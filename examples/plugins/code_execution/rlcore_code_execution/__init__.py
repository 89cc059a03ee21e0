"""A reward for programs: the share of a row's tests for which the program prints what it should.

A test is an input and the output that it leads to. The program gets the input alone, so it cannot report a success that
it did not have. It runs in a separate process with limits of time, memory and output, and is killed with its process
group. That guards against mistakes. It is not a sandbox: network and files are open to the program.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rlcore import FrozenDict, Reward, RewardFunction, Trajectory, hookimpl

BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
MAX_OUTPUT = 1 << 20
"""Bytes that a program may write to a file or its output."""
LIMITED = """
import resource, runpy, sys
seconds, memory, output = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.argv[1:] = []
runpy.run_path("program.py", run_name="__main__")
"""


def passes_tests(trajectory: Trajectory, seconds: float = 2.0, memory_mib: int = 512) -> Reward:
    """The share of `tests` of the row that the last code block passes; without a block, the whole response.

    `tests` is a list of {"input": ..., "output": ...}; spaces at the ends of the output do not count. ValueError for a
    row without tests.
    """
    tests = trajectory.prompt.columns.get("tests")
    if not tests:
        raise ValueError(f"prompt '{trajectory.prompt.id}' has no tests; needs a list of input and output")
    program = program_of(trajectory.text())
    passed = 0
    for test in tests if program.strip() else ():
        printed = output_of(program, str(test.get("input", "")), seconds, memory_mib)
        passed += printed is not None and printed.strip() == _expected(test).strip()
    return Reward(passed / len(tests), info=FrozenDict({"num_passed": passed}))


def _expected(test: Mapping[str, Any]) -> str:
    if "output" not in test:
        raise ValueError(f"a test has {sorted(test)}; needs 'output'")
    return str(test["output"])


def program_of(response: str) -> str:
    """The last code block of a response, or all of it."""
    blocks = BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def output_of(program: str, text: str, seconds: float, memory_mib: int) -> str | None:
    """The output of a Python program for an input; None when it fails or exceeds a limit."""
    with tempfile.TemporaryDirectory(prefix="rlcore-program-") as directory:
        with open(f"{directory}/program.py", "w", encoding="utf-8", errors="replace") as file:
            file.write(program)
        limits = [str(int(seconds) + 1), str(memory_mib << 20), str(MAX_OUTPUT)]
        with open(f"{directory}/output", "w+b") as output:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", LIMITED, "program", *limits],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={name: value for name, value in os.environ.items() if name.startswith("RLCORE_") or name == "PATH"},
                start_new_session=True,
            )
            code = _ended(process, text.encode("utf-8", "replace"), seconds)
            output.seek(0)
            return output.read(MAX_OUTPUT).decode("utf-8", "replace") if code == 0 else None


def _ended(process: "subprocess.Popen[bytes]", text: bytes, seconds: float) -> int:
    """The exit code; nothing of the process group is left."""
    try:
        process.communicate(text, seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return process.returncode


@hookimpl
def rlcore_reward_functions() -> list[RewardFunction]:
    return [RewardFunction(name="passes_tests", target="rlcore_code_execution:passes_tests", deadline_s=60.0)]
