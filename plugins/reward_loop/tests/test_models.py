"""Reward model replicas: plans, routing over them, and whole runs with a tiny classifier and a judge."""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.settings import ModelSettings

from rlcore.aio import Stopwatch
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
from rlcore.errors import ConfigError, PlanError, RlcoreError, WorkerError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plugins import configure
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing.service import ScriptedService, chat_answer, serving
from rlcore.testing.tiny import write_tiny_classifier
from rlcore.train import train
from rlcore.types import FrozenDict, Lane

WHERE = "plugins.reward_loop"


def liked_by(path: Path | str, **model: Any) -> dict[str, Any]:
    return {
        "rewards": {"liked": {"kind": "model", "served_by": "reward"}},
        "models": {"reward": {"path": str(path), "tokenizer": "bytes", **model}},
    }


def test_replicas_are_a_role_of_this_plugin_in_a_separate_pool(config_of: Callable[..., dict[str, Any]]) -> None:
    plan = plan_run([config_of(**liked_by("some-model", replicas=2))], [])
    [reward] = [worker for worker in plan.workers if worker.request.role.name == "reward"]
    assert reward.request.role.interface is RewardReplica
    assert (reward.request.replicas, reward.request.pool, reward.request.isolated) == (2, "reward", True)
    assert reward.asked_by.startswith("reward 'reward_loop' of plugin 'reward_loop'")
    assert "plugin 'reward_loop'" in reward.provided_by
    assert {pool.name: pool.roles for pool in plan.pools} == {"main": ("actor", "rollout"), "reward": ("reward",)}


def test_replicas_may_share_the_main_pool(config_of: Callable[..., dict[str, Any]]) -> None:
    plan = plan_run([config_of(**liked_by("some-model", pool="main"))], [])
    assert {pool.name: pool.roles for pool in plan.pools} == {"main": ("actor", "reward", "rollout")}


def test_the_plan_shows_each_reward_with_where_it_is_scored(config_of: Callable[..., dict[str, Any]]) -> None:
    config = config_of(
        rewards={
            "liked": {"kind": "model", "served_by": "reward", "weight": 0.5},
            "helpful": {"kind": "judge", "served_by": "api", "on_failure": "abort"},
            "best": {"served_by": "api", "scope": "group"},
        },
        models={"reward": {"path": "some-model", "replicas": 2, "deadline_s": 7.0}},
        services={"api": {"urls": ["http://a/v1", "http://b/v1"], "deadline_s": 9.0}},
    )
    config["reward"] = {"functions": {"letters": {"fn": "count_letter"}}}
    plan = plan_run([config], [])
    shown = plan_to_json(plan)["rewards"]
    assert set(shown) == {"letters", "liked", "helpful", "best"}
    fields = ("kind", "served_by", "weight", "scope", "deadline_s", "on_failure")
    assert [tuple(shown[name][field] for field in fields) for name in ("liked", "helpful", "best")] == [
        ("model", "role 'reward', 2 replicas in pool 'reward'", 0.5, "sample", 7.0, "drop_sample"),
        ("judge", "http://a/v1, http://b/v1", 1.0, "sample", 9.0, "abort"),
        ("service", "http://a/v1, http://b/v1", 1.0, "group", 9.0, "drop_sample"),
    ]
    assert shown["liked"]["provided_by"] == plan.components["reward"].provided_by
    assert [component.name for component in plan.reward_components] == ["liked", "helpful", "best"]


@pytest.mark.parametrize(
    "schedule", [{"stream_minibatches": True}, {"max_staleness": 1, "on_stale": "drop"}], ids=["streaming", "drop"]
)
def test_a_reward_that_sees_the_whole_batch_cannot_be_streamed(
    config_of: Callable[..., dict[str, Any]], schedule: dict[str, Any]
) -> None:
    config = config_of(
        rewards={"best": {"served_by": "api", "scope": "batch"}},
        services={"api": {"urls": ["http://a/v1"]}},
    )
    with pytest.raises(PlanError, match=rf"rewards\.best\.scope=batch: .* but schedule\.{list(schedule)[-1]}="):
        plan_run([{**config, "schedule": schedule}], [])


def plan_on_gpus(config: dict[str, Any], gpus: int, *overrides: str) -> RunPlan:
    hooks, loaded = configure([config], ["cluster.device=cuda", *overrides], [])
    return make_plan(loaded, hooks, Facts(cpus=8, gpus=gpus))


def test_a_pool_whose_name_is_nearly_another_is_noted_in_the_plan(config_of: Callable[..., dict[str, Any]]) -> None:
    plan = plan_run([config_of(**liked_by("some-model", pool="mains"))], [])
    assert any("pool 'mains' of reward is not pool 'main'" in note for note in plan.notes)
    assert not any("is not pool" in note for note in plan_run([config_of(**liked_by("m"))], []).notes)


