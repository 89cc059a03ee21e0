"""Models that transformers has eager attention for, and no sdpa: the plan chooses it, and does not advise the other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_machines import H100, QWEN, SETTINGS, chosen, loaded, machine, planned

from rlcore.errors import PlanError
from rlcore.plan import Facts
from rlcore.plugins import configure
from rlcore.types import SharedPrefix

EAGER = replace(QWEN, model_type="gpt_oss", heads=12)


@pytest.mark.parametrize("gpus", [0, 1])
def test_eager_attention_is_chosen_with_its_reason(gpus: int) -> None:
    facts = machine(gpus)
    found = loaded(facts=replace(facts, shape=EAGER))
    assert chosen(found) == {**chosen(loaded(facts=facts)), "model.attention": "eager"}
    assert found.config.model.attention == "eager"
    [reason] = [choice.reason for choice in found.choices if choice.key == "model.attention"]
    assert reason == "transformers has no sdpa for 'gpt_oss'"
    assert loaded("model.attention=sdpa", facts=replace(facts, shape=EAGER)).config.model.attention == "sdpa"
    assert "model.attention" not in chosen(loaded(facts=replace(facts, shape=None)))


def test_the_type_is_read_from_the_models_files_without_a_gpu_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 300}
    for model_type, attention in (("gemma2", "eager"), ("qwen2", "sdpa")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **sizes}), "utf-8")
        found = configure([], [*SETTINGS, f"model.path={tmp_path}"], machine=Facts(cpus=2))[1]
        assert found.config.model.attention == attention


def test_sdpa_is_not_advised_to_a_model_that_cannot_have_it() -> None:
    settings = ("model.attention=eager", "actor.dtype=bfloat16", "rollout.max_tokens=32768")
    for shape, advised in ((replace(EAGER, model_type="qwen2"), True), (EAGER, False)):
        with pytest.raises(PlanError) as caught:
            planned(*settings, facts=replace(H100, parameters=3_000_000_000, shape=shape))
        assert ("set model.attention" in str(caught.value)) is advised


@pytest.mark.parametrize(
    ("model_type", "others"), [("qwen2", "cache or none, or model.attention=sdpa"), ("bloom", "cache or none")]
)
def test_a_tree_with_eager_attention_is_refused_with_the_ways_that_there_are(model_type: str, others: str) -> None:
    facts = replace(machine(0), shape=replace(QWEN, model_type=model_type), parameters=1_000_000)
    with pytest.raises(PlanError) as caught:
        planned("model.attention=eager", "actor.shared_prefix=tree", facts=facts)
    assert str(caught.value).endswith(f"choose actor.shared_prefix={others}")


@pytest.mark.parametrize(
    ("model_type", "attention", "way"),
    [
        *((name, "sdpa", SharedPrefix.TREE) for name in ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2")),
        *((name, "sdpa", SharedPrefix.TREE) for name in ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe")),
        *((name, "sdpa", SharedPrefix.TREE) for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gemma3_text")),
        *((name, "eager", SharedPrefix.NONE) for name in ("gpt_oss", "gemma2")),
        ("gptj", "eager", SharedPrefix.CACHE),
        ("qwen3_next", "sdpa", SharedPrefix.NONE),
    ],
)
def test_the_attention_and_the_shared_prompts_of_the_models_that_many_train(
    model_type: str, attention: str, way: SharedPrefix
) -> None:
    facts = replace(machine(0), shape=replace(QWEN, model_type=model_type), parameters=1_000_000)
    plan = planned(facts=facts)
    assert plan.config.model.attention == attention
    assert plan.workers[0].shared_prefix is way
