"""An interpreter that runs the trials of many written plugins: importing torch takes most of the time of one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import pytest

from rlcore.cli import plugin_trial
from rlcore.cluster.forks import ONE_THREAD, CommandEnd, ForkedCommands

KEPT = """
import json, os, sys
from importlib import import_module
from rlcore.cluster.forks import ForkedCommands, run_forks

for module in json.loads(sys.argv[1]):
    import_module(module)
while line := sys.stdin.readline():
    request = json.loads(line)
    if not (pid := os.fork()):
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.chdir(request["directory"])
            os.environ.clear()
            os.environ.update(request["environment"])
            run_forks(ForkedCommands(**request["commands"]))
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        print("null", flush=True)
"""


@pytest.fixture(scope="session")
def kept_process() -> Iterator["subprocess.Popen[str]"]:
    """The process, which has imported what trials share."""
    command = [sys.executable, "-c", KEPT, json.dumps(plugin_trial.SHARED_IMPORTS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **ONE_THREAD}) as process:
        yield process
        process.communicate(timeout=60)


@pytest.fixture
def kept_interpreter(kept_process: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial runs in a fork of the kept process, where it would start an interpreter."""

    def run(commands: ForkedCommands) -> Sequence[CommandEnd]:
        assert kept_process.stdin is not None
        assert kept_process.stdout is not None
        environment = {**os.environ, **commands.environment, **ONE_THREAD}
        request = {"directory": os.getcwd(), "environment": environment, "commands": asdict(commands)}
        print(json.dumps(request), file=kept_process.stdin, flush=True)
        endings = json.loads(kept_process.stdout.readline())
        assert endings is not None, "the fork failed"
        return [CommandEnd(**fields) for fields in endings]

    monkeypatch.setattr(plugin_trial, "run_in_forks", run)
