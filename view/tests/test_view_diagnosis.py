"""Diagnoses: each is found in a run that has its fault, and a run that learns has none."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from made_runs import run_of, sample
from rlcore_view import Finding, Outcome, Run, StepFacts, Watch, diagnose, facts_of, reward_rules, update_rules, watch
from rlcore_view.step_facts import METRICS

CONFIG: dict[str, Any] = {
    "actor": {"lr": 0.01, "backend": "hf", "max_grad_norm": 1.0, "dtype": "float32", "rounding": "stochastic"},
    "rollout": {"max_tokens": 16, "backend": "hf", "warn_logprob_diff": 0.05, "top_p": 1.0},
    "algo": {"equal_rewards_warn_steps": 3, "overlong": "none"},
    "train": {"prompts_per_step": 4},
}
STEPS = (1, 2, 3)


def groups_of(*scores: float | None, **more: Any) -> list:
    """Three steps with two groups each, whose samples have these scores; equal ones give advantages of 0."""
    if len(set(scores)) == 1:
        more = {"advantage": 0.0, **more}
    return [
        sample(step, prompt, number, score, **more)
        for step in STEPS
        for prompt in (0, 1)
        for number, score in enumerate(scores)
    ]


def untaught(step: int, prompt: int, number: int, score: float, **more: Any) -> Any:
    """A sample with advantage 0."""
    return sample(step, prompt, number, score, advantage=0.0, **more)


def unequal_components() -> Run:
    parts = [{"right": 1.0, "format": 0.0}, {"right": 0.0, "format": 1.0}]
    return run_of([untaught(step, p, n, 1.0, components=parts[n]) for step in STEPS for p in (0, 1) for n in (0, 1)])


def by_prompt() -> Run:
    return run_of([untaught(step, p, n, float(p)) for step in STEPS for p in (0, 1) for n in (0, 1)])


def learning(**metrics: list[float]) -> Run:
    """A run whose rewards differ, with these metrics."""
    return run_of(groups_of(0.0, 1.0), **metrics)


def with_settings(run: Run, **settings: Any) -> Run:
    """The run with a configuration; `actor__lr=1` is actor.lr."""
    config = {section: dict(values) for section, values in CONFIG.items()}
    for name, value in settings.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    return replace(run, plan={"config": config})


FALLEN = [0.2, 0.5, 0.9, 0.9, 0.9, 0.9, 0.3, 0.2, 0.2, 0.2, 0.2, 0.2]
FAULTS: dict[str, Callable[[], Run]] = {
    "rewards fail": lambda: run_of(
        groups_of(None, None, status="failed", info={"reward": {"error": "ZeroDivisionError: x"}})
    ),
    "samples are dropped": lambda: learning(reward__dropped_samples=[4.0, 4.0, 4.0]),
    "responses are cut off": lambda: run_of(groups_of(0.0, 1.0, truncated=True)),
    "answers are not found": lambda: run_of(groups_of(0.0, 1.0, info={"reward": {"answer": None}})),
    "all rewards are equal": lambda: run_of(groups_of(0.0, 0.0)),
    "rewards cancel out": unequal_components,
    "groups have equal rewards": by_prompt,
    "prompts are discarded": lambda: with_settings(learning(data__given_up=[0.0, 4.0, 9.0, 14.0, 20.0])),
    "advantages are zero": lambda: run_of(groups_of(0.0, 1.0, advantage=0.0)),
    "no gradient": lambda: learning(actor__grad_norm=[0.0, 0.0, 0.0]),
    "gradients are clipped to nothing": lambda: with_settings(learning(actor__grad_norm=[200.0, 300.0, 150.0])),
    "the loss is clipped to nothing": lambda: learning(
        policy__clip_frac_low=[0.5, 0.5, 0.5], policy__clip_frac_high=[0.45, 0.45, 0.45]
    ),
    "updates are skipped": lambda: learning(actor__skipped=[1.0, 1.0, 1.0]),
    "log-probs are not those of the policy": lambda: with_settings(
        learning(policy__rollout_logprob_diff=[0.6, 0.6, 0.6])
    ),
    "sampler and trainer differ": lambda: with_settings(
        learning(policy__rollout_logprob_diff=[0.2, 0.2, 0.2]), rollout__backend="other"
    ),
    "weights do not reach the sampler": lambda: learning(policy__rollout_logprob_diff=[0.01] * 5 + [0.5] * 5),
    "entropy collapsed": lambda: learning(policy__entropy=[2.0] * 6 + [0.01] * 6, reward__mean=FALLEN),
    "responses have become empty": lambda: learning(
        completion__length_mean=[40.0] * 6 + [1.0] * 6, reward__mean=FALLEN
    ),
    "the policy left its reference": lambda: learning(policy__kl=[5.0, 6.0, 25.0]),
    "ratios explode": lambda: learning(policy__ratio_max=[900.0, 800.0, 900.0]),
    "rounding keeps the weights where they are": lambda: with_settings(
        learning(reward__mean=[0.2] * 10), actor__dtype="bfloat16", actor__rounding="nearest", actor__lr=1e-6
    ),
}


@pytest.mark.parametrize(
    ("dtype", "difference", "found"),
    [("float32", 1e-5, 0), ("float32", 0.06, 1), ("bfloat16", 0.2, 0), ("bfloat16", 0.6, 1), ("float16", 0.2, 0)],
)
def test_a_difference_within_one_backend_counts_by_its_number_format(dtype: str, difference: float, found: int) -> None:
    run = with_settings(learning(policy__rollout_logprob_diff=[difference] * 3), actor__dtype=dtype)
    assert [finding.name for finding in diagnose(run)] == ["log-probs are not those of the policy"] * found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_nothing_else(name: str) -> None:
    assert [finding.name for finding in diagnose(FAULTS[name]())] == [name]


def test_a_difference_that_rises_within_one_backend_is_that_of_the_weights_alone() -> None:
    run = with_settings(learning(policy__rollout_logprob_diff=[0.01] * 5 + [0.5] * 5))
    assert [finding.name for finding in diagnose(run)] == ["weights do not reach the sampler"]


def test_the_words_name_the_cause_the_key_its_value_and_how_often() -> None:
    [finding] = diagnose(with_settings(run_of(groups_of(0.0, 0.0, truncated=True, num_sampled=16))))
    assert str(finding) == (
        "responses are cut off in 3 of 3 steps (steps 1 to 3): 4 of 4 responses end at a token budget, the longest "
        "after 16 tokens; none ends in its second half, so nothing shows how many tokens would do; no "
        "rewards differ within the 2 groups, so nothing is learned; raise rollout.max_tokens=16, or ask for shorter "
        "answers in the prompt"
    )
    [failed] = diagnose(FAULTS["rewards fail"]())
    assert "4 of 4 samples have no reward, such as: ZeroDivisionError: x" in failed.evidence


def test_the_share_that_would_end_with_more_tokens_follows_the_rate_of_the_second_half() -> None:
    cut = [sample(1, 0, number, 0.0, truncated=True, num_sampled=16) for number in range(9)]
    [finding] = diagnose(run_of([*cut, sample(1, 0, 9, 0.0, truncated=False, num_sampled=16)]))
    rate = 1 / (10 * 8)  # one of ten ends, over the last 8 tokens of each
    assert f"{1 - (1 - rate) ** 16:.0%} of these would end within twice as many" in finding.evidence


def test_a_budget_other_than_that_of_the_rollout_is_not_blamed_on_it() -> None:
    [finding] = diagnose(with_settings(run_of(groups_of(0.0, 0.0, truncated=True, num_sampled=4))))
    assert finding.advice == "raise rollout.max_tokens=16 or what else ends a conversation (agent/ended/*)"


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "too hard for the model"), (1.0, "the task is solved"), (0.5, "does not tell responses apart")],
)
def test_equal_rewards_are_distinguished_by_their_value(value: float, words: str) -> None:
    [finding] = diagnose(run_of(groups_of(value, value)))
    assert words in finding.advice
    assert finding.evidence.startswith("nothing is learned: all rewards of every group were equal, in 2 of 2 groups")


def test_equal_rewards_that_teach_are_not_named() -> None:
    """ReMax and a critic compare a reward with another baseline than the group's mean, and learn from them."""
    assert diagnose(run_of(groups_of(0.5, 0.5, advantage=0.25))) == []


