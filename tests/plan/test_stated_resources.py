"""An offer of a worker class states its resources: a stranger's engine is planned, shown and refused like ours."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlcore import PlanError, PluginError, RlcoreError
from rlcore.cli import console as cli_console
from rlcore.cli.plan import show
from rlcore.contracts.requests import ModelShape
from rlcore.plan import Facts, RunPlan, make_plan, plan_to_json
from rlcore.plan.memory import CONTEXT_BYTES
from rlcore.plan.weight_sync import plan_weights
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

ENGINE = '''
"""A tensor-parallel engine that samples, and a trainer that shards over four devices per rank."""
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlcore import (
    ActorWorker, Batch, Completion, ConfigSection, GenerateRequest, Metrics, PoolSpec, ReferenceWorker,
    RolloutWorker, RunConfig, WorkerClass, WeightsHandle, WorkerRequest, hookimpl,
)


@dataclass(frozen=True)
class Settings:
    devices: int = 2
    pool: str = "engines"
    broken: str = ""


class Engine(RolloutWorker):
    def setup(self) -> None: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        for completion in ():
            yield completion

    async def load_weights(self, handle: WeightsHandle) -> int: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Sleepless(Engine):
    sleep = RolloutWorker.sleep


class Unwakeable(Engine):
    wake = RolloutWorker.wake


class Trainer(ActorWorker):
    def setup(self) -> None: ...

    def logprobs(self, batch: Batch) -> Any: ...

    def update(self, minibatch: Batch) -> Metrics: ...

    def publish(self, version: int) -> None: ...

    def weights(self, version: int, directory: Path) -> WeightsHandle: ...

    def save(self, directory: Path) -> None: ...

    def restore(self, directory: Path) -> None: ...

    def facts(self) -> "dict[str, Any]": ...


class Frozen(ReferenceWorker):
    def setup(self) -> None: ...

    def logprobs(self, batch: Batch) -> Any: ...


def samples(config: RunConfig, section: Settings, request: WorkerRequest) -> Any:
    if section.broken == "raises":
        return 1 // 0
    if section.broken:
        return eval(section.broken, {"request": request, "replace": replace, "ActorWorker": ActorWorker})
    gpus = section.devices * request.gpus
    return replace(request, pool=section.pool, gpus=gpus, cpus=3.0, device_frac=0.7 if gpus else 0.0, threads=5)


def trains(config: RunConfig, section: Settings, request: WorkerRequest) -> WorkerRequest:
    return replace(request, gpus=4 * request.gpus, bytes_per_parameter=6.0, engine=None)


def freezes(config: RunConfig, section: Settings, request: WorkerRequest) -> WorkerRequest:
    return replace(request, pool="frozen", replicas=2, bytes_per_parameter=1.0)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("sprint", Settings)]


@hookimpl
def rlcore_resource_pools(requests: tuple[WorkerRequest, ...]) -> Sequence[PoolSpec]:
    used = {request.pool for request in requests}
    return [PoolSpec(name) for name in ("engines", "frozen") if name in used]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(ActorWorker, "sprint", Trainer, complete=trains),
        WorkerClass(ReferenceWorker, "sprint", Frozen, complete=freezes),
        WorkerClass(RolloutWorker, "sprint", Engine, isolated=True, complete=samples),
        WorkerClass(RolloutWorker, "sleepless", Sleepless, isolated=True, complete=samples),
        WorkerClass(RolloutWorker, "unwakeable", Unwakeable, isolated=True, complete=samples),
    ]
'''
STRANGER = ("rollout.backend=sprint", "plugins.sprint={}", "cluster.device=cuda")
WHO = "plugin 'sprint' (sprint 1.0)"
GIB = 2**30


@pytest.fixture(autouse=True)
def site(tmp_path: Path) -> Iterator[None]:
    with importable(tmp_path / "site") as place:
        write_package(place, "sprint", ENGINE)
        yield


def planned(*overrides: str, facts: Facts | None = None) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *STRANGER, *overrides], ["null", "sprint"])
    return make_plan(loaded, hooks, facts or Facts(cpus=8, gpus=8))


def refused(kind: type[RlcoreError], *overrides: str, facts: Facts | None = None) -> str:
    """The one line with which the plan is refused."""
    with pytest.raises(kind) as caught:
        planned(*overrides, facts=facts)
    line = str(caught.value)
    assert "\n" not in line
    return line


def shown(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of `rlcore plan`."""
    console = Console(file=io.StringIO(), width=400)
    monkeypatch.setattr(cli_console, "stdout", lambda: console)
    show(plan, origins=False)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def request_of(plan: RunPlan, role: str) -> Any:
    return next(worker.request for worker in plan.workers if worker.request.role.name == role)


