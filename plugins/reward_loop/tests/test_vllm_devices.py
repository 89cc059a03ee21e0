"""The devices of a replica on vLLM are stated once, as `gpus`; the engine's tensor_parallel_size follows."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop.models.vllm_replica import VllmReplica
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings

from rlcore import ConfigError, WorkerContext
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure


def planned(config_of: Callable[..., dict[str, Any]], device: str = "cuda", **model: Any) -> RunPlan:
    """A plan with a model on vLLM, on a machine with sixteen GPUs."""
    config = config_of(
        rewards={"liked": {"kind": "model", "served_by": "judge"}},
        models={"judge": {"path": "some-model", "backend": "vllm", **model}},
    )
    hooks, loaded = configure([config], [f"cluster.device={device}"], [])
    return make_plan(loaded, hooks, Facts(cpus=8, gpus=16))


def arguments(monkeypatch: pytest.MonkeyPatch, device: str, **model: Any) -> dict[str, Any]:
    """What the replica of a model starts its engine with."""
    from rlcore.engines.vllm import engine

    taken: dict[str, Any] = {}
    monkeypatch.setattr(engine, "open_engine", lambda given, who, threads: taken.update(given))
    kind = SimpleNamespace(max_tokens=64, arguments=dict)
    monkeypatch.setattr(VllmReplica, "_open_model", lambda self, section: kind)
    section = RewardLoopSettings(models={"judge": ModelSettings(path="m", backend="vllm", **model)})
    VllmReplica(WorkerContext("judge", 0, 0, 1, None, section, {}, Path(), 0, 1, device)).setup()
    return taken


@pytest.mark.parametrize(
    ("model", "gpus", "size"),
    [
        ({}, 1.0, 1),
        ({"gpus": 0.5}, 0.5, 1),
        ({"gpus": 4}, 4.0, 4),
        ({"gpus": 4, "options": {"tensor_parallel_size": 4}}, 4.0, 4),
        ({"gpus": 4, "options": {"pipeline_parallel_size": 2}}, 4.0, 2),
    ],
)
def test_the_engine_spans_the_devices_of_its_replica(
    config_of: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    gpus: float,
    size: int,
) -> None:
    plan = planned(config_of, replicas=2, **model)
    [request] = [each.request for each in plan.workers if each.request.role.name == "judge"]
    assert (request.gpus, request.device_frac) == (gpus, 0.9)
    [pool] = [each for each in plan.pools if each.name == "reward"]
    assert len(pool.gpus) == max(1, 2 * gpus)
    assert arguments(monkeypatch, "cuda:0", **model)["tensor_parallel_size"] == size


def test_a_share_of_the_device_may_be_stated_and_none_is_reserved_on_a_cpu(
    config_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"gpu_memory_utilization": 0.4}
    shares = [planned(config_of, device, options=options).workers for device in ("cuda", "cpu")]
    found = [each.request.device_frac for workers in shares for each in workers if each.request.role.name == "judge"]
    assert found == [0.4, 0.0]
    assert "tensor_parallel_size" not in arguments(monkeypatch, "cpu")


def test_an_engine_that_sleeps_is_not_put_to_sleep_again() -> None:
    """Who scores in the actor's pool is told so by the reward manager and by the run's turns."""
    told: list[str] = []

    class Engine:
        async def is_sleeping(self) -> bool:
            return told[-1:] == ["sleep"]

        async def sleep(self, level: int) -> None:
            told.append("sleep")

        async def wake_up(self) -> None:
            told.append("wake")

    async def story() -> None:
        replica = VllmReplica(WorkerContext("judge", 0, 0, 1, None, None, {}, Path(), 0, 1, "cuda:0"))
        replica.open_with(None, Engine())
        for method in (replica.sleep, replica.sleep, replica.wake, replica.wake):
            await method()

    asyncio.run(story())
    assert told == ["sleep", "wake"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"options": {"tensor_parallel_size": 2}},
            r"models\.judge: gpus=1 and options\.tensor_parallel_size=2 contradict each other; .* set .*judge\.gpus",
        ),
        ({"gpus": 4, "options": {"tensor_parallel_size": 2}}, r"gpus=4 and options\.tensor_parallel_size=2"),
        (
            {"gpus": 4, "options": {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}},
            r"gpus=4 and options\.tensor_parallel_size=4",
        ),
        ({"gpus": 3, "options": {"pipeline_parallel_size": 2}}, r"pipeline_parallel_size=2 does not divide its 3"),
        ({"gpus": 1.5}, r"models\.judge\.gpus: found 1\.5; needs a share of one device, or a whole number"),
        ({"backend": "hf", "gpus": 2}, r"gpus: found 2, and backend=hf computes on one; needs at most 1"),
    ],
)
def test_devices_that_contradict_each_other_are_refused_in_one_line(
    config_of: Callable[..., dict[str, Any]], model: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        planned(config_of, **model)
    assert "\n" not in str(caught.value)