def test_token_scores_are_part_of_the_rewards_that_are_compared() -> None:
    parts = [Outcome(0, number, 0.0, None, False, 4, {}, {}, 0.0, token_score=1.0) for number in (0, 1)]
    more = Outcome(0, 1, 0.0, None, False, 4, {}, {}, 0.0, token_score=0.5)  # another segment of the second sample
    same, differ = facts_of(1, parts, {}), facts_of(1, [*parts, more], {})
    assert (same.groups, same.equal_groups, same.low, same.high) == (1, 1, 1.0, 1.0)
    assert (differ.groups, differ.equal_groups, differ.low, differ.high) == (1, 0, 1.0, 1.5)


def test_a_known_cause_replaces_the_finding_of_equal_rewards_when_they_are_0() -> None:
    unread = {"info": {"reward": {"answer": ""}}}
    assert [finding.name for finding in diagnose(run_of(groups_of(0.0, 0.0, **unread)))] == ["answers are not found"]
    same = [finding.name for finding in diagnose(run_of(groups_of(0.5, 0.5, **unread)))]
    assert same == ["answers are not found", "all rewards are equal"]


def test_masked_responses_are_the_cause_of_skipped_updates() -> None:
    run = replace(run_of(groups_of(0.0, 1.0, truncated=True)), metrics=learning(actor__skipped=[1.0] * 3).metrics)
    skipped = {finding.name: finding for finding in diagnose(with_settings(run, algo__overlong="mask"))}
    assert "algo.overlong=mask leaves those out" in skipped["updates are skipped"].evidence