def test_a_tensor_parallel_engine_states_devices_memory_pool_cpus_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("rollout.replicas=3")
    request = request_of(plan, "rollout")
    assert (request.gpus, request.replicas, request.pool, request.device_frac) == (2.0, 3, "engines", 0.7)
    assert (request.cpus, request.threads, request.isolated) == (3.0, 5, True)
    assert {pool.name: (pool.gpus, pool.provided_by) for pool in plan.pools} == {
        "engines": ((0, 1, 2, 3, 4, 5), WHO),
        "main": ((6,), "plugin 'core' (rlcore 0.1.0)"),
    }
    table = shown(plan, monkeypatch)
    assert "3 x 1 x 2 GPUs" in table
    assert "70% of a device" in table
    assert plan_to_json(plan)["workers"]["rollout"]["device_frac"] == 0.7


def test_an_actor_of_four_devices_per_rank_and_a_reference_state_theirs() -> None:
    more = ("actor.backend=sprint", "algo.kl.placement=loss", "reference.backend=sprint", "rollout.replicas=1")
    facts = Facts(cpus=8, gpus=8, parameters=10**9, gpu_memory_bytes=80 * GIB)
    plan = planned(*more, "plugins.sprint.devices=1", facts=facts)
    assert {worker.request.role.name: (worker.request.pool, worker.request.gpus) for worker in plan.workers} == {
        "actor": ("main", 4.0),
        "reference": ("frozen", 1.0),
        "rollout": ("engines", 1.0),
    }
    assert request_of(plan, "reference").replicas == 2
    assert plan.memory_bytes == {"actor": 6 * 10**9 + CONTEXT_BYTES, "reference": 10**9 + CONTEXT_BYTES}
    assert not any("the memory of" in note for note in plan.notes), "the rollout states a share of its device"
    assert plan.device_bytes["engines"] == {"training": int(0.7 * 80 * GIB) + CONTEXT_BYTES}
    two = planned(*more, "plugins.sprint.devices=1", "actor.data_parallel=2", facts=Facts(cpus=8, gpus=11))
    assert next(pool.gpus_per_node for pool in two.pools if pool.name == "main") == 8


def test_what_is_stated_for_a_gpu_holds_on_a_cpu_without_one() -> None:
    plan = planned("cluster.device=cpu", facts=Facts(cpus=2))
    request = request_of(plan, "rollout")
    assert (request.gpus, request.device_frac, request.pool) == (0.0, 0.0, "engines")


@pytest.mark.slow
def test_too_few_devices_are_refused_with_role_class_and_both_numbers() -> None:
    line = refused(PlanError, "rollout.replicas=4", "cluster.layout=split")
    assert "the pools need 9 GPUs ('engines' 8, 'main' 1), the machine has 8" in line
    line = refused(PlanError, "rollout.replicas=2", "cluster.pools.engines.gpus_per_node=3")
    assert "pool 'engines' of config (cluster.pools) is too small: role 'rollout' of core needs 4 GPUs" in line
    assert line.endswith(f"the pool has 3; its class is Engine of {WHO}")
    ray = ("plugins.ray.address=10.0.0.1:6379", "cluster.pools.engines={nodes: 2, gpus_per_node: 5}")
    line = refused(PlanError, *ray, "rollout.replicas=5")
    assert "needs 10 GPUs (5 replicas x 1 ranks x 2), the pool has 10 on 2 nodes, each of which needs 6" in line
    ray = ("plugins.ray.address=10.0.0.1:6379", "cluster.pools.engines={nodes: 2, gpus_per_node: 1}")
    line = refused(PlanError, *ray)
    assert "has 1 GPUs on each of its 2 nodes, and a rank of role 'rollout' needs 2" in line
    assert f"choose at most 1 devices for each, and more replicas or ranks; its class is Engine of {WHO}" in line
    line = refused(PlanError, "actor.backend=sprint", "cluster.pools.main.gpus_per_node=2")
    assert "pool 'main' of config (cluster.pools) is too small: role 'actor' of core needs 4 GPUs" in line
    assert f"its class is Trainer of {WHO}" in line


