"""Reward models on an engine over several nodes: their plans, and the ranks that have its workers. Needs no vllm."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_vllm import engine, nodes
from rlcore_vllm.replica import VllmReplica

from rlcore import ConfigError, PlanError, RawScore, ScoreRequest, WorkerContext, WorkerRequest
from rlcore.contracts.reward_models import RewardModel
from rlcore.plan import RunPlan

Planned = Callable[..., RunPlan]
ON_RAY = ("cluster.backend=ray", "plugins.ray.address=10.0.0.1:6379", "cluster.pools.reward.nodes=2")


def judged(**model: Any) -> dict[str, Any]:
    return {
        "vllm": {},
        "ray": {},
        "reward_loop": {
            "rewards": {"liked": {"kind": "model", "served_by": "judge"}},
            "models": {"judge": {"path": "some-model", "backend": "vllm", **model}},
        },
    }


def request_of(plan: RunPlan) -> WorkerRequest:
    return next(worker.request for worker in plan.workers if worker.request.role.name == "judge")


@pytest.mark.parametrize(
    ("device", "model", "gpus", "size"),
    [
        ("cuda", {"gpus": 4}, 2.0, 4),
        ("cuda", {"gpus": 4, "options": {"pipeline_parallel_size": 2}}, 2.0, 2),
        ("cuda", {"gpus": 2}, 1.0, 2),
        ("cpu", {}, 0.0, 2),
        ("cpu", {"options": {"pipeline_parallel_size": 2}}, 0.0, 1),
    ],
)
def test_a_replica_has_a_rank_on_each_node_and_its_engine_spans_them(
    planned: Planned, device: str, model: dict[str, Any], gpus: float, size: int
) -> None:
    request = request_of(planned(*ON_RAY, plugins=judged(nodes=2, replicas=2, **model), device=device))
    assert (request.replicas, request.ranks, request.gpus) == (2, 2, gpus)
    assert isinstance(request.spec, RewardModel)
    assert request.spec.options["tensor_parallel_size"] == size
    assert request.device_frac == (0.9 if gpus else 0.0)


@pytest.mark.parametrize(
    ("device", "model", "message"),
    [
        ("cuda", {"gpus": 4, "nodes": 3}, r"judge\.nodes=3: does not divide .*judge\.gpus=4; needs as many devices"),
        ("cuda", {"gpus": 1, "nodes": 2}, r"judge\.nodes=2: does not divide .*judge\.gpus=1"),
        ("cpu", {"nodes": 2, "options": {"tensor_parallel_size": 4}}, r"nodes=2 and options\.tensor_parallel_size=4 c"),
        ("cpu", {"nodes": 2, "options": {"pipeline_parallel_size": 3}}, r"3 does not divide its 2 devices \(nodes=2\)"),
        ("cuda", {"options": {"nnodes": 2}}, r"judge\.options\.nnodes: .*counted by .*judge\.nodes; leave the option"),
        ("cpu", {"options": {"master_port": 1}}, r"judge\.options\.master_port: .*counted by .*judge\.nodes"),
        ("cpu", {"backend": "hf", "nodes": 2}, r"judge\.nodes: set to 2 .* used only when .*backend != 'hf'"),
    ],
)
def test_nodes_that_contradict_another_setting_are_refused_in_one_line(
    planned: Planned, device: str, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        planned(plugins=judged(**model), device=device)
    assert "\n" not in str(caught.value)


def test_a_refusal_of_devices_on_several_nodes_names_the_setting_and_what_it_advises_is_accepted(
    planned: Planned,
) -> None:
    pool = (*ON_RAY, "cluster.pools.reward.gpus_per_node=2")
    advice = r"replicas or ranks, or plugins\.reward_loop\.models\.judge\.nodes above 1; its class"
    with pytest.raises(PlanError, match=advice):
        planned(*pool, plugins=judged(gpus=4))
    assert request_of(planned(*pool, plugins=judged(gpus=4, nodes=2))).gpus == 2.0


class FakeWorkers:
    """Stands for vLLM's workers of a node."""

    def __init__(self, arguments: dict[str, Any], who: str, threads: int) -> None:
        self.arguments, self.open = arguments, True

    async def health(self) -> str:
        return "workers"

    def close(self) -> None:
        self.open = False


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_has_an_engine_and_answers(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    opened: list[dict[str, Any]] = []

    def open_engine(arguments: dict[str, Any], who: str, threads: int) -> SimpleNamespace:
        opened.append(arguments)
        return SimpleNamespace(errored=False, shutdown=lambda: None, is_sleeping=is_sleeping)

    async def is_sleeping() -> bool:
        return False

    async def answer(engine: Any, request: ScoreRequest, number: str) -> RawScore:
        return RawScore(request.id, 1.0)

    meeting = {"nnodes": 2, "node_rank": rank, "master_addr": "a", "master_port": 1}
    monkeypatch.setattr(engine, "open_engine", open_engine)
    monkeypatch.setattr(nodes, "NodeWorkers", FakeWorkers)
    monkeypatch.setattr(nodes, "node_arguments", lambda context: meeting)
    reader = SimpleNamespace(max_tokens=64, arguments=dict, answer=answer)
    monkeypatch.setattr(VllmReplica, "_open_reader", lambda self: reader)
    spec = RewardModel("some-model", options={"tensor_parallel_size": 2})
    replica = VllmReplica(WorkerContext("judge", 0, rank, 2, None, None, {}, Path(), 0, 1, "cpu", spec=spec))  # type: ignore[arg-type]

    async def use() -> list[RawScore]:
        replica.setup()
        await replica.sleep()
        await replica.wake()
        if rank:
            assert await replica.health() == "workers"
        return await replica.score([ScoreRequest("r", ())])

    scores = asyncio.run(use())
    replica.close()
    assert [score.score for score in scores] == ([] if rank else [1.0])
    arguments = opened[0] if opened else replica._workers.arguments  # type: ignore[union-attr]
    assert len(opened) == (rank == 0)
    assert arguments.items() >= {**meeting, "tensor_parallel_size": 2, "model": "some-model"}.items()
    if rank:
        assert replica._workers is not None
        assert not replica._workers.open  # type: ignore[attr-defined]
