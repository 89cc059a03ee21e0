"""The table of memory by phase and the refusal of a plan are one: a plan is accepted if no phase exceeds a device."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.config import LoadedConfig
from rlcore.contracts.requests import ModelFacts, ModelShape
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.colocation import plan_colocation
from rlcore.plan.device_memory import PHASES
from rlcore.plan.gathered import gathered_bytes
from rlcore.plan.machine_cards import CARDS, facts_of, machine_of
from rlcore.plan.machine_plan import memory_of_phases
from rlcore.plan.memory import CONTEXT_BYTES
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

GIB = 2**30
MODELS = {
    "0.5B": ModelFacts(494_032_768, ModelShape("qwen2", 24, 896, 4864, 128, 151936, True)),
    "7B": ModelFacts(7_615_616_512, ModelShape("qwen2", 28, 3584, 18944, 512, 152064, True)),
    "14B": ModelFacts(14_770_033_664, ModelShape("qwen2", 48, 5120, 13824, 1024, 152064, True)),
    "32B": ModelFacts(32_763_876_352, ModelShape("qwen2", 64, 5120, 27648, 1024, 152064, True)),
}
SHARDED = ("actor.sharding=fsdp2",)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "embedded": ("rollout.backend=hf",),
    "embedded, offloaded": ("rollout.backend=hf", "actor.offload=true"),
    "embedded, kept cache": ("rollout.backend=hf", "rollout.on_new_weights=continue", "schedule.max_staleness=2"),
    "separate": ("rollout.backend=null_replica", "rollout.pool=rollout"),
    "separate, reference": ("rollout.backend=null_replica", "rollout.pool=rollout", "algo.kl.placement=loss"),
    "vllm, in turns": ("rollout.backend=vllm", "plugins.vllm={}", "cluster.layout=colocated"),
    "vllm, offloaded": (
        "rollout.backend=vllm", "plugins.vllm.gpu_memory_frac=0.85", "cluster.layout=colocated", "actor.offload=true"
    ),
    "vllm, awake": (
        "rollout.backend=vllm", "plugins.vllm.gpu_memory_frac=0.4", "cluster.layout=colocated",
        "schedule.max_staleness=1",
    ),
    "vllm, lora": (
        "rollout.backend=vllm", "plugins.vllm={}", "cluster.layout=colocated", "actor.lora.enabled=true",
        "algo.kl.placement=loss",
    ),
}  # fmt: skip


def configured(*overrides: str, plugins: tuple[str, ...] = ()) -> tuple[object, LoadedConfig]:
    settings = ("actor.backend=hf", "cluster.device=cuda", "actor.dtype=bfloat16", "train.prompts_per_step=64")
    return configure([], [*SETTINGS, *settings, *overrides], ["null", *plugins])


def planned(*overrides: str, facts: Facts, plugins: tuple[str, ...] = ()) -> RunPlan:
    hooks, loaded = configured(*overrides, plugins=plugins)
    return make_plan(loaded, hooks, facts)


def table(large: RunPlan, facts: Facts) -> dict[str, dict[str, int]]:
    """The memory by phase of a plan that was made for large devices, on those of `facts`."""
    parts = (large.config, large.pools, large.workers, large.schedule, large.memory_bytes)
    return memory_of_phases(replace(large, facts=facts, colocated_roles=plan_colocation(*parts, facts)))


def most(found: dict[str, dict[str, int]]) -> int:
    return max(max(phases.values()) for phases in found.values())


def is_accepted(loaded: LoadedConfig, hooks: object, facts: Facts) -> bool:
    try:
        make_plan(loaded, hooks, facts)
    except PlanError as error:
        return "GiB" not in str(error)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_accepted_if_and_only_if_no_phase_of_its_table_exceeds_a_device(layout: str, ranks: int) -> None:
    """And if the share that an engine reserves holds the weights."""
    counts = (f"actor.data_parallel={ranks}", *(SHARDED if ranks > 1 else ()))
    replicas = () if "backend=hf" in LAYOUTS[layout][0] else (f"rollout.replicas={ranks}",)
    hooks, loaded = configured(*counts, *replicas, *LAYOUTS[layout])
    seen = set()
    for model in MODELS.values():
        large = Facts(parameters=model.parameters, shape=model.shape, gpus=2 * ranks, gpu_memory_bytes=20_000 * GIB)
        plan = make_plan(loaded, hooks, large)
        sizes = {card: facts_of(machine_of(f"1x{card}")).usable_gpu_bytes or 0 for card in CARDS}
        sizes["full"] = most(table(plan, large))
        sizes["a byte less"] = sizes["full"] - 1
        for card, size in sizes.items():
            facts = replace(large, gpu_memory_bytes=size)
            share = max(worker.request.device_frac for worker in plan.workers)
            holds = not share or int(share * size) >= 2 * (model.parameters or 0)
            fits = most(table(plan, facts)) <= size and holds
            assert is_accepted(loaded, hooks, facts) == fits, (card, table(plan, facts))
            seen.add(fits)
    assert seen == {True, False}


def single(*overrides: str, model: str = "7B", size: int = 400, plugins: tuple[str, ...] = ()) -> RunPlan:
    """A plan of few ranks on devices of `size` GiB."""
    facts = Facts(parameters=MODELS[model].parameters, shape=MODELS[model].shape, gpus=4, gpu_memory_bytes=size * GIB)
    return planned(*overrides, facts=facts, plugins=plugins)


def phases(plan: RunPlan) -> dict[str, int]:
    return memory_of_phases(plan)["main"]


def test_a_sampler_in_the_actor_holds_its_cache_and_the_actor_its_weights_and_optimizer_state() -> None:
    plan = single("rollout.backend=hf", "rollout.max_rows=4096", "rollout.max_tokens=2048", size=800)
    found = phases(plan)
    resting = CONTEXT_BYTES + 14 * 7_615_616_512
    cached = 4096 * 2048 * 28 * 2 * 512 * 2
    assert found["sample"] == plan.memory_bytes["actor"] > resting + cached, "the larger need, which is the estimate"
    assert found["sample"] > found["update"] > found["score"]


def test_an_offloaded_shard_is_on_the_device_for_passes() -> None:
    counts = ("actor.data_parallel=2", "actor.sharding=fsdp2", "rollout.backend=null_replica", "rollout.pool=rollout")
    found, plain = (phases(single(*counts, *more)) for more in (("actor.offload=true",), ()))
    shard = 7_615_616_512
    gathered = gathered_bytes(single(*counts).config.actor, MODELS["7B"], backward=False)
    assert found["sample"] == CONTEXT_BYTES
    assert found["score"] > CONTEXT_BYTES + shard + gathered
    assert plain["score"] - found["score"] == 6 * shard, "masters and moments"


JUDGED = """
from rlcore import Component, RewardReplica, Role, WorkerClass, WorkerRequest, hookimpl


