"""A reward model of two ranks that sleeps while two ranks of the actor train on the slots of its pool, in whole runs on
Ray and under `local`: its scores are those of one process, before and after it slept."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model

DEADLINE_S = 300.0
NUM_STEPS = 3
NUM_ROWS = 8
CLUSTERS = {"local": {"cluster.backend": "local"}, "ray": {"plugins.ray.object_store_gib": 0.1}}


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    """A run with two rewards by the same model: 'one' by one process, 'many' by two ranks that hold a shard each."""
    common = {"path": str(write_tiny_classifier(directory / "classifier")), "tokenizer": "bytes", "cpus": 0.3}
    sharded = {**common, "data_parallel": 2, "sharding": "fsdp2"}
    plugin = {
        "rewards": {name: {"kind": "model", "served_by": f"of_{name}"} for name in ("one", "many")},
        "models": {"of_one": common, "of_many": sharded},
    }
    values = run_settings(
        directory,
        16,
        **{
            "model.path": write_tiny_model(directory / "tiny"),
            "actor.backend": "hf",
            "actor.data_parallel": 2,
            "actor.sharding": "fsdp2",
            "rollout.backend": "hf",
            "rollout.samples_per_prompt": 4,
            "cluster.threads": 1,
            "cluster.train_pool": "train",
            "cluster.pools.train.colocates": "[reward]",
            "plugins.reward_loop": json.dumps(plugin),
            "train.max_steps": NUM_STEPS,
            "train.name": "run",
        },
        **more,
    )
    return {key: value for key, value in values.items() if not key.startswith("reward.functions")}


def test_with_layout_colocated_each_rank_has_the_device_of_a_rank_of_the_actor(tmp_path: Path) -> None:
    placement = pytest.importorskip("rlcore_ray.placement")
    values = settings(tmp_path, **CLUSTERS["ray"], **{"cluster.device": "cuda", "cluster.layout": "colocated"})
    unused = ("cluster.train_pool", "cluster.pools")
    overrides = [f"{key}={value}" for key, value in values.items() if not key.startswith(unused)]
    hooks, loaded = configure([], [*overrides, "actor.dtype=float32"])
    plan = make_plan(loaded, hooks, Facts(cpus=4, gpus=2))
    assert plan.colocated_roles == ("of_many", "of_one")
    slots = placement.slots_of(cluster_context(plan, tmp_path, Deadlines()))
    for role in ("actor", "of_many"):
        assert [(slot.pool, slot.bundle) for slot in slots[role]] == [("main", 0), ("main", 1)]
    assert [(slot.pool, slot.bundle) for slot in slots["of_one"]] == [("main", 0)]
    assert [bundle["GPU"] for bundle in placement.bundles_of(slots)["main"]] == [1.0, 1.0]


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("machine")
@pytest.mark.parametrize("cluster", ["local", pytest.param("ray", marks=NEEDS_RAY)])
def test_ranks_of_a_reward_model_score_as_one_process_and_sleep_while_the_actor_trains(
    tmp_path: Path, cluster: str
) -> None:
    values = settings(tmp_path, **CLUSTERS[cluster])
    command = [sys.executable, "-m", "rlcore", "train", *(f"{key}={value}" for key, value in values.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "run"
    plan = json.loads((run / "plan.json").read_text())
    assert plan["colocated_roles"] == ["of_many", "of_one"]
    assert plan["workers"]["of_many"]["ranks"] == 2
    steps = [row for row in metrics.read(run) if "reward/mean" in row]
    assert len(steps) == NUM_STEPS
    for step in steps:
        assert step["reward/failed"] == 0.0
        assert step["actor/grad_norm"] > 0.0
        assert {"time/drain_s", "time/admit_s"} <= step.keys(), "the replicas slept while the actor trained"
    rows = [
        json.loads(line)["components"]
        for path in sorted((run / "trajectories").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == NUM_STEPS * NUM_ROWS
    one, many = ([row[name] for row in rows] for name in ("one", "many"))
    assert max(one) - min(one) > 0.01
    assert ": lost (" not in (run / "log.txt").read_text("utf-8"), "a replica was restarted"
    assert many == pytest.approx(one, rel=0.0, abs=2e-6 * max(map(abs, one)))