def test_a_pool_that_was_asked_for_is_not_replaced_by_the_class() -> None:
    line = refused(PlanError, "rollout.pool=mine")
    assert "role 'rollout' of core asks for pool 'mine', but sprint.Engine" in line
    assert f"of {WHO} states pool 'engines'; needs one pool" in line
    assert planned("rollout.pool=engines", "cluster.pools.engines.gpus_per_node=2").pools[0].roles == ("rollout",)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("raises", "ZeroDivisionError"),
        ("None", "returned None; needs the WorkerRequest that it was given, completed"),
        ("(request,)", "needs the WorkerRequest"),
        ("replace(request, role=type(request.role)('actor', request.role.interface))", "changed role from"),
        ("replace(request, role=type(request.role)('rollout', ActorWorker))", "changed role from"),
        ("replace(request, backend='vllm')", "changed backend from 'sprint' to 'vllm'"),
        ("replace(request, isolated=False)", "changed isolated from True to False"),
        ("replace(request, replicas=0)", "replicas is 0; needs a whole number of at least 1"),
        ("replace(request, gpus=-1.0)", "gpus"),
        ("replace(request, gpus=1.5)", "gpus is 1.5; needs a share of one device, or a whole number of them"),
        ("replace(request, device_frac=1.5)", "device_frac"),
        ("replace(request, cached_tokens=-1)", "cached_tokens"),
    ],
)
def test_garbage_from_complete_is_refused_with_offer_and_provider(broken: str, message: str) -> None:
    line = refused(PluginError, f'plugins.sprint.broken="{broken}"')
    assert f"{WHO}: complete() of sprint.Engine for role 'rollout'" in line
    assert message in line


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ("complete=None", "complete is None; needs a function of (config, section, request)"),
        (
            "complete=lambda config, request: request",
            "complete takes (config, request), needs (config, section, request)",
        ),
        ("weight_sync='disk'", "weight_sync is 'disk'; needs a frozenset of: disk, ipc, nccl, shm, tcp"),
        ("weight_sync=frozenset({'pigeon'})", "needs a frozenset of: disk, ipc, nccl, shm, tcp"),
    ],
)
def test_an_offer_that_states_no_such_thing_is_refused(tmp_path: Path, offer: str, message: str) -> None:
    source = f"""
    from rlcore import RolloutWorker, WorkerClass, hookimpl

    class Mine(RolloutWorker):
        def setup(self): ...

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(RolloutWorker, "mine", Mine, {offer})]
    """
    write_package(tmp_path / "site", "odd", source)
    with pytest.raises(PluginError) as caught:
        configure([], [*SETTINGS, "plugins.odd={}"], ["null"])[0].worker_classes()
    assert "plugin 'odd' (odd 1.0): rlcore_worker_classes(): WorkerClass 'mine': " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "pools",
    [
        ("plugins.sprint.pool=main",),
        ("cluster.train_pool=train", "cluster.pools.train.colocates=[engines]", "plugins.sprint.pool=engines"),
    ],
    ids=["one pool", "a union"],
)
def test_who_serves_on_the_actors_devices_sleeps_or_is_refused(pools: tuple[str, ...]) -> None:
    common = (*pools, "plugins.sprint.devices=1")
    assert planned(*common).colocated_roles == ("rollout",)
    for backend, cls in (("sleepless", "Sleepless"), ("unwakeable", "Unwakeable")):
        line = refused(PlanError, *common, f"rollout.backend={backend}")
        assert f"but {cls} of {WHO} has no sleep() and wake(); choose another backend, or a pool " in line
        assert "role 'rollout' of core is in pool" in line
        assert planned(f"rollout.backend={backend}").colocated_roles == (), "devices other than the actor's"
    if "main" in pools[0]:  # they fit side by side, as far as is known
        assert planned(*common, "schedule.max_staleness=1").colocated_roles == ()
        small = Facts(cpus=2, gpus=1, gpu_memory_bytes=10 * GIB, parameters=10**8)
        assert planned(*common, "schedule.max_staleness=1", facts=small).device_bytes["main"]["training"] > 7 * GIB
        small = replace(small, parameters=2 * 10**8)
        line = refused(PlanError, *common, "schedule.max_staleness=1", facts=small)
        assert "device 0 needs about" in line
        assert "lower what rollout reserve" in line
    else:
        assert "while the actor trains rollout sleep" in refused(PlanError, *common, "schedule.max_staleness=1")