def test_a_pool_that_is_too_small_for_the_replicas_is_a_plan_error(config_of: Callable[..., dict[str, Any]]) -> None:
    config = config_of(**liked_by("some-model", replicas=3))
    with pytest.raises(PlanError, match=r"pool 'reward' of config .* is too small: role 'reward' .* needs 3 GPUs"):
        plan_on_gpus(config, 8, "cluster.pools.reward.gpus_per_node=2")
    with pytest.raises(PlanError, match=r"the pools need 4 GPUs \('main' 1, 'reward' 3\), the machine has 2"):
        plan_on_gpus(config, 2)
    assert {pool.name: pool.gpus for pool in plan_on_gpus(config, 4).pools} == {"main": (0,), "reward": (1, 2, 3)}


def test_two_rewards_of_one_name_are_a_config_error(config_of: Callable[..., dict[str, Any]]) -> None:
    config = config_of(**liked_by("some-model"))
    config["reward"] = {"functions": {"liked": {"fn": "count_letter"}}}
    with pytest.raises(ConfigError, match=r"rewards\.liked: reward\.functions\.liked has the same name"):
        plan_run([config], [])


class Group:
    """Three replicas without processes; `broken` ones raise, as those of a cluster do when their process dies.

    `dead` ones are known to have died, and raise at once. While `answering` is not set, requests wait at the replica
    that they were sent to.
    """

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.dead: set[str] = set()
        self.answering = asyncio.Event()
        self.answering.set()
        self.sent: list[str] = []
        self.calls: list[str] = []
        self.replicas = [self._replica(f"reward[{index}]") for index in range(3)]

    def _replica(self, name: str) -> Any:
        async def call(method: Any, *args: Any) -> Any:
            if name in self.dead:
                raise WorkerError(f"{name} is being restarted")
            if method is RewardReplica.score:
                self.sent.append(name)
                await self.answering.wait()
            await asyncio.sleep(0.002)
            if name in self.broken:
                raise WorkerError(f"{name} died")
            if method is RewardReplica.health:
                return "fine"
            self.calls.append(name)
            return [RawScore(trajectory.id, float(trajectory.id)) for trajectory in args[0]]

        return Handle(name, call, self.dead)


@dataclass
class Handle:
    """A replica as the plugin sees it."""

    name: str
    call: Any
    dead: set[str]

    @property
    def alive(self) -> bool:
        return self.name not in self.dead


def request(index: int) -> ScoreRequest:
    return ScoreRequest(str(index), (FrozenDict({"role": "user", "content": "?"}),))


@contextmanager
def replicas_of(group: Group, tmp_path: Path, **settings: Any) -> Iterator[Replicas]:
    audit = CallLog(tmp_path, "all", 1000)
    model = ModelSettings(**{"path": "p", "health_s": 0.01, **settings})
    try:
        yield Replicas("reward", model, group, audit, Stopwatch())  # type: ignore[arg-type]
    finally:
        audit.close()


def test_a_replica_that_dies_mid_batch_costs_no_sample_and_returns_when_healthy(tmp_path: Path) -> None:
    group = Group()

    async def run(replicas: Replicas) -> None:
        async def ask(numbers: Sequence[int]) -> list[RawScore]:
            return list(await asyncio.gather(*(replicas.ask("liked", request(n), Lane.TRAIN) for n in numbers)))

        group.answering.clear()
        first = asyncio.create_task(ask(range(30)))
        async with asyncio.timeout(10):
            while len(group.sent) < 30:
                await asyncio.sleep(0.001)
        lost = group.sent.count("reward[1]")
        assert 0 < lost < 30
        group.broken.add("reward[1]")
        group.answering.set()
        assert [sample.score for sample in await first] == list(range(30))
        assert replicas.num_in_flight == 0
        assert all(not target.calls for target in replicas.router.targets)
        counts = replicas.take_counts()
        assert (counts["ejected"], counts["num_ejections"], counts["num_retries"]) == (1.0, 1.0, lost)
        group.broken.clear()
        async with asyncio.timeout(10):
            while replicas.router.num_ejected:
                await asyncio.sleep(0.01)
        group.calls.clear()
        await ask(range(30))
        assert "reward[1]" in group.calls  # how many go to each depends on how long the others took
        await replicas.close()

    with replicas_of(group, tmp_path) as replicas:
        asyncio.run(run(replicas))


