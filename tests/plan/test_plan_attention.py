"""The plan of attention to shared prompts: long responses, devices and number formats."""

import pytest

from rlcore.contracts.requests import ModelShape
from rlcore.errors import PlanError
from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plan.memory import CONTEXT_BYTES
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS
from rlcore.types import SharedPrefix

LLAMA = ModelShape("llama", 2, 8, 16, 4, 100, full_attention=True)
LOGITS = 4 * 4 * 2**24


def plan(*overrides: str, facts: Facts) -> RunPlan:
    hooks, loaded = configure([], [*SETTINGS, *overrides], ["null"])
    return make_plan(loaded, hooks, facts)


# Qwen2.5-7B on one device of 80 GB, with an adapter: one row of 33 792 tokens needs what its tokens leave behind.
LONG = (
    *(
        "cluster.device=cuda",
        "actor.backend=hf",
        "rollout.backend=hf",
        "actor.dtype=bfloat16",
        "data.max_prompt_tokens=1024",
    ),
    *("rollout.max_tokens=32768", "actor.lora.enabled=true", "rollout.max_rows=1", "algo.kl.placement=none"),
)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_response_of_32k_tokens_is_planned_by_what_its_tokens_leave_behind_and_refused_where_that_does_not_fit(
    checkpointing: bool,
) -> None:
    shape = ModelShape("qwen2", 28, 3584, 18944, 512, 152064, full_attention=True)
    facts = Facts(gpus=1, parameters=7_600_000_000, gpu_memory_bytes=80 * 10**9, shape=shape)
    settings = (*LONG, f"actor.gradient_checkpointing={str(checkpointing).lower()}")
    if not checkpointing:
        with pytest.raises(PlanError, match=r"role 'actor' needs about .* GiB.*gradient_checkpointing=true"):
            plan(*settings, facts=facts)
        return
    made = plan(*settings, facts=facts)
    assert made.workers[0].shared_prefix == SharedPrefix.TREE
    # of a token and layer what is kept, and in the layer that is computed backward gradients of it
    layer, backward = 4 * 18944 + 8 * 3584 + 2 * (3584 + 512) + 4, 2 * 18944 + 4 * 3584
    # nothing is predicted from the last token
    expected = CONTEXT_BYTES + 2 * 7_600_000_000 + 33791 * (28 * 3584 + layer + backward) * 2
    assert made.memory_bytes["actor"] == expected


@pytest.mark.parametrize(
    ("device", "dtype", "way"),
    [
        ("cpu", "float32", "tree"),
        ("cuda", "bfloat16", "tree"),
        ("cuda", "float16", "tree"),
        ("cuda", "float32", "none"),
    ],
)
def test_prompts_are_shared_where_the_device_has_flash_attention_in_the_number_format(
    device: str, dtype: str, way: str
) -> None:
    settings = (f"cluster.device={device}", f"actor.dtype={dtype}", "actor.backend=hf", "rollout.backend=hf")
    facts = Facts(gpus=1, shape=LLAMA)
    made = plan(*settings, facts=facts)
    assert made.workers[0].shared_prefix == way
    sentences = [note for note in made.notes if "flash attention of GPUs computes in half precision" in note]
    assert bool(sentences) == (way == "none")
    if way == "none":
        with pytest.raises(PlanError, match=r"^actor\.shared_prefix=tree: flash .*float32; choose .*dtype=bfloat16$"):
            plan(*settings, "actor.shared_prefix=tree", facts=facts)
