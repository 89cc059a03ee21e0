"""The expected time of a step: what it counts, what it assumes, and when it is shown."""

from dataclasses import replace

import pytest

from rlcore.plan import RunPlan
from rlcore.plan.step_time import CPU_BFLOAT16_GFLOPS, CPU_GFLOPS, expected_step_time, in_words, slow_step_note
from rlcore.plugins.planning import plan_run

NEEDED = (
    "model.path=m", "data.sources.a.path=a.jsonl", "reward.functions.b.fn=exact_match", "cluster.device=cpu",
    "cluster.threads=2", "train.prompts_per_step=2", "rollout.samples_per_prompt=4", "rollout.max_tokens=50",
)  # fmt: skip


def planned(*overrides: str, parameters: int | None = 1_000_000) -> RunPlan:
    plan = plan_run([], [*NEEDED, *overrides])
    return replace(plan, facts=replace(plan.facts, parameters=parameters))


def test_operations_are_counted_per_weight_and_token_and_a_prompt_once_per_group() -> None:
    time = expected_step_time(planned(), 30)
    assert time is not None
    rate = 2 * CPU_GFLOPS * 1e9
    assert time.sampling_s == pytest.approx(2 * 1e6 * 400 / rate)
    assert time.updates_s == pytest.approx(6 * 1e6 * (400 + 2 * 30) / rate)
    assert time.step_s == time.sampling_s + time.updates_s
    assert "1 M parameters, 8 samples of rollout.max_tokens=50 tokens, prompts of 30, 2 cores" in time.assumed


@pytest.mark.parametrize(
    ("override", "factor"), [("actor.lora.enabled=true", 4 / 6), ("actor.epochs=2", 2.0), ("cluster.threads=1", 2.0)]
)
def test_what_changes_the_operations_changes_the_time(override: str, factor: float) -> None:
    base, other = expected_step_time(planned(), 30), expected_step_time(planned(override), 30)
    assert base is not None
    assert other is not None
    assert other.updates_s == pytest.approx(factor * base.updates_s)


@pytest.mark.parametrize(
    ("dtype", "instructions", "gflops"),
    [
        ("bfloat16", "avx512_bf16", CPU_BFLOAT16_GFLOPS),
        ("bfloat16", "", CPU_GFLOPS),
        ("float32", "amx_bf16", CPU_GFLOPS),
    ],
)
def test_bfloat16_is_faster_on_a_cpu_that_multiplies_it(dtype: str, instructions: str, gflops: float) -> None:
    plan = planned(f"actor.dtype={dtype}")
    time = expected_step_time(replace(plan, facts=replace(plan.facts, cpu_bfloat16=instructions)), 30)
    assert time is not None
    assert time.sampling_s == pytest.approx(2 * 1e6 * 400 / (2 * gflops * 1e9))
    assert f"2 cores of {gflops:g} GFLOP/s" in time.assumed


def test_nothing_is_said_of_a_model_or_an_engine_that_is_not_known() -> None:
    assert expected_step_time(planned(parameters=None), 30) is None
    assert slow_step_note(planned(), None) == ""


def test_a_step_of_minutes_on_a_cpu_is_noted_with_the_keys_that_shorten_it() -> None:
    quick, slow = planned(), planned(parameters=10**9)
    assert slow_step_note(quick, expected_step_time(quick, 30)) == ""
    slow = planned("rollout.max_tokens=2000", parameters=10**9)
    assert "rollout.max_tokens=2000, rollout.samples_per_prompt=4" in slow_step_note(slow, expected_step_time(slow, 30))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0003, "0.3 ms"),
        (0.0504, "50 ms"),
        (0.84, "0.8 s"),
        (45.2, "45 s"),
        (192, "3.2 min"),
        (1500, "25 min"),
        (9000, "2.5 h"),
    ],
)
def test_times_are_said_in_two_digits(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
