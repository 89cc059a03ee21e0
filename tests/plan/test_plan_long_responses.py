"""Runs with long responses on one device, planned from a model's architecture alone."""

import pytest

from rlcore.contracts.requests import ModelShape
from rlcore.errors import PlanError
from rlcore.plan import Facts, make_plan
from rlcore.plugins import configure
from rlcore.testing.null import SETTINGS

GIB = 2**30
MODELS = {
    "0.5B": (494_032_768, ModelShape("qwen2", 24, 896, 4864, 128, 151936, True)),
    "1.5B": (1_543_714_304, ModelShape("qwen2", 28, 1536, 8960, 256, 151936, True)),
    "7B": (7_615_616_512, ModelShape("qwen2", 28, 3584, 18944, 512, 152064, True)),
}
"""Parameters and architecture of Qwen2.5."""
LORA, CHECKPOINTING = "actor.lora.enabled=true", "actor.gradient_checkpointing=true"


def planned(model: str, card: int, response: int, *overrides: str) -> float:
    """GiB of the actor with prompts of 1024 tokens, in micro-batches of one row at least; PlanError where they do not
    fit."""
    settings = (
        *("cluster.device=cuda", "actor.dtype=bfloat16", "data.max_prompt_tokens=1024", "actor.shared_prefix=tree"),
        *(f"rollout.max_tokens={response}", "rollout.samples_per_prompt=16", "rollout.max_rows=1"),
        *("actor.gradient_checkpointing=false", "actor.micro_batch_tokens=4096"),
    )
    parameters, shape = MODELS[model]
    hooks, loaded = configure([], [*SETTINGS, *settings, *overrides], ["null"])
    facts = Facts(cpus=8, gpus=1, gpu_memory_bytes=card * GIB, parameters=parameters, shape=shape)
    return make_plan(loaded, hooks, facts).memory_bytes["actor"] / GIB


@pytest.mark.parametrize(
    ("model", "card", "response", "overrides"),
    [
        ("0.5B", 24, 8000, ()),
        ("0.5B", 80, 32768, ()),
        ("0.5B", 24, 32768, (CHECKPOINTING,)),
        ("1.5B", 80, 8192, ()),
        ("1.5B", 80, 32768, (CHECKPOINTING,)),
        ("1.5B", 24, 32768, (CHECKPOINTING, LORA)),
        ("7B", 24, 8192, (CHECKPOINTING, LORA)),
        ("7B", 80, 32768, (CHECKPOINTING, LORA)),
    ],
)
def test_what_fits_a_device_is_planned(model: str, card: int, response: int, overrides: tuple[str, ...]) -> None:
    assert planned(model, card, response, *overrides) < card


@pytest.mark.parametrize(
    ("model", "card", "response", "overrides", "lower", "remedy"),
    [
        ("0.5B", 24, 32768, (), True, f"set {CHECKPOINTING} or {LORA}, or take a smaller model"),
        ("1.5B", 24, 8192, (CHECKPOINTING,), False, f"set {LORA}, or take a smaller model"),
        ("1.5B", 80, 32768, (), True, f"set {CHECKPOINTING} or {LORA}, or take a smaller model"),
        ("7B", 80, 8192, (CHECKPOINTING,), False, f"set {LORA}, or take a smaller model"),
        ("7B", 24, 32768, (CHECKPOINTING, LORA), True, "or rollout.max_tokens, or take a smaller model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_estimate_the_limit_and_the_settings_that_lower_it(
    model: str, card: int, response: int, overrides: tuple[str, ...], lower: bool, remedy: str
) -> None:
    """`lower`: weights and optimizer state leave room for a step of shorter sequences."""
    needed = planned(model, 10**6, response, *overrides)
    with pytest.raises(PlanError) as caught:
        planned(model, card, response, *overrides)
    start = f"role 'actor' needs about {needed:.1f} GiB a rank, a device has {card}.0; "
    assert str(caught.value).startswith(start + ("lower data.max_prompt_tokens" if lower else "set "))
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("way", ["tree", "none"])
def test_memory_grows_in_proportion_to_the_tokens_of_a_micro_batch(way: str) -> None:
    sizes = (f"actor.shared_prefix={way}",)
    short, longer, longest = (planned("1.5B", 10**6, response, *sizes) for response in (8191, 16383, 32767))
    assert longest - longer == pytest.approx(2 * (longer - short), rel=0.01)


def test_a_larger_micro_batch_needs_more_and_the_refusal_names_it_first() -> None:
    large = "actor.micro_batch_tokens=65536"
    assert planned("0.5B", 80, 1024, CHECKPOINTING, large) > planned("0.5B", 80, 1024, CHECKPOINTING) + 4
    with pytest.raises(PlanError, match=r"lower actor\.micro_batch_tokens, data\.max_prompt_tokens or rollout\.max"):
        planned("0.5B", 24, 1024, large)