def test_a_mask_without_a_sampled_token_is_the_cause_of_skipped_updates() -> None:
    run = with_settings(
        learning(actor__skipped=[1.0] * 3, completion__length_mean=[0.0] * 3), rollout__agent="my_agent"
    )
    skipped = {finding.name: finding for finding in diagnose(run)}["updates are skipped"]
    assert "no token is marked as sampled" in skipped.evidence
    assert "loss_mask of rollout.agent=my_agent" in skipped.advice


def test_a_run_that_learns_has_no_finding() -> None:
    healthy = run_of(
        groups_of(0.0, 1.0, info={"reward": {"answer": "4"}}),
        actor__grad_norm=[0.5, 0.4, 0.6] * 4,
        actor__skipped=[1.0, 0.0, 0.0] * 4,
        policy__entropy=[2.0, 1.0, 0.5, 0.2, 0.05] + [0.01] * 7,
        policy__ratio_max=[1.0, 150.0, 3.0] * 4,
        policy__clip_frac_low=[0.1] * 12,
        completion__length_mean=[40.0] * 5 + [2.0] * 7,
        reward__mean=[0.2, 0.5, 0.7, 0.9, 0.95] + [0.97] * 7,
        reward__dropped_samples=[1.0, 0.0, 0.0],
        policy__kl=[0.0, 0.1, 0.3] * 4,
        policy__rollout_logprob_diff=[0.01] * 12,
        data__given_up=[1.0] * 12,
    )
    assert diagnose(with_settings(healthy)) == []
    assert diagnose(healthy) == []


def test_a_run_without_samples_has_no_finding() -> None:
    assert diagnose(run_of([])) == []


def test_settings_silence_what_they_explain() -> None:
    part = {"rollout__backend": "other", "rollout__top_p": 0.9}
    assert diagnose(with_settings(learning(policy__rollout_logprob_diff=[0.2] * 3), **part)) == []
    half = {"actor__dtype": "bfloat16"}
    same = diagnose(with_settings(learning(policy__rollout_logprob_diff=[0.2] * 3), **half))
    assert same == []  # both have one backend: half precision differs by rounding
    fast = {"actor__dtype": "bfloat16", "actor__rounding": "nearest", "actor__lr": 0.01}
    assert diagnose(with_settings(learning(reward__mean=[0.2] * 10), **fast)) == []


def test_two_steps_of_a_passing_fault_say_nothing() -> None:
    equal = [untaught(step, 0, number, 0.0) for step in (1, 2) for number in (0, 1)]
    late = [sample(step, 0, number, float(number)) for step in range(3, 8) for number in (0, 1)]
    assert diagnose(with_settings(run_of([*equal, *late]))) == []
    assert diagnose(with_settings(learning(actor__skipped=[1.0, 1.0, 0.0]))) == []


def test_a_fault_that_has_passed_is_counted_with_its_last_step() -> None:
    early = [untaught(step, 0, number, 0.0) for step in range(1, 5) for number in (0, 1)]
    late = [sample(step, 0, number, float(number)) for step in range(5, 11) for number in (0, 1)]
    [finding] = diagnose(with_settings(run_of([*early, *late])))
    assert (finding.times, finding.of, finding.first, finding.last) == (2, 10, 3, 4)


def facts(step: int, **more: Any) -> StepFacts:
    return StepFacts(step, **more)


def test_a_watch_says_a_finding_once_and_counts_it() -> None:
    reported_once = Watch(CONFIG)
    cut = {"responses": 4, "cut": 4, "budget": 16}
    assert [[finding.name for finding in reported_once.step(facts(step, **cut))] for step in STEPS] == [
        ["responses are cut off"],
        [],
        [],
    ]
    assert [finding.times for finding in reported_once.findings()] == [3]


