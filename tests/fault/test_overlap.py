"""With staleness, separate replicas keep sampling while the actor's device is busy with an update."""

import json
from pathlib import Path

import pytest

from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.train import run_training

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]

TIMED = """
import json, time
from pathlib import Path

from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.testing.null import NullActor

RLCORE_API = "1"

def note(kind, value):
    with (Path(__file__).parent / kind).open("a") as log:
        log.write(json.dumps(value) + "\\n")

async def arrived(completions, **columns):
    note("arrivals", time.monotonic())
    return [float(completion.count("a")) for completion in completions]

class Timed(NullActor):
    def update(self, minibatch):
        began = time.monotonic()
        time.sleep(0.5)
        found = super().update(minibatch)
        note("updates", [began, time.monotonic()])
        return found

@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(ActorWorker, "timed", Timed)]
"""


def noted(path: Path) -> list[list[float]]:
    """The notes in the file, line by line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("staleness", [0, 1])
def test_completions_arrive_during_updates_only_where_staleness_allows_it(staleness: int, tmp_path: Path) -> None:
    plugin = tmp_path / "timed.py"
    plugin.write_text(TIMED)
    more = {
        "train.name": "run",
        "train.max_steps": 4,
        "actor.backend": "timed",
        "rollout.backend": "null_replica",
        "reward.functions.letters.fn": f"{plugin}:arrived",
        "plugins.null.token_s": 0.02,
        "schedule.max_staleness": staleness,
        "checkpoint.every_steps": 0,
    }
    overrides = [f"{key}={value}" for key, value in run_settings(tmp_path, 16, **more).items()]
    result = run_training(plan_run([], overrides, ["null", str(plugin)]))
    updates = noted(tmp_path / "updates")
    meanwhile = [at for at in noted(tmp_path / "arrivals") if any(began < at < ended for began, ended in updates)]
    assert len(updates) == 4
    assert bool(meanwhile) is bool(staleness)
    oldest = [row["schedule/staleness_max"] for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert oldest == [0.0, *[float(staleness)] * 3]
    for step in range(1, 5):
        for row in metrics.read_trajectories(result.run_dir, step):
            assert all(step - 1 - staleness <= version <= step - 1 for _, version in row["versions"])
