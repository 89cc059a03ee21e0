"""Diagnoses: each is found in a run that has its fault, and a run that learns has none."""

from collections.abc import Callable

import pytest
from made_runs import run_of, sample
from rlcore_view import Run, diagnose


def groups_of(*scores: float | None, **more: object) -> list:
    """Three steps with two groups each, whose samples have these scores."""
    return [
        sample(step, prompt, number, score, **more)
        for step in (1, 2, 3)
        for prompt in (0, 1)
        for number, score in enumerate(scores)
    ]


def failing() -> Run:
    return run_of(groups_of(None, None, status="failed", info={"reward": {"error": "ZeroDivisionError: x"}}))


def unequal_components() -> Run:
    parts = [{"right": 1.0, "format": 0.0}, {"right": 0.0, "format": 1.0}]
    return run_of([sample(1, p, n, 1.0, components=parts[n]) for p in (0, 1) for n in (0, 1)])


def by_prompt() -> Run:
    return run_of([sample(1, p, n, float(p)) for p in (0, 1) for n in (0, 1)])


FAULTS: dict[str, Callable[[], Run]] = {
    "rewards fail": failing,
    "responses are cut off": lambda: run_of(groups_of(0.0, 1.0, truncated=True)),
    "answers are not found": lambda: run_of(groups_of(0.0, 1.0, info={"reward": {"answer": None}})),
    "all rewards are equal": lambda: run_of(groups_of(0.0, 0.0)),
    "rewards cancel out": unequal_components,
    "groups have equal rewards": by_prompt,
    "advantages are zero": lambda: run_of(groups_of(0.0, 1.0, advantage=0.0)),
    "no gradient": lambda: run_of(groups_of(0.0, 1.0), actor__grad_norm=[0.0, 0.0, 0.0]),
    "updates are skipped": lambda: run_of(groups_of(0.0, 1.0), actor__skipped=[1.0, 1.0, 1.0]),
    "sampler and trainer drift apart": lambda: run_of(
        groups_of(0.0, 1.0), policy__rollout_logprob_diff=[0.01] * 5 + [0.5] * 5
    ),
    "entropy collapsed": lambda: run_of(
        groups_of(0.0, 1.0), policy__entropy=[2.0, 1.0, 0.1, 0.02, 0.01], reward__mean=[0.2, 0.5, 0.9, 0.4, 0.3]
    ),
    "the policy left its reference": lambda: run_of(groups_of(0.0, 1.0), policy__kl=[0.1, 25.0]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    assert [finding.name for finding in diagnose(FAULTS[name]())] == [name]


def test_the_words_name_the_cause_and_the_key() -> None:
    [finding] = diagnose(FAULTS["responses are cut off"]())
    assert str(finding) == (
        "responses are cut off: 12 of 12 responses end at the token budget; raise rollout.max_tokens, or ask for "
        "shorter answers in the prompt"
    )
    [failed] = diagnose(FAULTS["rewards fail"]())
    assert "12 of 12 samples have no reward, such as: ZeroDivisionError: x" in failed.evidence


def test_a_solved_task_is_not_called_too_hard() -> None:
    [finding] = diagnose(run_of(groups_of(1.0, 1.0)))
    assert "the task is solved" in finding.advice


def test_a_run_that_learns_has_no_finding() -> None:
    healthy = run_of(
        groups_of(0.0, 1.0, info={"reward": {"answer": "4"}}),
        actor__grad_norm=[0.5, 0.4, 0.6],
        actor__skipped=[1.0, 0.0, 0.0],
        policy__entropy=[2.0, 1.0, 0.5, 0.2, 0.05],
        reward__mean=[0.2, 0.5, 0.7, 0.9, 0.95],
        policy__kl=[0.0, 0.1, 0.3],
        policy__rollout_logprob_diff=[0.01] * 12,
    )
    assert diagnose(healthy) == []


def test_a_run_without_samples_has_no_finding() -> None:
    assert diagnose(run_of([])) == []


def test_only_the_last_steps_count() -> None:
    early = [sample(step, 0, number, 0.0) for step in range(1, 6) for number in (0, 1)]
    late = [sample(step, 0, number, float(number)) for step in range(6, 11) for number in (0, 1)]
    assert diagnose(run_of([*early, *late])) == []
    assert [finding.name for finding in diagnose(run_of(early))] == ["all rewards are equal"]