def test_the_last_words_say_whether_the_reward_moved() -> None:
    words = {}
    for name, step_gain in {"rose": 0.05, "fell": -0.05, "did not move": 0.0}.items():
        run = Watch(CONFIG)
        for step in range(1, 13):
            noise = 0.01 * (-1) ** step
            run.step(facts(step, metrics={"reward/mean": 0.5 + step_gain * step + noise}))
        words[name] = run.last_words()
        assert words[name][0].startswith(f"learning: the reward {name}: ")
    assert words["did not move"][1].startswith("none of the known causes shows in the data")
    assert [len(lines) for lines in words.values()] == [1, 2, 2]
    assert words["rose"] == ["learning: the reward rose: 0.648 in the first 5 steps, 1 in the last 5 of 12"]
    assert Watch(CONFIG).last_words() == []


def test_a_watch_restored_from_its_state_reports_the_same() -> None:
    steps = [facts(step, responses=4, cut=4, metrics={"reward/mean": 0.1 * step}) for step in range(1, 13)]
    whole, before = Watch(CONFIG), Watch(CONFIG)
    for step in steps[:7]:
        before.step(step)
    after = Watch(CONFIG)
    after.restore(json.loads(json.dumps(before.state())))
    for step in steps[7:]:
        assert after.step(step) == []
    for step in steps:
        whole.step(step)
    assert after.last_words() == whole.last_words()
    assert after.state() == whole.state()


@pytest.mark.parametrize("state", [{}, {"early": 3}, {"early": [], "recent": [], "found": [{"x": 1}], "num_steps": 1}])
def test_a_state_that_is_not_whole_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the state of the diagnosis is not whole"):
        Watch(CONFIG).restore(state)


def restored_with(part: str, name: str, value: Any) -> None:
    """Restore a state of two steps in which one value of a step or of a finding is another."""
    reported_once = Watch(CONFIG)
    for step in (1, 2):
        reported_once.step(facts(step, responses=4, cut=4, budget=16, metrics={"reward/mean": 0.5}))
    state = json.loads(json.dumps(reported_once.state()))
    if part == "state":
        state[name] = value
    else:
        state[part][0][name] = value
    Watch(CONFIG).restore(state)


@pytest.mark.parametrize("value", [None, 1.0, True, "1", [], {}], ids=repr)
@pytest.mark.parametrize(
    ("part", "name"), [("early", "cut"), ("recent", "step"), ("found", "times"), ("state", "num_steps")]
)
def test_a_count_of_a_state_that_is_not_a_whole_number_is_refused(part: str, name: str, value: Any) -> None:
    restored_with(part, name, 1)
    with pytest.raises(ValueError, match="the state of the diagnosis is not whole"):
        restored_with(part, name, value)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("early", "error", None),
        ("early", "metrics", [0.5]),
        ("early", "metrics", None),
        ("early", "metrics", {"reward/mean": None}),
        ("early", "low", "0"),
        ("early", "high", True),
        ("early", "varying", "right"),
        ("early", "varying", 3),
        ("found", "evidence", 3),
        ("found", "name", ["x"]),
        ("state", "found", {}),
        ("state", "found", [[]]),
        ("state", "early", {"step": 1}),
        ("state", "recent", None),
        ("state", "best_reward", "0.5"),
        ("state", "best_reward", True),
    ],
    ids=repr,
)
def test_a_value_of_a_state_of_another_type_is_refused(part: str, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="the state of the diagnosis is not whole"):
        restored_with(part, name, value)


def test_a_run_of_another_trainer_needs_one_step() -> None:
    assert diagnose(run_of([untaught(1, 0, number, 0.0) for number in (0, 1)]))[0].name == "all rewards are equal"


def test_numbers_that_are_not_finite_are_left_out() -> None:
    infinite = learning(policy__kl=[float("inf")] * 3, policy__ratio_max=[float("nan")] * 3)
    assert diagnose(infinite) == []


def test_a_finding_in_one_step_names_the_step() -> None:
    assert str(Finding("x", "y", "z", 1, 9, 4, 4)) == "x in 1 of 9 steps (step 4): y; z"
    assert Finding("x", "y", "z").words == "x: y; z"


def test_every_metric_that_facts_keep_is_looked_at_by_a_rule() -> None:
    text = "".join(map(inspect.getsource, (reward_rules, update_rules, watch)))
    assert [name for name in METRICS if f'"{name}"' not in text] == []
