"""One GPU for actor and vLLM, planned from facts about machines that are not there; and who has the actor's values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_machines import GIB, H100, QWEN, chosen, loaded, machine, planned, write_header

from rlcore.contracts.requests import ModelShape
from rlcore.errors import PlanError
from rlcore.plan.memory import CONTEXT_BYTES

QWEN_HALF = replace(QWEN, layers=24, hidden_size=896, inner_size=4864, kv_size=128)
QWEN_3B = replace(QWEN, layers=36, hidden_size=2048, inner_size=11008, kv_size=256)
QWEN_4B = replace(QWEN, model_type="qwen3", layers=36, hidden_size=2560, inner_size=9728, kv_size=1024)
FITS = (
    ("0.5B", 1024, 494_032_768, QWEN_HALF, "awake", False, 0.15),
    ("0.5B", 8192, 494_032_768, QWEN_HALF, "awake", False, 0.45),
    ("1.5B", 1024, 1_543_714_304, QWEN, "awake", False, 0.3),
    ("1.5B", 8192, 1_543_714_304, QWEN, "in turns", False, 0.65),
    ("3B", 8192, 3_085_938_688, QWEN_3B, "in turns", False, 0.45),
    ("4B", 8192, 4_022_468_096, QWEN_4B, "in turns", True, 0.85),
)
SHARE_KEY = "plugins.vllm.gpu_memory_frac"


@pytest.mark.parametrize(("name", "response", "parameters", "shape", "way", "offload", "share"), FITS)
@pytest.mark.usefixtures("vllm")
def test_on_one_gpu_replicas_stay_awake_or_take_turns_with_the_actor_and_the_plan_says_how(
    name: str, response: int, parameters: int, shape: ModelShape, way: str, offload: bool, share: float
) -> None:
    facts = machine(1, parameters=parameters, shape=shape, gpu_free_bytes=int(79.2 * GIB), memory_bytes=256 * GIB)
    plan = planned("data.max_prompt_tokens=1024", f"rollout.max_tokens={response}", facts=facts)
    made = chosen(plan)
    assert plan.config.rollout.backend == "vllm"
    assert (plan.config.actor.offload, made.get("actor.offload", False)) == (offload, offload)
    assert plan.config.plugins["vllm"].gpu_memory_frac == made[SHARE_KEY] == share
    asleep = ("rollout",) if way == "in turns" else ()
    assert (plan.layout.name, plan.layout.roles, plan.colocated_roles) == ("colocated", ("rollout",), asleep)
    assert all(size <= 79.2 * GIB for size in plan.device_bytes["main"].values())
    reasons = {choice.key: choice.reason for choice in plan.choices}
    words = {"awake": "has room for 256 rows at their longest, and stays awake", "in turns": "at rest leave free"}
    assert words[way] in reasons[SHARE_KEY]
    assert {"awake": "fits next to the actor;", "in turns": "in turns with it;"}[way] in reasons["rollout.backend"]
    assert ("they rest in host memory" in reasons.get("actor.offload", "")) is offload
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
    rests = 14 * parameters / GIB  # weights, masters and two moments
    assert f"| {name} | {response} | {rests:.1f} GiB | {way} | {str(offload).lower()} | {share} |" in page


@pytest.mark.usefixtures("vllm")
def test_replicas_stay_awake_only_with_room_for_all_rows_next_to_an_actor_that_trains(tmp_path: Path) -> None:
    def asleep(*overrides: str, free: float = 79.0) -> tuple[str, ...]:
        facts = machine(1, gpu_memory_bytes=80 * GIB, gpu_free_bytes=int(free * GIB), memory_bytes=256 * GIB)
        return planned("rollout.max_tokens=1024", *overrides, facts=facts).colocated_roles

    assert asleep() == ()
    assert asleep(free=55) == ("rollout",), "what other processes fill is not there"
    assert asleep("actor.gradient_checkpointing=false", "actor.micro_batch_tokens=12288") == ("rollout",), (
        "the update needs the room"
    )
    assert asleep("rollout.max_rows=2048") == ("rollout",), "keys and values of all rows do"
    assert asleep("algo.kl.placement=loss", "rollout.max_rows=512", free=70) == ("rollout",), (
        "a reference is there, too"
    )
    larger = write_header(tmp_path / "larger", 20_000, 1_000_000)
    assert asleep("algo.kl.placement=loss") == ()
    assert asleep("algo.kl.placement=loss", f"reference.path={larger}") == ("rollout",), "and one may be larger"
    assert asleep(f"{SHARE_KEY}=0.85") == ("rollout",), "the user's share stands"
    offloaded = planned("actor.offload=true", "rollout.max_tokens=1024", facts=machine(1, memory_bytes=256 * GIB))
    assert offloaded.config.plugins["vllm"].gpu_memory_frac == 0.85, "an actor that leaves the device takes turns"


@pytest.mark.usefixtures("vllm")
def test_an_engine_that_sleeps_keeps_its_graphs_and_its_context() -> None:
    def training(*overrides: str) -> int:
        plan = planned("rollout.backend=vllm", f"{SHARE_KEY}=0.65", *overrides, facts=H100)
        assert plan.colocated_roles == ("rollout",)
        return plan.device_bytes["main"]["training"]

    eager = "plugins.vllm.enforce_eager=true"
    assert training() - training(eager) == 3 * GIB // 2
    actor = planned(f"{eager}", "rollout.backend=vllm", "plugins.vllm={}", facts=H100).memory_bytes["actor"]
    assert training(eager) == actor + CONTEXT_BYTES


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_what_is_chosen_for_one_gpu_is_never_refused() -> None:
    for _, _, parameters, shape, *_ in FITS:
        for free in (8, 12, 16, 24, 40, 60, 79):
            sizes = {"gpu_memory_bytes": free * GIB, "gpu_free_bytes": int((free - 0.5) * GIB)}
            facts = machine(1, parameters=parameters, shape=shape, memory_bytes=256 * GIB, **sizes)
            if loaded("rollout.max_tokens=512", facts=facts).config.rollout.backend == "vllm":
                plan = planned("rollout.max_tokens=512", facts=facts)
                assert max(plan.device_bytes["main"].values()) <= sizes["gpu_free_bytes"]
                assert plan.layout.name == "colocated"


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
def test_what_is_chosen_for_ranks_that_share_a_model_out_is_not_refused() -> None:
    settings = ("actor.data_parallel=8", "rollout.replicas=8", "actor.sharding=fsdp2", "rollout.max_tokens=512")
    shape = replace(QWEN, layers=48, hidden_size=5120, inner_size=13824, kv_size=1024)
    backends = set()
    for free in range(24, 80, 4):
        sizes = {"gpu_memory_bytes": free * GIB, "gpu_free_bytes": free * GIB}
        facts = machine(8, parameters=14_770_033_664, shape=shape, **sizes)
        backend = loaded(*settings, facts=facts).config.rollout.backend
        backends.add(backend)
        if backend == "vllm":
            assert max(planned(*settings, facts=facts).device_bytes["main"].values()) <= free * GIB
    assert backends == {"hf", "vllm"}


@pytest.mark.parametrize(
    ("overrides", "facts", "why"),
    [
        (("cluster.layout=split",), {}, "there are 1: cluster.layout=split gives replicas separate devices"),
        (("schedule.max_staleness=1",), {}, "there are 1: schedule.max_staleness=1 samples while the actor trains"),
        (("schedule.stream_minibatches=true",), {}, "there are 1: schedule.stream_minibatches=true samples while the"),
        (("rollout.replicas=2",), {}, "there are 1: rollout.replicas=2 of 1 each are 2 devices, and the actor has 1"),
        (("cluster.train_pool=mine",), {}, "there are 1: cluster.train_pool places roles in pools"),
        ((), {"parameters": None}, "is unknown, so whether they can share is unknown"),
        ((), {"gpu_memory_bytes": None, "gpu_free_bytes": None}, "is unknown, so whether they can share is unknown"),
        ((), {"gpu_free_bytes": 14 * GIB}, "it does not fit next to the 28.7 GiB that are trained (it would have 0%"),
        (("actor.offload=false",), {"gpu_free_bytes": 36 * GIB}, "and needs 17%)"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_where_replicas_cannot_take_turns_the_sampler_is_embedded_and_the_plan_says_why(
    overrides: tuple[str, ...], facts: dict[str, Any], why: str
) -> None:
    found = loaded("rollout.max_tokens=8192", *overrides, facts=machine(1, **facts))
    choice = next(choice for choice in found.choices if choice.key == "rollout.backend")
    assert choice.value == "hf"
    assert choice.reason.startswith("'vllm' needs devices in addition to the actor's 1; there are 1")
    assert why in choice.reason


@pytest.mark.usefixtures("vllm")
def test_the_users_share_and_offload_stand_and_offload_is_for_what_does_not_fit_without() -> None:
    facts = machine(1, memory_bytes=256 * GIB)
    found = loaded(f"{SHARE_KEY}=0.4", facts=facts)
    assert found.config.plugins["vllm"].gpu_memory_frac == 0.4
    assert found.config.rollout.backend == "vllm"
    assert SHARE_KEY not in chosen(found)
    large = machine(1, parameters=4_022_468_096, memory_bytes=256 * GIB)
    assert chosen(loaded("rollout.max_tokens=8192", facts=large))["actor.offload"] is True
    kept = loaded("rollout.max_tokens=8192", "actor.offload=false", facts=large)
    assert (kept.config.rollout.backend, kept.config.actor.offload) == ("hf", False)
    poor = replace(large, memory_bytes=32 * GIB)
    assert loaded("rollout.max_tokens=8192", facts=poor).config.rollout.backend == "hf", "the host has no room for it"
    with_vllm = loaded("rollout.max_tokens=8192", "rollout.backend=vllm", "plugins.vllm={}", facts=large)
    assert chosen(with_vllm)["actor.offload"] is True, "also where the user names the backend"
    assert SHARE_KEY not in chosen(loaded(facts=machine(2))), "a separate device"
    two = loaded("actor.data_parallel=2", "rollout.replicas=2", facts=machine(2, memory_bytes=256 * GIB))
    assert chosen(two)[SHARE_KEY] == 0.25


def test_a_critic_and_a_reference_have_the_actors_values_on_a_gpu() -> None:
    critic = ("critic.engine=critic_engine", "algo.preset=ppo", "plugins.critic_engine={}")
    kl = "algo.kl.placement=loss"
    found = loaded(*critic, kl)
    section, actor = found.config.plugins["critic_engine"], found.config.actor
    assert (section.dtype, section.gradient_checkpointing) == (actor.dtype, True) == ("bfloat16", True)
    assert section.micro_batch_tokens == actor.micro_batch_tokens == found.config.reference.micro_batch_tokens
    assert chosen(found)["plugins.critic_engine.dtype"] == "bfloat16"
    reasons = {choice.key: choice.reason for choice in found.choices}
    assert reasons["reference.micro_batch_tokens"] == "as actor.micro_batch_tokens"
    stated = loaded(*critic, kl, "plugins.critic_engine.dtype=float32", "reference.micro_batch_tokens=77")
    assert stated.config.plugins["critic_engine"].dtype == "float32"
    assert stated.config.reference.micro_batch_tokens == 77
    trunk = loaded(*critic, "plugins.critic_engine.trunk=actor")
    assert "plugins.critic_engine.dtype" not in chosen(trunk), "the actor's own weights have the actor's"
    on_cpu = loaded(*critic, kl, facts=machine(0)).config
    assert (on_cpu.plugins["critic_engine"].dtype, on_cpu.reference.micro_batch_tokens) == ("float32", 8192)


@pytest.mark.usefixtures("vllm")
def test_a_step_with_few_rows_needs_a_cache_of_these_rows_only() -> None:
    """64 rows halfway through a response of 32 768 tokens take 31 GiB of keys and values, four take 2."""

    def backend(*rows: str) -> str:
        facts = machine(1, gpu_free_bytes=50 * GIB)
        found = loaded(
            "rollout.max_tokens=32768", "data.max_prompt_tokens=1024", "actor.offload=false", *rows, facts=facts
        )
        return found.config.rollout.backend

    assert backend("train.prompts_per_step=64") == "hf"
    assert backend("train.prompts_per_step=1", "rollout.samples_per_prompt=4") == "vllm"
    assert backend("train.prompts_per_step=64", "rollout.max_rows=4") == "vllm"


def test_sdpa_is_advised_in_place_of_eager_attention_only_where_weights_and_optimizer_state_fit() -> None:
    for parameters, fits in ((3_000_000_000, True), (14_000_000_000, False)):
        settings = ("model.attention=eager", "actor.dtype=bfloat16", "rollout.max_tokens=32768")
        with pytest.raises(PlanError) as caught:
            planned(*settings, facts=replace(H100, parameters=parameters, shape=replace(QWEN, heads=12)))
        assert ("set model.attention=sdpa" in str(caught.value)) is fits
