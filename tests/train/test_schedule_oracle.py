"""The replay: cases by hand, and against an event simulation that moves a clock in small ticks."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.plan import OldLogprobs, SchedulePlan
from rlcore.report.advice import advice
from rlcore.testing.runs import run_settings
from rlcore.train import timing, train
from rlcore.train.oracle import Draws, ReplayService, StepTimes, replay, step_ideal_s
from rlcore.train.timing import length_correlation


def times(ready: list[float], *, stream: bool, size: int = 1, updates: int = 2) -> StepTimes:
    return StepTimes(4.0, 1.0, ready, [3.0] * updates, size, stream)


def test_a_step_by_hand() -> None:
    # sampled at 4, passes until 5; the groups are ready at 6 and 12, an update takes 3
    assert step_ideal_s(times([12.0, 6.0], stream=False)) == 12 + 3 + 3
    assert step_ideal_s(times([12.0, 6.0], stream=True)) == max(6 + 3, 12) + 3
    assert step_ideal_s(times([-5.0, 2.0], stream=True)) == 5 + 3 + 3
    assert step_ideal_s(times([12.0, 6.0], stream=True, updates=4)) == 12 + 3 + 3 + 3
    assert step_ideal_s(times([], stream=True, updates=0)) == 5.0


def test_calls_are_served_first_come_first_served() -> None:
    service = ReplayService(2)
    assert [service.serve(begin_s, 10.0) for begin_s in (0.0, 1.0, 2.0, 3.0)] == [10.0, 11.0, 20.0, 21.0]
    assert [ReplayService(None).serve(begin_s, 10.0) for begin_s in (0.0, 1.0)] == [10.0, 11.0]


def test_one_step_of_staleness_hides_rewards_behind_the_next_generation_and_the_update() -> None:
    step = Draws([2.0, 4.0], [6.0, 6.0], [0, 1], 1.0, [2.0, 2.0], 1)
    synchronous = replay([step] * 3, max_staleness=0, stream=False, slots=None)
    assert synchronous.step_s == [4 + 6 + 4] * 3
    pipeline = replay([step] * 3, max_staleness=0, stream=True, slots=None)
    assert pipeline.step_s == [10 + 2] * 3
    # two steps' prompts are sampled first, until 8; passes until 9; the rewards came at 8 and 10
    ahead = replay([step] * 3, max_staleness=1, stream=False, slots=None)
    assert ahead.published_s == [14.0, 14.0 + 4 + 1 + 4, 23.0 + 1 + 4]
    one_slot = replay([step] * 3, max_staleness=0, stream=False, slots=1)
    assert one_slot.step_s == [2 + 12 + 4] * 3


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.sampled_from([None, 1, 3]))
def test_no_schedule_that_keeps_the_rules_is_faster_than_the_replay(
    seed: int, max_staleness: int, stream: bool, slots: int | None
) -> None:
    draw = random.Random(seed)
    steps = [random_step(draw) for _ in range(4)]
    ideal = replay(steps, max_staleness=max_staleness, stream=stream, slots=slots)
    lazy = replay([delayed(step, draw) for step in steps], max_staleness=max_staleness, stream=stream, slots=slots)
    assert all(late >= early - 1e-9 for late, early in zip(lazy.published_s, ideal.published_s, strict=True))
    compute = sum(max(step.finished_s) + step.prepare_s + sum(step.update_s) for step in steps)
    assert ideal.published_s[-1] >= compute - 1e-9
    if slots is not None:
        work = sum(sum(step.reward_s) for step in steps)
        assert ideal.published_s[-1] >= work / slots - 1e-9
    on_policy = replay(steps, max_staleness=0, stream=stream, slots=slots)
    assert on_policy.published_s[-1] >= ideal.published_s[-1] - 1e-9


def random_step(draw: random.Random) -> Draws:
    finished = sorted(draw.uniform(0, 5) for _ in range(6))
    rewards = [draw.uniform(0, 8) for _ in range(6)]
    return Draws(finished, rewards, [0, 0, 1, 1, 2, 2], draw.uniform(0, 1), [draw.uniform(0, 3)] * 3, 1)


def delayed(step: Draws, draw: random.Random) -> Draws:
    """The same step with time lost in its passes and updates."""
    return Draws(
        step.finished_s,
        step.reward_s,
        step.group,
        step.prepare_s + draw.uniform(0, 1),
        [value + draw.uniform(0, 1) for value in step.update_s],
        step.minibatch_groups,
    )


def test_the_correlation_of_minibatch_and_length() -> None:
    assert length_correlation([0, 0, 1, 1], [5, 5, 9, 9]) == pytest.approx(1.0)
    assert length_correlation([0, 1], [9, 5]) == pytest.approx(-1.0)
    assert length_correlation([0, 0], [1, 2]) == length_correlation([0, 1], [3, 3]) == 0.0


def test_a_wait_for_samples_counts_as_sampling_and_only_what_follows_as_a_wait_for_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wait ends at the second that the clock has then; the first two are for prompts of one round."""
    clock = iter([4.0, 9.0, 10.0, 11.0, 14.0, 16.0, 18.0])
    monkeypatch.setattr(timing, "now", lambda: next(clock))
    timeline = timing.StepTimeline(began=0.0)
    timeline.sample_end()
    timeline.waited(4.0, 7.0)  # sampled until 7, scored at 9
    timeline.waited(4.0, 8.0)  # until 8, and at 10
    timeline.waited(10.0, 3.0)  # sampled before, scored at 11
    with timeline.updating():  # from 14 to 16
        pass
    timeline.end()
    measured = timeline.metrics([], stream=False, minibatch_groups=0)
    assert (measured["time/generate_s"], measured["time/reward_wait_s"]) == (4.0 + 4.0, 2.0 + 1.0)


