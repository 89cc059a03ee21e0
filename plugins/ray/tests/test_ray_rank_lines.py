"""On Ray, too, a rank that is stopped is named with the line of the other one, which waits for it in a collective; the
run completes when it continues."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.runs import run_settings

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine"), NEEDS_RAY]

DEADLINE_S = 120.0
PLUGIN = '''
"""An actor of two ranks that meet in each update over gloo; in the second one rank 1 stops, in the third one rank 0."""
import json
import os
import signal
import threading

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.testing.null import NullActor
from rlcore.types import WeightsHandle

RLCORE_API = "1"
STOPS = {2: 1, 3: 0}


class Ranked(NullActor):
    def setup(self):
        import torch.distributed as dist

        where = self.context.run_dir / f"rank_{self.context.rank}.json"
        where.write_text(json.dumps(os.getpid()))
        dist.init_process_group(
            "gloo", init_method=self.context.rendezvous, rank=self.context.rank, world_size=self.context.num_ranks
        )

    def update(self, minibatch):
        import torch
        import torch.distributed as dist

        if STOPS.get(self.num_updates + 1) == self.context.rank:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # `os.kill` may return before the stop
        dist.all_reduce(torch.ones(1))
        return super().update(minibatch)

    def weights(self, version, directory):
        if self.context.rank == 0:
            return super().weights(version, directory)
        return WeightsHandle(version, "directory", str(directory))

    async def write_snapshot(self, directory):
        if self.context.rank == 0:
            await super().write_snapshot(directory)

    def close(self):
        import torch.distributed as dist

        dist.destroy_process_group()


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(ActorWorker, "ranked", Ranked)]
'''


def settings(directory: Path) -> dict[str, Any]:
    """A run of five steps, whose calls are reported after three seconds."""
    more = {
        "actor.backend": "ranked",
        "actor.data_parallel": 2,
        "rollout.backend": "null_replica",
        "train.max_steps": 5,
        "train.name": "run",
        "cluster.stuck_s": 3,
        "cluster.threads": 1,
        "plugins.ray.object_store_gib": 0.1,
    }
    return run_settings(directory, 16, **more)


def wait_for(what: str, holds: Callable[[], bool], log: Path) -> None:
    """Return when it holds; fail with the end of the log when it does not in time."""
    ends_at = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > ends_at:
            pytest.fail(f"{what}: not within {DEADLINE_S:g} s; the log:\n{log.read_text('utf-8')[-4000:]}")
        time.sleep(0.05)


def has_text(path: Path) -> bool:
    """True for a file that is written."""
    return path.exists() and bool(path.read_text())


def is_stopped(pid: int) -> bool:
    """True for a process that got SIGSTOP and has not continued."""
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0] == "T"


def test_a_stopped_rank_is_named_and_the_run_completes_when_it_continues(tmp_path: Path) -> None:
    (tmp_path / "ranked.py").write_text(PLUGIN)
    directory = tmp_path / "runs" / "run"
    log = directory / "log.txt"
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", "--plugin", str(tmp_path / "ranked.py")]
    command += [f"{key}={value}" for key, value in settings(tmp_path).items()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:

        def runs_still() -> bool:
            assert run.poll() is None, run.communicate()[1]
            return True

        try:
            whose = [directory / f"rank_{rank}.json" for rank in (0, 1)]
            wait_for("two ranks", lambda: runs_still() and all(map(has_text, whose)), log)
            ranks = [json.loads(path.read_text()) for path in whose]
            for rank in (1, 0):
                wait_for("the stop", lambda rank=rank: runs_still() and is_stopped(ranks[rank]), log)
                who = rf"rank {rank} of 2 \(pid {ranks[rank]} on 127\.0\.0\.1\) does not answer"
                line = re.compile(rf"{who}; the other ranks are in all_reduce at \S+\.py:\d+")
                before = len(reports(log))  # on a busy machine an earlier update may have been reported, too
                wait_for("a report", lambda line=line: runs_still() and any(map(line.fullmatch, reports(log))), log)
                assert [other for other in reports(log)[before:] if f"rank {rank} of 2" not in other] == []
                os.kill(ranks[rank], signal.SIGCONT)
            _, errors = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 0, errors


def reports(log: Path) -> list[str]:
    """The ends of the lines in the log about updates that have not returned: those about their processes."""
    text = log.read_text("utf-8") if log.exists() else ""
    return re.findall(r"actor\[0\]\.update\(\) has not returned for [^;\n]*(?:; (.*))?", text)
