"""On Ray, too, the actor trains on the slots of sampler and judge while these sleep: compared with a `local` run.

Two ranks of a transformers model are trained, each in the placement group of another server; the sampler draws with
what it reads of the weights that they hand over. The third update fails.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.errors import PlanError
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]

DEADLINE_S = 140.0
PLUGIN = '''
"""Two ranks of an actor, a sampler and a judge that write down what they do, and where they are."""
import json
import sys
from pathlib import Path

from rlcore.contracts.actor import ActorWorker
from rlcore.engines.hf.worker import HfActor
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.components import Component
from rlcore.contracts.offers import PoolSpec, WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullReplica
from rlcore.types import Reward, ScoredTrajectory

RLCORE_API = "1"
JUDGE = Role("judge", RewardReplica)


def note(worker, what):
    with (worker.context.run_dir / "events").open("a") as events:
        events.write(what + "\\n")


def say_where(worker):
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        group = ray.util.placement_group_table(ray.util.get_current_placement_group())
        cpus = ray.get_runtime_context().get_assigned_resources()["CPU"]
        place = worker.context.run_dir / f"{worker.context}.json"
        place.write_text(json.dumps([group["name"], group["bundles"], cpus]))


class Actor(HfActor):
    num_updates = 0

    def setup(self):
        super().setup()
        say_where(self)

    def update(self, minibatch):
        note(self, "update")
        self.num_updates += 1
        if self.num_updates == 3:
            raise RuntimeError("the third update fails")
        return super().update(minibatch)


class Sampler(NullReplica):
    def setup(self):
        super().setup()
        say_where(self)

    async def generate(self, requests):
        note(self, "sample")
        async for completion in super().generate(requests):
            yield completion

    async def load_weights(self, handle):
        from safetensors.numpy import load_file

        note(self, "weights")
        head_VD = load_file(Path(handle.path) / "model.safetensors")["lm_head.weight"]
        self._logits_V, self._version = head_VD.sum(1)[: len(self._logits_V)].astype(float), handle.version
        return handle.version

    async def sleep(self):
        await super().sleep()
        note(self, "sampler sleeps")

    async def wake(self):
        note(self, "sampler wakes")
        await super().wake()


class Judge(RewardReplica):
    def setup(self):
        say_where(self)

    async def score(self, requests):
        note(self, "score")
        return [RawScore(request.id, float(sum(map(ord, str(request.messages))) % 7)) for request in requests]

    async def health(self):
        return "well"

    async def sleep(self):
        note(self, "judge sleeps")

    async def wake(self):
        note(self, "judge wakes")


class Judged(RewardManager):
    def __init__(self, context):
        self.group = context.workers(JUDGE)

    async def score(self, stream, lane):
        async for row in stream:
            request = ScoreRequest(str(row.id), ({"role": "assistant", "content": str(row.token_ids.tolist())},))
            [raw] = await self.group.replicas[0].call(RewardReplica.score, [request])
            yield ScoredTrajectory(row, Reward(raw.score))


@hookimpl
def rlcore_reward_managers():
    def asks(config, section):
        gpus = (2.0 if config.train.seed == 2 else 1.0) if config.cluster.device == "cuda" else 0.0
        return [WorkerRequest(JUDGE, "judged", pool="reward", gpus=gpus)]

    return [Component("judged", Judged, asks, uses_reward_functions=True)]


@hookimpl
def rlcore_resource_pools(requests):
    return [PoolSpec("reward"), PoolSpec("train", colocates=("rollout", "reward"))]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "noting", Actor),
        WorkerClass(RolloutWorker, "noting", Sampler, isolated=True),
        WorkerClass(RewardReplica, "judged", Judge, isolated=True),
    ]
'''
SLEEP, WAKE = {"sampler sleeps", "judge sleeps"}, {"sampler wakes", "judge wakes"}


def settings(directory: Path, *more: str) -> list[str]:
    """The overrides of a run in which all servers sleep in turn."""
    (directory / "noting.py").write_text(PLUGIN)
    return [
        f"model.path={directory / 'tiny'}",
        "model.tokenizer=bytes",
        f"data.sources.all.path={write_prompts(directory / 'prompts.jsonl', 8)}",
        "actor.backend=noting",
        "actor.data_parallel=2",
        "actor.lr=1e-2",
        "rollout.backend=noting",
        "rollout.check_weights_every=0",  # of another policy than the actor
        "rollout.pool=rollout",
        "rollout.samples_per_prompt=2",
        "rollout.max_tokens=4",
        "reward.manager=judged",
        "cluster.train_pool=train",
        "cluster.threads=1",
        "train.prompts_per_step=2",
        "train.max_steps=4",
        f"train.dir={directory / 'runs'}",
        "checkpoint.every_steps=1",
        *more,
    ]


def trained(directory: Path, name: str, *more: str) -> Path:
    """A run until its third update; its directory."""
    values = settings(directory, f"train.name={name}", *more)
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", str(directory / "noting.py"), *values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "actor[0].update(): RuntimeError: the third update fails" in done.stderr
    assert "checkpoints/step_2" in done.stderr
    return directory / "runs" / name


def test_ranks_train_on_the_slots_of_servers_that_sleep_meanwhile_as_under_local_bit_for_bit(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    here = trained(tmp_path, "here")
    there = trained(tmp_path, "there", "plugins.ray.object_store_gib=0.1")
    assert differing(here, there) == []
    for run in (here, there):
        check_turns((run / "events").read_text().splitlines())
        rows = [row for row in metrics.read(run) if "reward/mean" in row]
        assert len(rows) == 2
        assert all(row["actor/grad_norm"] > 0 for row in rows)
        for row in rows:
            assert {"time/drain_s", "time/admit_s"} <= row.keys()
            assert {name for name in row if name.startswith("time/pool/")} == {
                "time/pool/rollout/busy_frac",
                "time/pool/reward/busy_frac",
            }
            assert all(0.0 < row[f"time/pool/{pool}/busy_frac"] <= 1.0 for pool in ("rollout", "reward"))
    check_places(there)


def test_of_a_device_each_takes_a_part_and_a_process_with_several_is_refused(tmp_path: Path) -> None:
    placement = pytest.importorskip("rlcore_ray.placement")

    def slots(*more: str) -> dict[str, list[Any]]:
        overrides = settings(tmp_path, "cluster.device=cuda", "plugins.ray={}", *more)
        hooks, loaded = configure([], overrides, [str(tmp_path / "noting.py")])
        plan = make_plan(loaded, hooks, Facts(cpus=4, gpus=4))
        found: dict[str, list[Any]] = placement.slots_of(cluster_context(plan, tmp_path, Deadlines()))
        return found

    shared = slots()
    assert {
        role: [(value.pool, value.bundle, value.gpus, value.cpus) for value in shared[role]] for role in shared
    } == {
        "actor": [("rollout", 0, 0.5, 0.5), ("reward", 0, 0.5, 0.5)],
        "judge": [("reward", 0, 0.5, 0.5)],
        "rollout": [("rollout", 0, 0.5, 0.5)],
    }
    assert placement.bundles_of(shared) == {pool: [{"CPU": 1.0, "GPU": 1.0}] for pool in ("rollout", "reward")}
    spare = slots("cluster.pools.rollout.gpus_per_node=2", "actor.data_parallel=3", "train.prompts_per_step=3")
    assert [(value.pool, value.bundle, value.gpus, value.cpus) for value in spare["actor"]] == [
        ("rollout", 0, 0.5, 0.5),
        ("rollout", 1, 1.0, 1.0),
        ("reward", 0, 0.5, 0.5),
    ]
    with pytest.raises(PlanError, match="role 'judge' has 2 GPUs in one process, and Ray cannot share them"):
        slots("train.seed=2")


def check_turns(events: Sequence[str]) -> None:
    """Both sleep before an update, get its weights, and wake; also after the one that fails, which has no weights."""
    steps = [list(words) for is_end, words in groupby(events, lambda word: word == "weights") if not is_end]
    assert len(steps) == 3
    for number, words in enumerate(steps):
        first = 2 if number else 0
        assert set(words[:first]) == (WAKE if number else set())
        begin = min(words.index(event) for event in SLEEP)
        assert set(words[first:begin]) == {"sample", "score"}
        assert set(words[begin : begin + 2]) == SLEEP
        assert words[begin + 2 : begin + 4] == ["update", "update"], "each rank"
        assert set(words[begin + 4 :]) == (WAKE if words is steps[-1] else set())


def check_places(run: Path) -> None:
    """Two slots in all: each rank has one together with a server, and of its CPU each of the two reserves a half."""
    for pool, workers in {"rollout": ("actor[0.0]", "rollout[0.0]"), "reward": ("actor[0.1]", "judge[0.0]")}.items():
        for worker in workers:
            group, bundles, cpus = json.loads((run / f"{worker}.json").read_text())
            assert group == f"rlcore {run.name} {pool}"
            assert [bundle["CPU"] for bundle in bundles.values()] == [1.0]
            assert cpus == 0.5
