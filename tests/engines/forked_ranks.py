"""Runs a script in several processes at a time, as forks of processes that have imported torch and transformers.

Two processes are forked by turns, so that neighbouring ranks differ in the hashes of their strings, and thereby in the
order of their sets, as processes on two machines do. They start with the fixture `forked_ranks` and are this file as a
program: they read requests as lines of JSON and answer each with a line. A fork ends as the script would, through the
end of its interpreter; what differs from a script in a shell is that its modules were imported before. Importing them
takes longer than what most ranks do.
"""

import gc
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

SHARED = (
    *("rlcore.engines.hf.train.engine", "rlcore.engines.hf.train.classifier", "rlcore.testing.tiny"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft"),
)
"""Importing them starts no thread and computes nothing, so a fork has what a new process would have."""
DEADLINE_S = 240.0
FORKED = 2
_started: list["subprocess.Popen[str]"] = []
"""The processes that are forked, while there are any."""
_numbers = itertools.count()
"""Of requests: the answer to one that a test did not wait for is not that to the next."""


def outputs_of_ranks(
    script: Path, ranks: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None
) -> list[str]:
    """The standard output of `python SCRIPT ARGUMENTS` for the arguments of each rank.

    The ranks run at the same time; an AssertionError with their errors unless all end with 0 within the deadline.
    `environment` is added to that of pytest when it started.
    """
    with TemporaryDirectory() as directory:
        paths = [[str(Path(directory) / f"{kind}{rank}") for kind in ("out", "err")] for rank in range(len(ranks))]
        codes = _codes([(str(script), list(rank), *path) for rank, path in zip(ranks, paths, strict=True)], environment)
        outputs, errors = ([Path(path).read_text() for path in of_kind] for of_kind in zip(*paths, strict=True))
    assert codes == [0] * len(ranks), f"{codes}\n" + "\n".join(text[-3000:] for text in errors)
    return outputs


@contextmanager
def ranks_to_be_forked() -> Iterator[None]:
    """Have the processes that are forked inside the block."""
    pipe, environment = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONHASHSEED", None)
    command = [sys.executable, __file__]
    with ExitStack() as stack:
        for _ in range(FORKED):
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
            _started.append(stack.enter_context(process))
        try:
            yield
        finally:
            for process in _started:
                process.communicate(timeout=60)
            _started.clear()


def _codes(ranks: Sequence[tuple[Any, ...]], environment: Mapping[str, str] | None) -> list[int]:
    """The exit codes of ranks: each a script, its arguments, and files for its output and errors."""
    number = next(_numbers)
    for turn, process in enumerate(_started):
        assert process.stdin is not None
        process.stdin.write(json.dumps([number, ranks[turn::FORKED], dict(environment or {})]) + "\n")
        process.stdin.flush()
    codes = [0] * len(ranks)
    for turn, process in enumerate(_started):
        assert process.stdout is not None
        answer = process.stdout.readline()
        assert answer, "a process that is forked has ended"
        answered, codes[turn::FORKED] = json.loads(answer)
        assert answered == number, "the answer to an earlier request, which took too long"
    return codes


def _serve() -> None:
    """Answer requests until there are none; in a fork, be the script."""
    for module in SHARED:
        import_module(module)
    gc.freeze()  # what is there now is not collected in forks, which would copy its pages
    while line := sys.stdin.readline():
        number, ranks, environment = json.loads(line)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads, of which a fork has one"
        pids = []
        for rank in ranks:
            pids.append(os.fork())
            if not pids[-1]:
                os.environ.update(environment)
                _be(*rank)
                return
        sys.stdout.write(json.dumps([number, _codes_of(pids)]) + "\n")
        sys.stdout.flush()


def _be(script: str, arguments: Sequence[str], output: str, errors: str) -> None:
    for path, standard in ((os.devnull, 0), (output, 1), (errors, 2)):
        opened = os.open(path, os.O_CREAT | os.O_RDWR)
        os.dup2(opened, standard)
        os.close(opened)
    np.random.seed()  # torch and `random` do not repeat in forks what their parent would have drawn
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _codes_of(pids: Sequence[int]) -> list[int]:
    """The exit codes of forks, negative for a signal; those that run for too long are killed."""
    until = time.monotonic() + DEADLINE_S
    codes = []
    for pid in pids:
        handle = os.pidfd_open(pid)
        try:
            if not select.select([handle], [], [], max(0.0, until - time.monotonic()))[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(handle)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return codes


if __name__ == "__main__":
    _serve()