def test_sampling_that_runs_during_an_update_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 5.0, 6.0, 9.0])
    monkeypatch.setattr(timing, "now", lambda: next(clock))
    timeline = timing.StepTimeline(began=0.0)
    timeline.sample_end()
    with timeline.updating():  # from 2 to 5
        pass
    timeline.waited(3.0, 8.0)  # ends at 6, for samples alone
    timeline.end()
    measured = timeline.metrics([], stream=True, minibatch_groups=1)
    assert (measured["time/generate_s"], measured["time/reward_wait_s"]) == (1.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"algo.dynamic_sampling": True, "algo.max_resample_rounds": 1}, {"algo.advantage": "remax"}],
    ids=["replaced prompts", "baselines"],
)
def test_what_a_step_samples_after_its_first_rewards_is_in_its_time_of_sampling(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Ten tokens are sampled twice, one after the other."""
    (tmp_path / "equal.py").write_text("def score(completions, **columns):\n    return [0.5] * len(completions)\n")
    reward = {"reward.functions.letters.fn": f"{tmp_path}/equal.py:score"}
    slow = {"rollout.max_tokens": 10, "plugins.null.token_s": 0.02, "train.max_steps": 1}
    result = train(run_settings(tmp_path, 8, **reward, **slow, **settings), plugins="null")
    (step,) = result.history
    assert step["time/generate_s"] >= 2 * 10 * 0.02
    assert step["time/generate_s"] + step["time/reward_wait_s"] <= step["time/step_s"] + 1e-6
    assert step["time/ideal_s"] >= step["time/generate_s"]


def test_the_advice_names_what_bounds_the_run_and_the_setting_to_turn() -> None:
    synchronous = SchedulePlan("synchronous", 0, False, False, OldLogprobs.SAMPLED, (), True)
    fast = {"time/step_s": 1.0, "time/reward_wait_s": 0.01, "time/overhead": 0.02}
    slow = fast | {"time/reward_wait_s": 0.5}
    assert "compute bounds the run" in advice([fast], synchronous, 4)[1]
    assert "schedule.stream_minibatches=true" in advice([fast, slow], synchronous, 4)[1]
    assert "actor.minibatch_prompts" in advice([fast, slow], synchronous, 1)[1]
    assert "concurrency bounds the run" in advice([slow | {"time/service_bound": 1.0}], synchronous, 4)[1]
    assert "30% longer" in advice([fast | {"time/overhead": 0.3}], synchronous, 4)[2]
    assert advice([], synchronous, 4) == []
    replaces = advice([fast, slow], synchronous, 4, may_stream=False)[1]
    assert "schedule.max_staleness=1" in replaces
    assert "stream" not in replaces


@pytest.mark.slow
def test_the_advice_of_a_run_that_replaces_prompts_does_not_propose_to_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan refuses both together."""
    source = "import asyncio\nasync def score(trajectory):\n    await asyncio.sleep(0.3)\n    return 0.5\n"
    (tmp_path / "late.py").write_text(source)
    settings = run_settings(tmp_path, 8, **{"reward.functions.letters.fn": f"{tmp_path}/late.py:score"})
    del settings["reward.functions.letters.children"]
    train({**settings, "algo.dynamic_sampling": True}, plugins="null")
    shown = capsys.readouterr().out
    assert "schedule.max_staleness=1" in shown
    assert "stream_minibatches" not in shown
