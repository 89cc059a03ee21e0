"""Several ranks in the plan: what each has to do and to hold, and what does not go together."""

import pytest

from rlcore.config import EngineConfig, LoraConfig
from rlcore.errors import ConfigError, PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.memory import at_work_bytes_per_parameter, training_bytes_per_parameter
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

HF = ("actor.backend=hf", "rollout.backend=hf", "train.prompts_per_step=4", "rollout.samples_per_prompt=3")


def planned(*overrides: str, gpus: int = 0) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, Facts(cpus=2, gpus=gpus))


def test_a_rank_that_no_mini_batch_has_work_for_is_refused() -> None:
    planned(*HF, "actor.shared_prefix=tree", "actor.data_parallel=4")
    with pytest.raises(PlanError, match=r"role 'actor': 5 ranks, and a mini-batch has 4 groups.*shared_prefix=none$"):
        planned(*HF, "actor.shared_prefix=tree", "actor.data_parallel=5")
    with pytest.raises(PlanError, match="role 'actor': 4 ranks, and a mini-batch has 2 groups"):
        planned(*HF, "actor.shared_prefix=tree", "actor.data_parallel=4", "actor.minibatch_prompts=2")
    planned(*HF, "actor.shared_prefix=none", "actor.data_parallel=12")
    with pytest.raises(PlanError, match="13 ranks, and a mini-batch has 12 samples; needs at most 12 ranks"):
        planned(*HF, "actor.shared_prefix=none", "actor.data_parallel=13")


def test_sharding_without_a_second_rank_has_no_effect_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"actor\.sharding: set to 'fsdp2'.*actor\.data_parallel != 1"):
        planned(*HF, "actor.sharding=fsdp2")


def test_a_rank_that_is_offloaded_holds_its_weights_and_gradients_at_work() -> None:
    def bytes_of(**settings: object) -> float:
        return at_work_bytes_per_parameter(EngineConfig(**settings))  # type: ignore[arg-type]

    assert bytes_of(offload=True) == 4.0 + 4.0
    assert bytes_of(offload=True, data_parallel=4, sharding="fsdp2") == (4.0 + 4.0) / 4
    assert bytes_of(offload=True, data_parallel=2, sharding="fsdp2", dtype="bfloat16") == (2.0 + 6.0) / 2


def test_what_a_rank_holds() -> None:
    def bytes_of(**settings: object) -> float:
        return training_bytes_per_parameter(EngineConfig(**settings))  # type: ignore[arg-type]

    assert bytes_of() == bytes_of(data_parallel=4) == 16.0
    assert bytes_of(data_parallel=4, sharding="fsdp2") == 16.0 / 4
    assert bytes_of(data_parallel=2, sharding="fsdp2", dtype="bfloat16") == 20.0 / 2
    assert bytes_of(data_parallel=2, sharding="fsdp2", lora=LoraConfig(enabled=True)) == 4.0 / 2
