"""The plan of a critic: shared prompts, memory, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import PlanError
from rlcore.plan import RunPlan, WorkerPlan
from rlcore.plugins.planning import plan_run
from rlcore.types import SharedPrefix


@pytest.fixture
def models(sizes: dict[str, Any], tmp_path: Path) -> Path:
    """Configurations of a llama (the policy), a qwen3, a gptj and one that is unknown."""
    for name in ("llama", "qwen3", "gptj", "strange"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**sizes, "model_type": name}))
    return tmp_path


def planned(models: Path, *overrides: str, policy: str = "llama") -> tuple[RunPlan, WorkerPlan]:
    """The plan, and the critic's part in it."""
    settings = [
        f"model.path={models / policy}",
        "model.tokenizer=bytes",
        "data.sources.all.path=p.jsonl",
        "reward.functions.letters.fn=count_letter",
        "algo.preset=ppo",
        *overrides,
    ]
    plan = plan_run([], settings, ["null", "critic_engine"])
    [critic] = [worker for worker in plan.workers if worker.request.role.name == "critic"]
    return plan, critic


def notes_on_the_critic(plan: RunPlan) -> list[str]:
    return [note for note in plan.notes if note.startswith("critic: prompts are computed once for each sample")]


def path(models: Path, name: str) -> str:
    return f"plugins.critic_engine.path={models / name}"


@pytest.mark.parametrize(
    ("name", "way"),
    [("llama", SharedPrefix.TREE), ("qwen3", SharedPrefix.TREE), ("gptj", SharedPrefix.CACHE)],
)
def test_a_critic_shares_prompts_as_its_own_model_can(models: Path, name: str, way: SharedPrefix) -> None:
    plan, critic = planned(models, path(models, name))
    assert critic.shared_prefix == way
    assert notes_on_the_critic(plan) == []


@pytest.mark.parametrize(("name", "reason"), [("strange", "not known to share"), ("nowhere", "is not known")])
def test_the_plan_says_why_a_critic_does_not_share_prompts(models: Path, name: str, reason: str) -> None:
    plan, critic = planned(models, path(models, name))
    assert critic.shared_prefix == SharedPrefix.NONE
    [note] = notes_on_the_critic(plan)
    assert reason in note


def test_the_settings_may_name_the_way(models: Path) -> None:
    for way in ("none", "cache", "tree"):
        assert planned(models, f"plugins.critic_engine.shared_prefix={way}")[1].shared_prefix == way
    with pytest.raises(PlanError, match=r"^plugins\.critic_engine\.shared_prefix=cache: .*gradient_checkpointing=true"):
        planned(
            models, "plugins.critic_engine.shared_prefix=cache", "plugins.critic_engine.gradient_checkpointing=true"
        )


def test_on_the_actors_trunk_a_cache_goes_with_the_actors_checkpointing(models: Path) -> None:
    trunk = "plugins.critic_engine.trunk=actor"
    assert planned(models, trunk, policy="gptj")[1].shared_prefix == SharedPrefix.CACHE
    checkpointing = "actor.gradient_checkpointing=true"
    assert planned(models, trunk, checkpointing, policy="gptj")[1].shared_prefix == SharedPrefix.NONE
    assert planned(models, checkpointing, policy="gptj")[1].shared_prefix == SharedPrefix.CACHE


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_ranks_of_a_critic_that_get_no_group_are_refused_also_of_another_model(models: Path, name: str) -> None:
    settings = [path(models, name), "plugins.critic_engine.data_parallel=3", "train.prompts_per_step=2"]
    with pytest.raises(PlanError, match=r"role 'critic': 3 ranks, .* or plugins\.critic_engine\.shared_prefix=none"):
        planned(models, *settings)
    assert planned(models, *settings, "plugins.critic_engine.shared_prefix=none")[1].request.ranks == 3


def test_the_memory_of_a_critic_follows_the_critics_model(sizes: dict[str, Any], models: Path) -> None:
    def bytes_of(**others: Any) -> int:
        (models / "qwen3" / "config.json").write_text(json.dumps({**sizes, **others, "model_type": "qwen3"}))
        return planned(models, path(models, "qwen3"))[0].memory_bytes["critic"]

    # A separate output layer has 100 x 8 weights; training needs a fifth more in addition.
    more = bytes_of(tie_word_embeddings=False) - bytes_of(tie_word_embeddings=True)
    assert more == pytest.approx((4 + 1.2 * 12) * 100 * 8, abs=1)
    assert "critic" not in planned(models, path(models, "nowhere"))[0].memory_bytes


def test_a_critic_on_the_actors_trunk_has_its_slices_and_its_way(models: Path) -> None:
    sliced, trunk = ("actor.data_parallel=2", "actor.context_parallel=2"), "plugins.critic_engine.trunk=actor"
    found = planned(models, *sliced, trunk)[1]
    assert (found.request.ranks, found.request.engine and found.request.engine.context_parallel) == (2, 2)
    assert planned(models, *sliced)[1].request.ranks == 1
    with pytest.raises(
        PlanError, match=r"'critic': plugins\.critic_engine\.context_parallel=2: slices need .* is none"
    ):
        planned(models, *sliced, trunk, "plugins.critic_engine.shared_prefix=none")


def test_a_critic_with_separate_ranks_has_separate_slices(models: Path) -> None:
    ranks = ("plugins.critic_engine.data_parallel=2", "plugins.critic_engine.context_parallel=2")
    found = planned(models, *ranks)[1]
    assert (found.request.ranks, found.request.engine and found.request.engine.context_parallel) == (2, 2)
    with pytest.raises(
        PlanError, match=r"plugins\.critic_engine\.context_parallel=2: plugins\.critic_engine\.data_par"
    ):
        planned(models, "plugins.critic_engine.data_parallel=3", "train.prompts_per_step=3", ranks[1])
    copies = ("plugins.critic_engine.sharding=fsdp2", "plugins.critic_engine.dp_replicate=2")
    with pytest.raises(
        PlanError, match=r"'critic': plugins\.critic_engine\.dp_replicate=2: .* each copy several ranks"
    ):
        planned(models, *ranks, *copies)