class Sleeper(RewardReplica):
    def setup(self): ...

    async def score(self, requests): ...

    async def health(self): ...

    async def sleep(self): ...

    async def wake(self): ...


def judged(name):
    request = WorkerRequest(Role(name, RewardReplica), "mine", gpus=1.0, device_frac=0.5)
    return Component(name, lambda context: None, lambda config, section: [request], uses_reward_functions=True)


@hookimpl
def rlcore_reward_managers():
    return [judged("abacus"), judged("judge")]


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RewardReplica, "mine", Sleeper)]
"""


@pytest.fixture
def judges(tmp_path: Path) -> Iterator[None]:
    """A plugin with judges that start before and after the actor, and reserve half of its device."""
    with importable(tmp_path / "site") as site:
        write_package(site, "judged", JUDGED)
        yield


@pytest.mark.usefixtures("judges")
def test_a_server_that_starts_before_the_actor_is_refused_where_the_actors_start_has_no_room() -> None:
    """The judge that starts later begins when the actor has moved its weights to the host."""
    offloaded = (
        "rollout.backend=null_replica",
        "rollout.pool=rollout",
        "actor.offload=true",
        "actor.lora.enabled=true",
    )
    after, before = ((f"reward.manager={name}", *offloaded, "plugins.judged={}") for name in ("judge", "abacus"))
    assert phases(single(*after, size=31, plugins=("judged",)))["start"] <= 31 * GIB
    with pytest.raises(PlanError, match=r"^memory: device 0 needs about .* GiB while starting \(abacus 14\.5, actor "):
        single(*before, size=28, plugins=("judged",))


@pytest.mark.usefixtures("judges")
def test_a_sampler_in_the_actor_is_counted_next_to_a_judge_that_is_awake() -> None:
    cached = ("rollout.backend=hf", "rollout.max_rows=4096", "rollout.max_tokens=2048", "reward.manager=judge")
    found = phases(single(*cached, size=1300, plugins=("judged",)))
    assert found["sample"] > 650 * GIB + 14 * 7_615_616_512 + 4096 * 2048 * 28 * 2 * 512 * 2
    assert found["update"] < 200 * GIB
    with pytest.raises(PlanError, match=r"device 0 needs about \d+\.\d GiB while serving \(actor \d+\.\d, judge "):
        single(*cached, size=1000, plugins=("judged",))


def test_every_phase_has_its_column() -> None:
    assert set(phases(single("rollout.backend=hf"))) == set(PHASES)


def test_an_engine_reserves_at_least_what_its_weights_take() -> None:
    lora = (
        "rollout.backend=vllm",
        "rollout.pool=rollout",
        "actor.lora.enabled=true",
        "plugins.vllm.gpu_memory_frac=0.6",
    )
    with pytest.raises(PlanError) as caught:
        single(*lora, model="14B", size=40)
    assert str(caught.value).startswith(
        "role 'rollout' reserves 24.0 GiB of a device, and its weights take 27.5 there; "
    )
    assert "the share that VllmRollout of plugin 'vllm'" in str(caught.value)
    for fits in (
        "plugins.vllm.gpu_memory_frac=0.7",
        "plugins.vllm.tensor_parallel=2",
        "plugins.vllm.options.quantization=fp8",
    ):
        assert single(*lora, fits, model="14B", size=40).device_bytes["rollout"]["training"] > 20 * GIB


def test_the_host_memory_of_all_nodes_counts_where_that_of_all_ranks_is_needed() -> None:
    nodes, host = (facts_of(machine_of(name)) for name in ("4x8xH100-80GB", "1x32xH100-80GB"))
    assert nodes.memory_bytes == host.memory_bytes
