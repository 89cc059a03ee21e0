"""What Ray cannot heed or place is refused when the run is planned; a checkpoint without weights is not published."""

from pathlib import Path

import pytest

from rlcore.errors import CheckpointError, ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS
from rlcore.testing.runs import run_settings
from rlcore.train import checkpoint, run_training

JOINED = ("cluster.backend=ray", "cluster.address=10.0.0.1:6379")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((*JOINED, "cluster.object_store_gib=1"), "cluster.object_store_gib: set to 1.0, which has no effect on the"),
        ((*JOINED, "cluster.dashboard=true"), "cluster.dashboard: set to True, which has no effect on the cluster at"),
        (("cluster.backend=ray", "cluster.address=127.0.0.1:99999"), "needs the host:port of a Ray head"),
        (("cluster.backend=ray", "cluster.address=127.0.0.1:0"), "needs the host:port of a Ray head"),
        (("cluster.backend=ray", "cluster.address=ray://10.0.0.1:10001"), "found 'ray://10.0.0.1:10001'; needs the"),
    ],
)
def test_settings_that_a_joined_cluster_cannot_heed_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        plan_run([], [*SETTINGS, *overrides], ["null"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "auto", "head.cluster.local:6379"])
def test_addresses_of_heads_are_taken(address: str) -> None:
    settings = [*SETTINGS, "cluster.backend=ray", f"cluster.address={address}"]
    assert plan_run([], settings, ["null"]).config.cluster.address == address


ELSEWHERE = """
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.testing.null import NullActor

RLCORE_API = "1"

class Elsewhere(NullActor):
    def save(self, directory):
        if self.version < 2:
            super().save(directory)

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
