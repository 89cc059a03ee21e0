"""`cluster.layout`: one setting for the devices of roles that serve, on 1 and on 8 GPUs, and what contradicts it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_machines
import pytest

from rlcore.cli import main
from rlcore.contracts.requests import ModelShape
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plan.colocation import roles_on_actors_devices
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

GIB = 2**30
SHAPE = ModelShape(
    "qwen2", layers=24, hidden_size=896, inner_size=4864, kv_size=128, vocabulary=151_936, full_attention=True
)
SERVED = """
from dataclasses import replace

from rlcore import ActorWorker, Component, RewardReplica, Role, RolloutWorker, WorkerClass, WorkerRequest, hookimpl
from rlcore.contracts.offers import PoolSpec
from rlcore.testing.null import NullActor, NullReplica


class Restless(NullReplica):
    sleep, wake = RolloutWorker.sleep, RolloutWorker.wake


class Judge(RewardReplica):
    def setup(self): ...

    async def score(self, requests): ...

    async def health(self): ...

    async def sleep(self): ...

    async def wake(self): ...


def on_devices(config, section, request):
    return replace(request, pool=config.rollout.pool or "rollout", device_frac=section_frac(config))


def section_frac(config):
    return config.rollout.warn_logprob_diff if config.cluster.device == "cuda" else 0.0


def asks(config, section):
    gpus = 1.0 if config.cluster.device == "cuda" else 0.0
    return [WorkerRequest(Role("judge", RewardReplica), "mine", pool="reward", gpus=gpus, device_frac=0.1 * gpus)]


def asks_for_main(config, section):
    return [replace(request, pool="main") for request in asks(config, section)]


@hookimpl
def rlcore_reward_managers():
    judges = {"judged": asks, "judged_in_main": asks_for_main}
    return [Component(name, lambda context: None, ask, uses_reward_functions=True) for name, ask in judges.items()]


@hookimpl
def rlcore_resource_pools(requests):
    return [PoolSpec(name) for name in {"reward"} & {request.pool for request in requests}]


@hookimpl
def rlcore_worker_classes():
    return [
        WorkerClass(ActorWorker, "mine", NullActor),
        WorkerClass(RolloutWorker, "mine", NullReplica, isolated=True, complete=on_devices),
        WorkerClass(RolloutWorker, "restless", Restless, isolated=True, complete=on_devices),
        WorkerClass(RewardReplica, "mine", Judge, isolated=True),
    ]
