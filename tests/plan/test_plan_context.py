"""Ranks that hold slices of each sequence, in the plan."""

from dataclasses import replace

import pytest

from rlcore.contracts.requests import ModelShape
from rlcore.errors import ConfigError, PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.activations import largest_micro_batch, update_bytes
from rlcore.plan.show import plan_to_json
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.types import SharedPrefix

HF = ("actor.backend=hf", "rollout.backend=hf", "train.prompts_per_step=4", "rollout.samples_per_prompt=3")
LLAMA = ModelShape("llama", 2, 8, 16, 4, 100, full_attention=True, heads=4)


def planned(*overrides: str, shape: ModelShape | None = LLAMA) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, Facts(cpus=2, shape=shape, parameters=10**6))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*HF, "actor.data_parallel=3", "actor.context_parallel=2"), r"data_parallel=3; needs .*data_parallel=4$"),
        ((*HF, "actor.data_parallel=3", "actor.context_parallel=3"), r"has 4 heads of attention; needs a number that"),
        (
            (*HF, "actor.data_parallel=2", "actor.context_parallel=2", "actor.shared_prefix=none"),
            r"need the attention of shared_prefix=tree, and shared_prefix is none; choose actor\.context_parallel=1",
        ),
        (
            ("rollout.backend=null_replica", "actor.data_parallel=2", "actor.context_parallel=2"),
            r"role 'actor': actor\.context_parallel=2: NullActor of .* does not compute sequences in slices; needs",
        ),
        (
            (*HF, "train.prompts_per_step=1", "actor.data_parallel=4", "actor.context_parallel=2"),
            r"role 'actor': 2 groups of 2 ranks, and a mini-batch has 1 group, .*needs at most 1 group of 2 ranks",
        ),
    ],
    ids=["ranks", "heads", "not shared", "backend", "no share"],
)
def test_what_cannot_be_sliced_is_refused_in_one_line(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message) as found:
        planned(*overrides)
    assert "\n" not in str(found.value)


def test_a_model_with_a_window_is_refused_with_the_reason() -> None:
    windowed = replace(LLAMA, model_type="mistral", full_attention=False)
    with pytest.raises(PlanError, match=r"is none, because not every layer of 'mistral' sees all tokens"):
        planned(*HF, "actor.data_parallel=2", "actor.context_parallel=2", shape=windowed)
    own = replace(LLAMA, model_type="bloom")
    with pytest.raises(PlanError, match=r"'bloom' is not known to share them .*; choose actor\.context_parallel=1"):
        planned(*HF, "actor.data_parallel=2", "actor.context_parallel=2", shape=own)


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"actor\.context_parallel.*0"):
        planned(*HF, "actor.data_parallel=2", "actor.context_parallel=0")
    with pytest.raises(ConfigError, match=r"actor\.context_parallel: set to 2.*actor\.data_parallel != 1"):
        planned(*HF, "actor.context_parallel=2")


def test_the_plan_shows_the_mesh_and_divides_activations() -> None:
    ranks = (*HF, "actor.data_parallel=4", "actor.micro_batch_tokens=65536", "rollout.max_tokens=16384")
    shape = replace(LLAMA, hidden_size=512, inner_size=2048, kv_size=256, heads=8, layers=8)
    alone, sliced = (planned(*ranks, *more, shape=shape) for more in ((), ("actor.context_parallel=4",)))
    assert plan_to_json(sliced)["workers"]["actor"]["context_parallel"] == 4
    assert plan_to_json(alone)["workers"]["actor"]["context_parallel"] == 1
    assert sliced.memory_bytes["actor"] < alone.memory_bytes["actor"]
    whole, part = (
        update_bytes(shape, engine, largest_micro_batch(plan.config, engine, SharedPrefix.TREE), "cuda")
        for plan in (alone, sliced)
        for engine in [plan.config.actor]
    )
    assert part < 0.27 * whole
    planned(*HF, "train.prompts_per_step=1", "actor.data_parallel=2", "actor.context_parallel=2")
