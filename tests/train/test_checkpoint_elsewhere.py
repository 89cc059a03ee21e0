"""A checkpoint without weights is not published."""

from pathlib import Path

import pytest

from rlcore.errors import CheckpointError
from rlcore.plugins.planning import plan_run
from rlcore.testing.runs import run_settings
from rlcore.train import checkpoint, run_training

ELSEWHERE = """
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.testing.null import NullActor

RLCORE_API = "1"

class Elsewhere(NullActor):
    def snapshot(self):
        self.shares_directory = self.version < 2
        return super().snapshot()

    async def write_snapshot(self, directory):
        if self.shares_directory:
            await super().write_snapshot(directory)

@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(ActorWorker, "elsewhere", Elsewhere)]
"""


def test_a_checkpoint_to_which_the_actors_files_did_not_come_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    more = {
        "actor.backend": "elsewhere",
        "rollout.backend": "null_replica",
        "train.name": "run",
        "checkpoint.every_steps": 1,
        "train.max_steps": 3,
        "cluster.in_process": True,
    }
    overrides = [f"{key}={value}" for key, value in run_settings(tmp_path, 8, **more).items()]
    plan = plan_run([], overrides, ["null", str(tmp_path / "elsewhere.py")])
    with pytest.raises(CheckpointError, match="the actor has saved, and nothing is there; workers on other nodes need"):
        run_training(plan)
    newest = checkpoint.latest(tmp_path / "runs" / "run")
    assert newest is not None
    assert checkpoint.load(newest).step == 1