"""
STATED = ("actor.dtype=float32", "actor.gradient_checkpointing=false", "actor.micro_batch_tokens=2048")
"""The backend that would be chosen by the device otherwise."""
SAMPLES = (
    "actor.backend=mine",
    "rollout.backend=mine",
    "cluster.device=cuda",
    "rollout.warn_logprob_diff=0.5",
    *STATED,
)
EIGHT = ("actor.data_parallel=8", "rollout.replicas=8", "train.prompts_per_step=8")
COLOCATED, SPLIT = "cluster.layout=colocated", "cluster.layout=split"


@pytest.fixture(autouse=True)
def site(tmp_path: Path) -> Iterator[None]:
    with importable(tmp_path / "site"):
        write_package(tmp_path / "site", "served", SERVED)
        yield


def planned(*overrides: str, gpus: int = 1, parameters: int | None = None, gib: int | None = 80) -> RunPlan:
    """A run whose rollout reserves `rollout.warn_logprob_diff` of a device; `parameters`: of the model, if known."""
    hooks, loaded = configure([], [*SETTINGS, *SAMPLES, *overrides], ["null", "served"])
    known: dict[str, Any] = {"parameters": parameters, "shape": SHAPE} if parameters else {}
    memory = None if gib is None else gib * GIB
    return make_plan(loaded, hooks, Facts(cpus=64, gpus=gpus, gpu_memory_bytes=memory, **known))


def refused(*overrides: str, gpus: int = 8) -> str:
    with pytest.raises(PlanError) as caught:
        planned(*overrides, gpus=gpus)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def devices(plan: RunPlan) -> dict[str, int]:
    return {pool.name: len(pool.gpus) for pool in plan.pools}


@pytest.mark.parametrize(
    ("overrides", "gpus", "layout", "pools"),
    [
        pytest.param((), 1, "colocated", {"main": 1}, id="one GPU"),
        pytest.param((), 2, "split", {"main": 1, "rollout": 1}, id="two GPUs, a role each"),
        pytest.param(EIGHT, 8, "colocated", {"main": 8}, id="eight GPUs, eight ranks and eight replicas"),
        pytest.param(
            ("actor.data_parallel=4", "rollout.replicas=4", "train.prompts_per_step=8"),
            8,
            "split",
            {"main": 4, "rollout": 4},
            id="eight GPUs, four ranks and four replicas",
        ),
        pytest.param((COLOCATED,), 8, "colocated", {"main": 1}, id="colocated"),
        pytest.param((SPLIT,), 8, "split", {"main": 1, "rollout": 1}, id="split"),
        pytest.param((COLOCATED, "reward.manager=judged"), 8, "colocated", {"main": 1}, id="with a judge"),
        pytest.param(("reward.manager=judged",), 2, "colocated", {"main": 1}, id="a judge, and too few GPUs"),
        pytest.param(
            ("reward.manager=judged",), 3, "split", {"main": 1, "reward": 1, "rollout": 1}, id="a judge, and enough"
        ),
    ],
)
def test_a_layout_is_chosen_by_devices_and_counts(
    overrides: tuple[str, ...], gpus: int, layout: str, pools: dict[str, int]
) -> None:
    plan = planned(*overrides, gpus=gpus)
    assert (plan.layout.name, devices(plan)) == (layout, pools)
    roles = ("judge", "rollout") if "reward.manager=judged" in overrides else ("rollout",)
    assert plan.layout.roles == plan.colocated_roles == (roles if layout == "colocated" else ())


@pytest.mark.parametrize(
    ("overrides", "layout", "reason"),
    [
        ((), "colocated", "with separate pools the run needs 2 GPUs, the machine has 1"),
        ((COLOCATED,), "colocated", "as cluster.layout says"),
        (("rollout.pool=main",), "colocated", "as rollout.pool says"),
        (
            ("cluster.train_pool=train", "cluster.pools.train.colocates=[rollout]"),
            "colocated",
            "as cluster.pools and cluster.train_pool say",
        ),
    ],
)
def test_the_plan_shows_the_layout_and_its_reason(
    overrides: tuple[str, ...], layout: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(*overrides)
    assert plan_to_json(plan)["layout"] == {"name": layout, "roles": ["rollout"], "reason": reason}
    on_cpu = [setting for setting in (*SETTINGS, *SAMPLES, "cluster.device=cpu") if not setting.endswith("=cuda")]
    assert main(["plan", *on_cpu, "--plugin", "null", "--plugin", "served", COLOCATED]) == 0
    assert "cluster.layout=colocated is unused: no role that serves has a GPU" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("gpus", "roles", "reason"),
    [
        (2, ("judge",), "as the pool of judge says"),
        (1, ("judge", "rollout"), "with separate pools the run needs 2 GPUs, the machine has 1"),
    ],
)
def test_a_role_whose_plugin_asks_for_the_actors_pool_is_the_reason_for_sharing(
    gpus: int, roles: tuple[str, ...], reason: str
) -> None:
    layout = planned("reward.manager=judged_in_main", gpus=gpus).layout
    assert (layout.name, layout.roles, layout.reason) == ("colocated", roles, reason)


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ((SPLIT, "rollout.pool=main"), "cluster.layout=split: role 'rollout' of core is in pool 'main', and the actor"),
        (
            (SPLIT, "cluster.train_pool=train", "cluster.pools.train.colocates=[rollout]"),
            "(union 'train' of config (cluster.pools)); give the role another pool, or set cluster.layout=colocated",
        ),
        (
            (COLOCATED, "rollout.pool=mine"),
            "cluster.layout=colocated: role 'rollout' of core is in pool 'mine' of plugin",
        ),
        (
            (COLOCATED, "cluster.pools.rollout.gpus_per_node=1"),
            "is in pool 'rollout' of config (cluster.pools), not on the devices that the actor trains on (pool 'main')"
            "; leave that pool out, make 'main' a union with it, or set cluster.layout=split",
        ),
        ((COLOCATED, "rollout.backend=restless"), "Restless of plugin 'served' (served 1.0) has no sleep() and wake()"),
    ],
)
def test_pools_that_contradict_the_layout_are_refused(overrides: tuple[str, ...], error: str) -> None:
    assert error in refused(*overrides)


def test_a_class_that_cannot_sleep_is_not_colocated_by_default() -> None:
    assert "the pools need 2 GPUs" in refused("rollout.backend=restless", gpus=1)


def test_a_union_that_the_user_has_declared_agrees_with_colocated() -> None:
    plan = planned(COLOCATED, "cluster.train_pool=train", "cluster.pools.train.colocates=[rollout]")
    assert devices(plan) == {"rollout": 1, "train": 1}
    assert plan.colocated_roles == ("rollout",)


@pytest.mark.parametrize(
    ("frac", "parameters", "gib", "awake"),
    [
        pytest.param(0.3, 500_000_000, 80, True, id="both fit"),
        pytest.param(0.8, 500_000_000, 80, False, id="the rollout reserves too much"),
        pytest.param(0.3, 3_300_000_000, 80, False, id="the actor is too large"),
        pytest.param(0.3, None, 80, False, id="a model of unknown size"),
        pytest.param(0.3, 500_000_000, None, False, id="a device of unknown size"),
    ],
)
def test_nothing_sleeps_where_both_fit_by_the_plan(
    frac: float, parameters: int | None, gib: int | None, awake: bool
) -> None:
    plan = planned(COLOCATED, f"rollout.warn_logprob_diff={frac}", parameters=parameters, gib=gib)
    assert plan.colocated_roles == (() if awake else ("rollout",))
    assert ("on the actor's devices, awake while it trains: rollout; the plan has room for both" in plan.notes) is awake
    assert roles_on_actors_devices(plan.pools, plan.workers) == ["rollout"], "whether it sleeps or not"
    if awake:
        assert plan.device_bytes["main"]["training"] <= 0.9 * 80 * GIB


def test_a_class_that_cannot_sleep_may_share_where_both_fit() -> None:
    overrides = (COLOCATED, "rollout.warn_logprob_diff=0.3", "rollout.backend=restless")
    assert planned(*overrides, parameters=500_000_000).layout.name == "colocated"


def test_offload_leaves_room_for_activations_or_the_optimizers_state() -> None:
    """10 GiB of the actor's 16 bytes per parameter are weights and gradients; activations come in the state's place."""
    whole = planned(COLOCATED, parameters=600_000_000, gib=20).device_bytes["main"]
    offloaded = planned(COLOCATED, "actor.offload=true", parameters=600_000_000, gib=20).device_bytes["main"]
    state = 8 * 600_000_000
    activations = whole["training"] - 16 * 600_000_000
    assert activations > 0
    assert whole["training"] - offloaded["training"] == min(state, activations)
    assert whole["serving"] - offloaded["serving"] == 12 * 600_000_000, "there are no gradients between updates"


def test_offload_is_advised_for_shards_too() -> None:
    hooks, loaded = configure(
        [],
        [*SETTINGS, *SAMPLES, COLOCATED, *EIGHT, "rollout.warn_logprob_diff=0.9", "actor.sharding=fsdp2"],
        ["null", "served"],
    )
    facts = Facts(cpus=64, gpus=8, gpu_memory_bytes=20 * GIB, parameters=1_000_000_000, shape=SHAPE)
    with pytest.raises(PlanError, match="while serving") as caught:
        make_plan(loaded, hooks, facts)
    assert str(caught.value).endswith(", or set actor.offload=true")


@pytest.mark.usefixtures("vllm")
def test_a_plugin_that_is_named_and_not_chosen_is_refused_with_the_reason_for_the_choice() -> None:
    with pytest.raises(PlanError) as caught:
        gpu_machines.planned("plugins.vllm={}", facts=gpu_machines.machine(1, parameters=None, shape=None))
    assert "is enabled, but nothing of it is in the plan (rollout.backend is 'hf': 'vllm' needs devices" in str(
        caught.value
    )
    assert "whether they can share is unknown)" in str(caught.value)
