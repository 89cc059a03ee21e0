"""Output of workers lands in the run's log.txt, on Ray as on `local`, with a crash's last lines and without secrets."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.cluster.worker_output import MAX_LOG_LINES, NUM_RECENT, WorkerOutput
from rlcore.testing.runs import run_settings

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("machine"),
    NEEDS_RAY,
]

DEADLINE_S = 90.0
PLUGIN = '''
"""A rollout replica that talks, and crashes once, below Python."""
RLCORE_API = "1"

import logging, os, sys

from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullReplica


class Talker(NullReplica):
    def setup(self):
        super().setup()
        if "RLCORE_TEST_ENGINE" in os.environ:
            os.write(2, b"(Engine pid=7) ERROR core.py: ImportError: no module 'an_engine'\\n")
            raise RuntimeError("the engine failed; see root cause above")
        print("printed while it was set up")
        logging.getLogger("a library").warning("a logger's warning with the key %s", os.environ["RLCORE_TEST_KEY"])
        os.system("echo said by a separate process")

    async def generate(self, requests):
        mark = self.context.run_dir / "crashed"
        if not mark.exists():
            mark.touch()
            os.write(2, b"terminate called after throwing an instance of 'std::runtime_error'\\n  what():  boom\\n")
            os.abort()
        async for completion in super().generate(requests):
            yield completion

    def close(self):
        print("printed while it was closed")


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "talker", Talker, isolated=True)]
'''


def run_on(cluster: str, directory: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    """A run of one step with the plugin."""
    (directory / "talker.py").write_text(PLUGIN)
    more: dict[str, object] = {"train.name": "run", "train.max_steps": 1, "rollout.backend": "talker", **settings}
    more |= {"plugins.ray.object_store_gib": 0.1} if cluster == "ray" else {}
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", "--plugin", str(directory / "talker.py")]
    command += [f"{key}={value}" for key, value in run_settings(directory, 8, **more).items()]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("cluster", ["local", "ray"])
def test_what_a_worker_prints_and_a_crashs_last_words_are_in_the_runs_log(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_TEST_KEY", "very-secret-value")
    done = run_on(cluster, tmp_path, **{"reward.functions.letters.kwargs.letter": "${oc.env:RLCORE_TEST_KEY}"})
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "runs" / "run" / "log.txt").read_text()
    for line, times in {
        "rollout[0]: printed while it was set up": 2,
        "rollout[0]: said by a separate process": 2,
        "rollout[0]: printed while it was closed": 1,
        "rollout[0]: a logger's warning with the key ${oc.env:RLCORE_TEST_KEY}": 2,
        "rollout[0]:   what():  boom": 1,
    }.items():
        assert log.count(f": {line}\n") == times, line
    [lost] = [line for line in log.splitlines() if "WARNING rlcore.cluster.replica: rollout[0]: lost (" in line]
    assert "; its last words: " in lost
    assert "terminate called after throwing an instance of 'std::runtime_error' |   what():  boom" in lost
    for name in ("config.yaml", "plan.json", "log.txt"):  # case 40
        assert "very-secret-value" not in (tmp_path / "runs" / "run" / name).read_text()
    assert "end of output" not in log
    own_words = [
        line for line in done.stdout.splitlines() if "boom" in line and not line.startswith("warning: rollout[0]")
    ]
    assert own_words == []  # the terminal has what rlcore says of the crash, and nothing the worker printed


@pytest.mark.parametrize("cluster", ["local", "ray"])
def test_the_error_of_a_worker_that_does_not_start_names_what_its_engine_printed(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLCORE_TEST_ENGINE", "broken")
    done = run_on(cluster, tmp_path)
    assert done.returncode != 0
    error = (
        r"the engine failed; see root cause above \(\S+\.py:\d+\); it had printed: ImportError: no module 'an_engine'"
    )
    assert re.search(error, done.stderr.replace("\n", " "))


def test_lines_are_logged_within_bounds_and_frames_are_no_last_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="rlcore")
    printed = WorkerOutput("judge[1]")
    assert printed.last_words == ""
    for line in (
        "loading",
        "terminate called",
        "*** SIGABRT received at time=1 on cpu 0 ***",
        "    @     0x7f2e260a8eec  (unknown)  (unknown)",
        "[2026-01-01 00:00:00,683 E 1 2] logging.cc:474: *** SIGABRT",
        "Fatal Python error: Aborted",
        "",
        'Stack (most recent call first):\n  File "a.py", line 16 in hi',
        '  File "a.py", line 17 in ho',
        "Extension modules: numpy",
    ):
        printed.add(line, is_error=True)
    printed.add("on stdout, whenever that was")
    assert printed.last_words == "; its last words: loading | terminate called | Fatal Python error: Aborted"
    printed.add("RuntimeError: CPU Generator does not use offset")
    printed.add("an answer to (builtins.TypeError: no such thing)")
    for _ in range(NUM_RECENT - 2):
        printed.add("  and more of the traceback")
    exceptions = "RuntimeError: CPU Generator does not use offset | an answer to (builtins.TypeError: no such thing)"
    assert printed.last_words == f"; its last words: Fatal Python error: Aborted | {exceptions}"
    printed.add("one more")
    assert "RuntimeError" not in printed.last_words, "long ago"
    for number in range(4):
        printed.add(f"WARNING: again, after ConnectionError: {number}")
    printed.add("Fatal Python error: Segmentation fault", is_error=True)
    assert printed.last_words == (
        "; its last words: WARNING: again, after ConnectionError: 2 | WARNING: again, after ConnectionError: 3 | "
        "Fatal Python error: Segmentation fault"
    )
    for _ in range(MAX_LOG_LINES):
        printed.add("again")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == ["judge[1]: loading", "judge[1]: terminate called"]
    assert len(messages) == MAX_LOG_LINES + 1
    assert messages[-1] == f"judge[1]: printed more than {MAX_LOG_LINES} lines; the rest is dropped"


def test_the_cause_of_an_error_is_the_last_printed_exception_that_it_does_not_name() -> None:
    printed = WorkerOutput("rollout[0]")
    assert printed.cause("it failed") == ""
    printed.add("(Engine pid=7) ERROR core.py: ValueError: too long")
    printed.add("RuntimeError: the engine failed")
    assert printed.cause("setup(): RuntimeError: the engine failed") == "; it had printed: ValueError: too long"
    assert printed.cause("ValueError: too long, RuntimeError: the engine failed") == ""


def test_a_ray_that_was_there_before_prints_no_mark_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlcore_ray import output
    from rlcore_ray.actor import END_OF_OUTPUT

    printed: list[str] = []
    monkeypatch.setattr(output.dispatcher, "handlers", [])
    monkeypatch.setattr(output.global_worker, "logger_thread", None, raising=False)
    output.dispatcher.add_handler(output.RAYS_OWN, lambda message: printed.extend(message["lines"]))
    before = list(output.dispatcher.handlers)
    ours = output.ActorOutput()
    place = output.ProcessPlace("127.0.0.1", 7)
    ours.expect(place, "rollout[0]")
    ours.join()
    for lines in (["said"], [END_OF_OUTPUT], ["more", f"rest{END_OF_OUTPUT}"]):
        output.dispatcher.emit({"ip": place.node, "pid": place.process, "lines": lines, "is_err": False})
    asyncio.run(ours.until_end([place]))
    ours.close()
    assert printed == ["said", "more", "rest"]
    assert output.dispatcher.handlers == before
