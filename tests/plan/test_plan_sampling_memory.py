"""The memory of an actor that samples: keys and values, logits and a packed copy of the weights."""

import pytest
from test_plan_memory import LLAMA, PIECES, PROCESS, plan, trained

from rlcore.engines.hf import resources
from rlcore.plan import Facts


def test_generation_takes_the_place_of_gradients_with_packed_weights_keys_values_and_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (
        "data.max_prompt_tokens=10", "rollout.max_tokens=6", "train.prompts_per_step=4", "rollout.samples_per_prompt=2",
        "rollout.max_rows=8", "actor.backend=hf", "rollout.backend=hf", "actor.shared_prefix=none",
    )  # fmt: skip
    large = Facts(parameters=10**9, shape=LLAMA)
    # 8 rows of 6 tokens and 4 + 1 prompts of 10; keys and values of 2 layers; logits and probabilities of 8 rows; of a
    # pass over all these tokens 4 * 8 + 3 * 16 numbers each
    cached = 8 * 6 + 5 * 10
    tables = cached * 2 * 2 * 4 * 4 + 2 * 8 * 100 * 4 + cached * 80 * 4
    lora = plan(*sizes, "actor.lora.enabled=true", facts=large).memory_bytes["actor"]
    assert lora == trained(4 * 10**9, 4 * 10**9 + tables)
    whole = plan(*sizes, facts=large).memory_bytes["actor"]
    assert whole == pytest.approx(trained(4 * 10**9, 12 * 10**9), rel=1e-3), "no more than gradients"
    evaluated = ("eval.sources.held.path=held.jsonl", "eval.max_tokens=20")
    longer = plan(*sizes, *evaluated, "actor.lora.enabled=true", facts=large).memory_bytes["actor"]
    held = 8 * 20 + 9 * 10  # a separate prompt for each row, and one more
    assert longer - lora == pytest.approx(PIECES * (held - cached) * (2 * 2 * 4 + 80) * 4, abs=1)
    shorter = plan(*sizes, evaluated[0], "eval.max_tokens=1", "actor.lora.enabled=true", facts=large).memory_bytes[
        "actor"
    ]
    assert shorter == lora, "what is held in training is more"
    half = plan(*sizes, "actor.lora.enabled=true", "actor.dtype=bfloat16", facts=large).memory_bytes["actor"]
    assert half == pytest.approx(PROCESS + 2 * 10**9, rel=1e-3), "this CPU does not multiply bfloat16"
    monkeypatch.setattr(resources, "bfloat16_instructions", lambda: "avx512_bf16")
    packed = plan(*sizes, "actor.lora.enabled=true", "actor.dtype=bfloat16", facts=large).memory_bytes["actor"]
    assert packed - half == pytest.approx(PIECES * 2 * 10**9, rel=1e-3)
