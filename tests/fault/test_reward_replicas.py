"""Reward replicas in separate processes: killed in the middle of a run, and together with an agent in another pool."""

import asyncio
import contextlib
import importlib
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.runtime.launch import Runtime, launch
from rlcore.testing import write_prompts
from rlcore.testing.leaks import descendants
from rlcore.testing.packages import importable
from rlcore.testing.rewards import make_trajectory, score_all
from rlcore.testing.service import chat_answer, serving
from rlcore.testing.tiny import write_tiny_classifier
from rlcore.train import train
from rlcore.types import Lane, RewardStatus, ScoredTrajectory

pytestmark = [pytest.mark.fault, pytest.mark.timeout(500)]

PLUGIN = '''
import asyncio, os

from rlcore import RawScore, RewardReplica, WorkerClass, hookimpl

RLCORE_API = "1"

class WhoReplica(RewardReplica):
    """Answers with the id of its process."""

    def setup(self):
        pass

    async def score(self, requests):
        held = self.context.run_dir / f"held {os.getpid()}"
        if held.exists():
            held.with_name("a call is held").touch()
            await asyncio.sleep(3600)
        await asyncio.sleep(0.05)
        return [RawScore(request.id, float(os.getpid())) for request in requests]

    async def health(self):
        return "fine"

@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RewardReplica, "who", WhoReplica)]
'''


def config_of(tmp_path: Path, plugin: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
        "plugins": {"null": {}, "reward_loop": plugin},
    }


def pids(scored: list[ScoredTrajectory]) -> set[int]:
    return {int(sample.reward.components["liked"]) for sample in scored}


