"""A run ended by the death of one of its actor's ranks says which, also where another rank notices it first."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.testing import write_prompts
from rlcore.testing.leaks import descendants, is_running

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180), pytest.mark.xdist_group("machine")]

DEADLINE_S = 90.0
PLUGIN = '''
"""An actor of two ranks without torch; a rank fails, as gloo would, as soon as the other is gone."""
import json
import os
import time

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.testing.leaks import is_running
from rlcore.testing.null import NullActor
from rlcore.types import WeightsHandle

RLCORE_API = "1"


class Ranked(NullActor):
    def setup(self):
        where = self.context.run_dir / f"rank_{self.context.rank}.json"
        where.write_text(json.dumps(os.getpid()))

    def update(self, minibatch):
        peer = self.context.run_dir / f"rank_{1 - self.context.rank}.json"
        for _ in range(10):
            time.sleep(0.02)
            if not is_running(json.loads(peer.read_text())):
                raise RuntimeError("connection closed by peer")
        return super().update(minibatch)

    def weights(self, version, directory):
        if self.context.rank == 0:
            return super().weights(version, directory)
        return WeightsHandle(version, "directory", str(directory))

    async def write_snapshot(self, directory):
        if self.context.rank == 0:
            await super().write_snapshot(directory)


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(ActorWorker, "ranked", Ranked)]
'''


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_the_rank_that_died_is_named_with_the_last_checkpoint(backend: str, tmp_path: Path) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    (tmp_path / "ranked.py").write_text(PLUGIN)
    run = tmp_path / "runs" / "run"
    values = [
        "model.path=none",
        "model.tokenizer=bytes",
        f"data.sources.all.path={write_prompts(tmp_path / 'prompts.jsonl', 400)}",
        "actor.backend=ranked",
        "actor.data_parallel=2",
        "rollout.backend=null_replica",
        "rollout.samples_per_prompt=2",
        "rollout.max_tokens=8",
        "reward.functions.letters.fn=count_letter",
        "train.prompts_per_step=2",
        "train.max_steps=400",
        "train.name=run",
        f"train.dir={tmp_path / 'runs'}",
        "checkpoint.every_steps=1",
        *(["plugins.ray.object_store_gib=0.1"] if backend == "ray" else []),
    ]
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", "--plugin", str(tmp_path / "ranked.py")]
    with subprocess.Popen([*command, *values], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            wait_for("a checkpoint", lambda: bool(list((run / "checkpoints").glob("step_*"))) or ended(driver))
            ranks = [json.loads((run / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
            everything = descendants(driver.pid)
            os.kill(ranks[1], signal.SIGKILL)
            _, errors = driver.communicate(timeout=60)
        finally:
            driver.kill()
    assert driver.returncode == 2, errors
    [last] = errors.strip().splitlines()[-1:]
    assert "actor[0.1]" in last, "the rank that died"
    assert "actor[0.0]" not in last
    assert "ended: " in last
    assert "closed by peer" not in last, "what its death did to the other rank is not the cause"
    saved = re.search(r"last checkpoint: (\S+/checkpoints/step_\d+), continue with --resume", last)
    assert saved is not None, last
    assert (Path(saved[1]) / "model" / "logits_V.npy").is_file()
    wait_for("the end of every process", lambda: not any(map(is_running, everything)))


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    """Return when it holds; fail when it does not in time."""
    ends_at = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < ends_at, f"{what}: not within {DEADLINE_S:g} s"
        time.sleep(0.05)


def ended(driver: "subprocess.Popen[str]") -> bool:
    """False while the run continues; fails with its last output if it has ended too early."""
    assert driver.poll() is None, driver.communicate()[1]
    return False
