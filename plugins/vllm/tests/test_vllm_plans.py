"""Plans with replicas on vLLM: devices, memory, pools and weights, stated once, and what is refused in one line."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_vllm import rlcore_worker_classes
from rlcore_vllm.judge import VllmJudge
from rlcore_vllm.replica import VllmReplica
from rlcore_vllm.replica_resources import complete_replica

from rlcore import ConfigError, PlanError, RewardReplica, RlcoreError, Role, WorkerContext, WorkerRequest
from rlcore.cli import main
from rlcore.contracts.reward_models import RewardModel
from rlcore.plan import RunPlan
from rlcore.testing.null import SETTINGS

Planned = Callable[..., RunPlan]
SAMPLES = "rollout.backend=vllm"


def request_of(plan: RunPlan, role: str) -> WorkerRequest:
    return next(worker.request for worker in plan.workers if worker.request.role.name == role)


def judged(**model: Any) -> dict[str, Any]:
    """Sections of a run whose reward model is on vLLM."""
    return {
        "vllm": {},
        "reward_loop": {
            "rewards": {"liked": {"kind": "model", "served_by": "judge"}},
            "models": {"judge": {"path": "some-model", "backend": "vllm", **model}},
        },
    }


def test_a_rollout_states_its_devices_memory_pool_and_weights(planned: Planned) -> None:
    more = (SAMPLES, "plugins.vllm.tensor_parallel=2", "plugins.vllm.gpu_memory_frac=0.5", "rollout.replicas=3")
    request = request_of(planned(*more), "rollout")
    assert (request.pool, request.gpus, request.replicas, request.device_frac) == ("rollout", 2.0, 3, 0.5)
    assert (request.isolated, request.embedded_in) == (True, None)
    assert planned(SAMPLES).weights_kind == "shm"
    assert planned(SAMPLES, "rollout.weight_sync=disk").weights_kind == "directory"
    assert not planned(SAMPLES).schedule.embedded
    assert planned(SAMPLES, "rollout.weight_sync=tcp").weights_kind == "tcp"
    assert planned(SAMPLES, "rollout.weight_sync=nccl").weights_kind == "nccl"
    assert planned(SAMPLES, "actor.lora.enabled=true", "plugins.vllm.lora=adapter").weights_kind == "adapter"
    assert request_of(planned(SAMPLES, "rollout.pool=mine"), "rollout").pool == "mine"


@pytest.mark.parametrize(("device", "gpus"), [("cuda", 4.0), ("cpu", 0.0)])
def test_a_replica_over_nodes_has_a_rank_on_each_with_as_many_of_its_devices(
    planned: Planned, device: str, gpus: float
) -> None:
    over_two = planned(SAMPLES, "plugins.vllm.tensor_parallel=8", "plugins.vllm.nodes=2", device=device)
    request = request_of(over_two, "rollout")
    assert (request.ranks, request.gpus, request.replicas) == (2, gpus, 1)
    on_one = request_of(planned(SAMPLES, "plugins.vllm.tensor_parallel=8", device=device), "rollout")
    assert request.bytes_per_parameter == on_one.bytes_per_parameter


@pytest.mark.parametrize(
    ("error", "overrides", "message"),
    [
        (
            ConfigError,
            ("plugins.vllm.options.tensor_parallel_size=4",),
            r"plugins\.vllm\.options\.tensor_parallel_size: found 4, but plugins\.vllm\.tensor_parallel gives an eng",
        ),
        (
            PlanError,
            ("rollout.weight_sync=tcp", "actor.lora.enabled=true", "plugins.vllm.lora=adapter"),
            "choose weight_sync=disk, or lora=merged",
        ),
        (ConfigError, ("rollout.weight_sync=tcp", "rollout.weights_dir=/dev/shm"), r"rollout\.weights_dir"),
        (PlanError, ("cluster.pools.nowhere.nodes=1",), "pool 'nowhere'"),
        (ConfigError, ("plugins.vllm.lora=adapter",), r"plugins\.vllm\.lora: set to 'adapter' .*has no effect"),
        (ConfigError, ("plugins.vllm.kv_cache_gib=1.5",), r"plugins\.vllm\.kv_cache_gib: set to .*has no effect"),
        (ConfigError, ("rollout.backend=hf", "plugins.vllm.dtype=float32"), r"plugins\.vllm\.dtype: .* no effect"),
        (ConfigError, ("plugins.vllm.tensor_parralel=2",), r"did you mean 'plugins\.vllm\.tensor_parallel'"),
        (
            ConfigError,
            ("plugins.vllm.options.pipeline_parallel_size=2",),
            r"plugins\.vllm\.options\.pipeline_parallel_size: the devices of a rollout replica are counted by",
        ),
        (
            ConfigError,
            ("plugins.vllm.options.distributed_executor_backend=ray",),
            r"distributed_executor_backend: .* its nodes by plugins\.vllm\.nodes; leave the option out, and set those",
        ),
        (
            ConfigError,
            ("plugins.vllm.tensor_parallel=4", "plugins.vllm.nodes=3"),
            r"plugins\.vllm\.nodes=3: does not divide plugins\.vllm\.tensor_parallel=4; needs as many devices on each",
        ),
        (ConfigError, ("plugins.vllm.nodes=0",), r"plugins\.vllm\.nodes: "),
        (PlanError, ("rollout.weight_sync=nccl", "rollout.pool=main"), "choose shm, tcp or disk, or cluster.layout=sp"),
        (PlanError, ("rollout.replicas=16", "cluster.layout=split"), "the pools need 17 GPUs"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(
    planned: Planned, error: type[RlcoreError], overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        planned(SAMPLES, *overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rollout.vllm.max_model_len=7", "rollout.vllm.max_model_len: now plugins.vllm.max_model_len (override"),
        ("rollout.vllm={}", "rollout.vllm: now plugins.vllm (override"),
        ("rollout.vllm.options.block_size=8", "rollout.vllm.options.block_size: now plugins.vllm.options.block_size ("),
    ],
)
def test_an_old_key_is_refused_with_the_new_one(planned: Planned, old: str, new: str) -> None:
    for plugins in ({"vllm": {}}, {}):
        with pytest.raises(ConfigError) as caught:
            planned(SAMPLES, old, plugins=plugins)
        assert str(caught.value).startswith(new)


def test_a_backend_whose_plugin_is_not_named_is_refused_with_what_to_type(planned: Planned) -> None:
    with pytest.raises(PlanError) as caught:
        planned(SAMPLES, plugins={})
    line = str(caught.value)
    assert "needs a RolloutWorker for backend 'vllm': none is offered" in line
    assert "`pip install './plugins/vllm[engine]'` in a clone of rlcore, and" in line
    assert "`rlcore train ... --plugin vllm rollout.backend=vllm`" in line
    plugins = judged()
    del plugins["vllm"]
    with pytest.raises(PlanError) as caught:
        planned(plugins=plugins)
    line = str(caught.value)
    assert "role 'judge'" in line
    assert "`rlcore train ... --plugin vllm plugins.reward_loop.models.judge.backend=vllm`" in line
    assert "\n" not in line


def test_the_command_ends_with_2_and_one_line_that_says_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for overrides, message in (
        (["rollout.backend=vllm"], "--plugin vllm rollout.backend=vllm"),
        (["rollout.backend=vllm", "rollout.vllm.dtype=float32"], "rollout.vllm.dtype: now plugins.vllm.dtype"),
    ):
        assert main(["plan", *SETTINGS, "--plugin", "null", f"train.dir={tmp_path}", *overrides]) == 2
        captured = capsys.readouterr()
        [line] = (captured.out + captured.err).strip().splitlines()
        assert message in line


def test_a_reward_model_on_transformers_needs_no_vllm(planned: Planned) -> None:
    plugins = judged(backend="hf")
    del plugins["vllm"]
    assert "HfReplica" in {worker.cls.__name__ for worker in planned(plugins=plugins).workers}


def arguments(monkeypatch: pytest.MonkeyPatch, plan: RunPlan, device: str) -> dict[str, Any]:
    """The arguments with which the replica of the plan starts its engine."""
    from rlcore_vllm import engine

    taken: dict[str, Any] = {}
    monkeypatch.setattr(engine, "open_engine", lambda arguments, who, threads: taken.update(arguments))
    reader = SimpleNamespace(max_tokens=64, arguments=dict)
    monkeypatch.setattr(VllmReplica, "_open_reader", lambda self: reader)
    spec = request_of(plan, "judge").spec
    VllmReplica(WorkerContext("judge", 0, 0, 1, None, None, {}, Path(), 0, 1, device, spec=spec)).setup()
    return taken


@pytest.mark.timeout(60)
def test_a_reward_model_whose_configuration_is_a_pipe_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    os.mkfifo(tmp_path / "config.json")
    spec = RewardModel(str(tmp_path))
    replica = VllmReplica(WorkerContext("judge", 0, 0, 1, None, None, {}, Path(), 0, 1, "cpu", spec=spec))
    with pytest.raises(RlcoreError, match=r"'config\.json' is a pipe"):
        replica.setup()
    os.mkfifo(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").unlink()
    with pytest.raises(RlcoreError, match=r"'tokenizer\.json' is a pipe"):
        VllmJudge(spec, None)


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
    planned: Planned, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], gpus: float, size: int
) -> None:
    plan = planned(plugins=judged(replicas=2, **model))
    request = request_of(plan, "judge")
    assert (request.gpus, request.device_frac) == (gpus, 0.9)
    [pool] = [pool for pool in plan.pools if pool.name == "reward"]
    assert len(pool.gpus) == max(1, 2 * gpus)
    assert arguments(monkeypatch, plan, "cuda:0")["tensor_parallel_size"] == size


def test_a_share_of_the_device_may_be_stated_and_none_is_reserved_on_a_cpu(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = judged(options={"gpu_memory_utilization": 0.4})
    plans = {device: planned(plugins=plugins, device=device) for device in ("cuda", "cpu")}
    assert {name: request_of(plan, "judge").device_frac for name, plan in plans.items()} == {"cuda": 0.4, "cpu": 0.0}
    found = arguments(monkeypatch, plans["cpu"], "cpu")
    assert "tensor_parallel_size" not in found
    assert (found["model"], found["max_model_len"], found["dtype"]) == ("some-model", 64, "float32")


def test_the_spec_of_a_reward_model_tells_the_replica_its_settings_and_who_asks_it(planned: Planned) -> None:
    plan = planned(plugins=judged(label=2, activation="sigmoid", max_tokens=99, dtype="bfloat16", tokenizer="bytes"))
    spec = request_of(plan, "judge").spec
    assert (spec.path, spec.label, spec.activation, spec.max_tokens) == ("some-model", 2, "sigmoid", 99)
    assert (spec.dtype, spec.tokenizer, spec.kinds) == ("bfloat16", "bytes", frozenset({"model"}))


@pytest.mark.parametrize(
    ("model", "message"),
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
def test_devices_of_a_reward_model_that_contradict_each_other_are_refused_in_one_line(
    planned: Planned, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        planned(plugins=judged(**model))
    assert "\n" not in str(caught.value)


def test_a_request_that_names_no_model_is_refused() -> None:
    request = WorkerRequest(Role("scorer", RewardReplica), "vllm", gpus=1.0, settings="plugins.mine")
    with pytest.raises(ConfigError, match=r"plugins\.mine: role 'scorer' has no model to serve on vLLM; .*RewardModel"):
        complete_replica(SimpleNamespace(), None, request)  # type: ignore[arg-type]


def test_both_interfaces_are_offered_and_may_be_restarted() -> None:
    offers = {offer.interface.__name__: offer for offer in rlcore_worker_classes()}
    assert offers.keys() == {"RolloutWorker", "RewardReplica"}
    assert all(offer.isolated and offer.backend == "vllm" for offer in offers.values())