def test_a_replica_that_is_killed_mid_batch_costs_no_sample_and_serves_again(tmp_path: Path) -> None:
    """Scorecard case 7, for the replicas of a reward model."""
    (tmp_path / "who.py").write_text(PLUGIN)
    plugin = {
        "rewards": {"liked": {"kind": "model", "served_by": "reward"}},
        "models": {"reward": {"path": "none", "backend": "who", "replicas": 3, "health_s": 0.1}},
    }
    plan = plan_run([config_of(tmp_path, plugin)], [], [str(tmp_path / "who.py")])
    samples = [make_trajectory(index // 4, index % 4) for index in range(60)]

    async def until(found: Callable[[list[ScoredTrajectory]], bool], score: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not found(await score()):
                await asyncio.sleep(0.1)

    async def run() -> None:
        async with launch(plan, tmp_path / "run") as live:
            first = await score_all(live.reward, samples, Lane.TRAIN)
            assert len(pids(first)) == 3
            victim = min(pids(first))
            (tmp_path / "run" / f"held {victim}").touch()
            pending = asyncio.create_task(score_all(live.reward, samples, Lane.TRAIN))
            async with asyncio.timeout(60):
                while not (tmp_path / "run" / "a call is held").exists():
                    await asyncio.sleep(0.01)
            os.kill(victim, signal.SIGKILL)
            second = await pending
            assert [sample.reward.status for sample in second] == [RewardStatus.OK] * 60
            assert len({sample.trajectory.id for sample in second}) == 60
            assert victim not in pids(second)
            numbers = live.reward.metrics()
            assert numbers["reward/num_ejections"] >= 1
            assert numbers["reward/num_retries"] >= 1
            await until(lambda scored: len(pids(scored)) == 3, lambda: score_all(live.reward, samples, Lane.TRAIN))
            assert live.reward.metrics()["reward/ejected"] == 0.0

    asyncio.run(run())


def test_a_replica_that_is_frozen_is_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "who.py").write_text(PLUGIN)
    model = {"path": "none", "backend": "who", "replicas": 2, "health_s": 0.1, "deadline_s": 4}
    plugin = {"rewards": {"liked": {"kind": "model", "served_by": "reward"}}, "models": {"reward": model}}
    config = config_of(tmp_path, plugin) | {"reward": {"error_budget_frac": 1}}
    plan = plan_run([config], [], [str(tmp_path / "who.py")])
    samples = [make_trajectory(index // 4, index % 4) for index in range(40)]

    async def run() -> None:
        async with launch(plan, tmp_path / "run") as live:
            before = pids(await score_all(live.reward, samples, Lane.TRAIN))
            victim = min(before)
            os.kill(victim, signal.SIGSTOP)
            found = await score_all(live.reward, samples, Lane.TRAIN)
            assert RewardStatus.FAILED in {sample.reward.status for sample in found}, "its calls reach the deadline"
            async with asyncio.timeout(60):
                while len(now := pids(await score_all(live.reward, samples, Lane.TRAIN))) < 2:
                    await asyncio.sleep(0.1)
            assert victim not in now
            assert not Path(f"/proc/{victim}").exists()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    [lost] = [record.message for record in caplog.records if "lost (" in record.message]
    assert re.match(r"reward\[\d\]: lost \(health checks fail for \d+ s, longer than ", lost)
    assert lost.endswith(" plugins.reward_loop.models.reward.deadline_s=4: no sign of life); it is being restarted")


def test_an_agent_a_reward_model_in_another_pool_and_a_judge_train_together(tmp_path: Path) -> None:
    """The composition that crashed at start in the system this replaces, through make_plan and launch."""
    path = write_tiny_classifier(tmp_path / "classifier")
    with serving(lambda call: chat_answer('{"score": 7}')) as service:
        plugin = {
            "rewards": {
                "liked": {"kind": "model", "served_by": "reward"},
                "helpful": {"kind": "judge", "served_by": "api", "weight": 0.1, "judge": {"model": "grader"}},
            },
            "models": {"reward": {"path": str(path), "tokenizer": "bytes", "replicas": 2, "threads": 1}},
            "services": {"api": {"urls": [f"{service.url}/v1"]}},
        }
        config = config_of(tmp_path, plugin)
        (tmp_path / "tools.py").write_text('def now() -> str:\n    """The time."""\n    return "noon"\n')
        config["plugins"]["agent_loop"] = {"tools": {"now": {"fn": f"{tmp_path / 'tools.py'}:now"}}}
        plan = plan_run([config], [])
        assert {pool.name: pool.roles for pool in plan.pools} == {"main": ("actor", "rollout"), "reward": ("reward",)}
        assert plan.components["agent"].component.name == "agent_loop"
        result = train(config)
    rows = [row for step in (1, 2) for row in metrics.read_trajectories(result.run_dir, step)]
    assert len(rows) == 16
    for row in rows:
        assert row["components"]["helpful"] == 7.0
        assert row["score"] == pytest.approx(row["components"]["liked"] + 0.7, rel=1e-5)


FAILING = '''
from rlcore_reward_loop.models.worker import HfReplica

class FailsOnce(HfReplica):
    """A replica one of whose followers fails in its third batch, unless the file that it then writes exists."""

    def setup(self):
        super().setup()
        mark = self.context.run_dir / "failed"
        compute, self.batches = self._mesh._engine.outputs, 0

        def outputs(rows):
            self.batches += 1
            if self.context.rank == 1 and self.batches == 3 and not mark.exists():
                mark.write_text("")
                raise RuntimeError("out of luck")
            return compute(rows)

        self._mesh._engine.outputs = outputs
'''


def followers(pid: int) -> list[int]:
    """The processes of ranks, of which under `local` only they use the loopback interface, in the order of their start;
    the first one leads."""
    found = []
    for child in sorted(descendants(pid)):
        with contextlib.suppress(OSError):
            if b"GLOO_SOCKET_IFNAME=lo" in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                found.append(child)
    return found


VICTIMS = {"fails": 1, "leads": 0, "follows": 1}
"""The rank that is lost, one after the other in a run; the first fails, the others are killed."""


def test_a_replica_that_loses_one_of_its_ranks_is_restarted_as_a_whole_and_costs_no_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_classifier(tmp_path / "classifier")
    model = {"path": str(path), "tokenizer": "bytes", "threads": 1, "health_s": 0.2, "batch_tokens": 200}
    mesh = {"data_parallel": 2, "sharding": "fsdp2"}
    plugin = {
        "rewards": {"liked": {"kind": "model", "served_by": "reward"}},
        "models": {"reward": {**model, **mesh}},
    }
    plan = plan_run([config_of(tmp_path, plugin)], [])
    samples = [make_trajectory(index // 4, index % 4, text="so " * (index % 9)) for index in range(60)]

    async def lose(live: Runtime, victim: str) -> list[list[ScoredTrajectory]]:
        ranks = followers(os.getpid())
        assert len(ranks) == 2
        if victim != "fails":
            os.kill(ranks[VICTIMS[victim]], signal.SIGSTOP)  # so that calls are in flight when it dies
        live.reward.metrics()  # those from here on are of this loss
        pending = asyncio.create_task(score_all(live.reward, samples, Lane.TRAIN))
        await asyncio.sleep(0.2)
        if victim != "fails":
            os.kill(ranks[VICTIMS[victim]], signal.SIGKILL)
        async with asyncio.timeout(120):
            first = await pending
            second = await score_all(live.reward, samples, Lane.TRAIN)
        assert live.reward.metrics()["reward/num_retries"] >= 1
        assert not set(ranks) & set(followers(os.getpid()))
        return [first, second]

    async def run(plan: RunPlan) -> list[list[ScoredTrajectory]]:
        async with launch(plan, tmp_path / "run") as live:
            return [scored for victim in VICTIMS for scored in await lose(live, victim)]

    with caplog.at_level(logging.WARNING), failing_in(plan, tmp_path / "site") as started:
        results = asyncio.run(run(started))
    for scored in results:
        assert [sample.reward.status for sample in scored] == [RewardStatus.OK] * 60
    last, *others = ({sample.trajectory.id: sample.reward.score for sample in scored} for scored in reversed(results))
    assert all(found == pytest.approx(last, rel=1e-5, abs=1e-6) for found in others)
    lost = [record.message for record in caplog.records if "lost (" in record.message]
    assert len(lost) == len(VICTIMS)
    for message, (victim, rank) in zip(lost, VICTIMS.items(), strict=True):
        assert f"reward[0.{rank}]" in message
        assert ("out of luck" in message) is (victim == "fails")


@contextlib.contextmanager
def failing_in(plan: RunPlan, directory: Path) -> Iterator[RunPlan]:
    """The plan with another class for the reward model, which its processes import from the directory."""
    with importable(directory):
        (directory / "failing_replica.py").write_text(FAILING)
        cls = importlib.import_module("failing_replica").FailsOnce
        workers = [
            replace(worker, cls=cls) if worker.request.role.name == "reward" else worker for worker in plan.workers
        ]
        yield replace(plan, workers=tuple(workers))