def test_in_the_actors_pool_without_gpus_there_are_no_devices_to_share() -> None:
    overrides = ("plugins.sprint.pool=main", "rollout.backend=sleepless", "cluster.device=cpu")
    assert planned(*overrides, "schedule.max_staleness=1", facts=Facts(cpus=2)).colocated_roles == ()


def test_who_computes_in_the_passes_of_a_step_shares_devices_awake() -> None:
    kl = ("algo.kl.placement=loss", "reference.backend=null")
    assert planned(*kl).colocated_roles == ()


def test_on_ray_a_rank_of_several_devices_does_not_share_them() -> None:
    kl = ("actor.backend=sprint", "algo.kl.placement=loss", "reference.backend=null", "plugins.ray={}")
    line = refused(PlanError, *kl)
    assert "role 'actor' has 4 GPUs in one process, and Ray cannot share them with 'reference' in pool 'main'" in line
    assert f"its class is Trainer of {WHO}" in line


def test_weights_come_in_a_way_that_the_class_takes() -> None:
    assert planned().weights_kind == "directory"
    line = refused(PlanError, "rollout.weight_sync=tcp")
    assert line.startswith(f"rollout.weight_sync=tcp: Engine of {WHO} does not take weights that way")
    assert line.endswith("choose from: disk")
    adapter = "replace(request, takes_adapter=True, pool='engines')"
    made = planned(f'plugins.sprint.broken="{adapter}"')
    assert made.weights_kind == "adapter"
    workers = [replace(worker, weight_sync=frozenset({"disk", "tcp"})) for worker in made.workers]
    config = replace(made.config, rollout=replace(made.config.rollout, weight_sync="tcp"))
    with pytest.raises(PlanError, match=r"^rollout\.weight_sync=tcp sends whole weights, and Engine of .* an adapter"):
        plan_weights(config, workers, made.pools, elsewhere=False)


def test_a_copy_of_weights_that_is_not_embedded_is_counted_once() -> None:
    shape = ModelShape("llama", 2, 8, 16, 4, 100, full_attention=True)
    facts = Facts(cpus=8, gpus=8, parameters=10**9, gpu_memory_bytes=80 * GIB, shape=shape)
    stated = "replace(request, pool='engines', bytes_per_parameter=2.0, cached_tokens=1)"
    held = planned(f'plugins.sprint.broken="{stated}"', facts=facts).memory_bytes["rollout"]
    assert 2 * 10**9 <= held - CONTEXT_BYTES < 2.1 * 10**9


def test_the_table_of_pools_shows_where_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ("plugins.ray.address=10.0.0.1:6379",)
    pool = "cluster.pools.engines={placement: spread, labels: {tier: fast}, resources: {magic: 2}}"
    table = shown(planned(*ray, pool, facts=Facts(cpus=2)), monkeypatch)
    assert "1 x 2 GPUs (spread, tier: fast, 2 magic per bundle)" in table