def test_replicas_that_died_before_cost_a_request_no_try(tmp_path: Path) -> None:
    group = Group()
    group.dead.update({"reward[0]", "reward[1]"})
    scores: list[float | None] = []

    async def run(replicas: Replicas) -> None:
        group.broken.add("reward[2]")
        asking = asyncio.create_task(replicas.ask("liked", request(1), Lane.TRAIN))
        async with asyncio.timeout(10):
            while replicas.router.num_ejected < 3:
                await asyncio.sleep(0.001)
        group.broken.clear()  # its failure was a try; the dead ones, which were chosen before it, cost none
        scores.append((await asking).score)
        await replicas.close()

    with replicas_of(group, tmp_path) as replicas:
        asyncio.run(run(replicas))
    assert (scores, group.sent) == ([1.0], ["reward[2]", "reward[2]"])


def test_without_a_healthy_replica_a_sample_fails_by_its_deadline(tmp_path: Path) -> None:
    group = Group()
    group.broken = {replica.name for replica in group.replicas}

    async def run(replicas: Replicas) -> None:
        with pytest.raises(
            NoAnswer, match=r"model 'reward': reward\[\d\] died; the try before that: reward\[\d\] died"
        ):
            await replicas.ask("liked", request(1), Lane.TRAIN)
        await asyncio.sleep(0.02)
        with pytest.raises(NoAnswer, match=r"died"):
            await replicas.ask("liked", request(2), Lane.TRAIN)
        assert replicas.num_in_flight == 0
        await replicas.close()

    with replicas_of(group, tmp_path, deadline_s=0.1) as replicas:
        asyncio.run(run(replicas))


def test_the_one_replica_that_fails_twice_is_reported_so(tmp_path: Path) -> None:
    group = Group()
    del group.replicas[1:]
    answers = iter(["died", "has no memory left"])

    async def call(method: Any, *args: Any) -> Any:
        if method is RewardReplica.health:
            return "fine"
        error = WorkerError(f"reward[0] {next(answers)}")
        error.offered_by = "Judge of plugin 'x' (x 1.0)"
        raise error

    group.replicas[0].call = call

    async def run(replicas: Replicas) -> None:
        offer = "; its class is Judge of plugin 'x' (x 1.0)"
        message = f"model 'reward': reward[0] has no memory left{offer}; the try before that: reward[0] died{offer}"
        with pytest.raises(NoAnswer, match=f"^{re.escape(message)}$"):
            await replicas.ask("liked", request(1), Lane.TRAIN)
        await replicas.close()

    with replicas_of(group, tmp_path) as replicas:
        asyncio.run(run(replicas))


def expected_score(path: Path, conversation: str) -> float:
    """The model's output for one row by itself, by transformers alone."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([list(conversation.encode())])).logits[0, 0])


def judged(service: ScriptedService) -> dict[str, Any]:
    return {
        "rewards": {
            "liked": {"kind": "model", "served_by": "reward"},
            "helpful": {"kind": "judge", "served_by": "api", "weight": 0.1, "judge": {"model": "grader"}},
        },
        "services": {"api": {"urls": [f"{service.url}/v1"]}},
    }


@pytest.mark.real
def test_a_reward_model_in_its_own_pool_and_a_judge_reward_a_whole_run(
    config_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = write_tiny_classifier(tmp_path / "classifier")
    model = {"path": str(path), "tokenizer": "bytes", "replicas": 2, "threads": 1}
    with serving(lambda call: chat_answer('{"score": 7}')) as service:
        config = config_of(**judged(service), models={"reward": model})
        config["reward"] = {"functions": {"letters": {"fn": "count_letter", "children": 1}}}
        result = train(config)
    assert len(service.calls) == 16
    for step in (1, 2):
        rows = list(metrics.read_trajectories(result.run_dir, step))
        assert [row["status"] for row in rows] == ["ok"] * 8
        for row in rows:
            parts = row["components"]
            assert parts["helpful"] == 7.0
            assert row["score"] == pytest.approx(parts["liked"] + 0.7 + parts["letters"], rel=1e-5)
    row = rows[0]
    conversation = f"user: Say something, number {row['answer']}.\nassistant: {row['completion']}\n"
    assert rows[0]["components"]["liked"] == pytest.approx(expected_score(path, conversation), abs=1e-4)


@pytest.mark.real
def test_a_model_that_does_not_load_stops_the_run_and_names_the_role_and_the_model(
    config_of: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama", "num_labels": 1}')
    with pytest.raises(RlcoreError, match=r"reward\[0\].*reward model '.*broken' cannot be loaded") as raised:
        train(config_of(**liked_by(tmp_path / "broken")))
    assert isinstance(raised.value, (WorkerError, PlanError))
