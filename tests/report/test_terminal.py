"""The output of a run."""

import io
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rlcore.report.standing import progress
from rlcore.report.status import RoleStatus, Status, WaitingSamples
from rlcore.report.terminal import Terminal
from rlcore.types import (
    FinishReason,
    FrozenDict,
    Message,
    Prompt,
    Reward,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    frozen_messages,
)


def scored(completion: str | tuple[Message, ...]) -> ScoredTrajectory:
    prompt = Prompt("p/0", ({"role": "user", "content": "3 + 4 = [bold]?"},), "7", "p")
    trajectory = Trajectory(
        TrajectoryId("p/0", 0, 0),
        prompt,
        np.array([1, 2], dtype=np.int32),
        np.array([False, True]),
        np.zeros(2, dtype=np.float32),
        completion,
        FinishReason.STOP,
        ((1, 0),),
    )
    return ScoredTrajectory(trajectory, Reward(1.0, FrozenDict({"accuracy": 1.0})))


def test_completions_are_shown_as_text_with_their_parts_reward_and_advantage() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=100))
    terminal.completions(10, [(scored("[red]7\x1b[2J\r"), 0.5), (scored("x" * 1000), -0.5)])
    text = out.getvalue()
    assert all(part in text for part in ("[bold]?", "[red]7")), "what a model writes is never taken for markup"
    assert all(part in text for part in ("accuracy", "+0.50", "-0.50", "completions of step 10"))
    assert "\x1b" not in text, "nor for a command to the terminal"
    assert "\r" not in text
    assert text.count("x") < 500, "long completions are cut"


@pytest.mark.parametrize("width", [20, 30, 50, 60, 100])
def test_completions_are_readable_in_a_terminal_of_any_width(width: int) -> None:
    out = io.StringIO()
    rows = [(scored("the quick brown fox"), 0.5), (scored("y" * 70), None)]
    Terminal(Console(file=out, width=width)).completions(10, rows)
    text = out.getvalue()
    words = ("3 + 4", "[bold]?", "the", "quick", "brown", "accuracy", "1.00", "reward", "advantage", "+0.50")
    assert [word for word in words if word not in text] == []
    assert text.count("y") - text.count("accuracy") == 70
    assert max(map(len, text.splitlines())) <= width


def test_names_of_components_are_shown_as_text() -> None:
    out = io.StringIO()
    foreign = replace(scored("7"), reward=Reward(1.0, FrozenDict({"[/bold] \x1b[31mred\x07": 0.5})))
    Terminal(Console(file=out, width=200)).completions(1, [(foreign, 0.0)])
    assert "[/bold] \ufffd[31mred\ufffd" in out.getvalue()


def test_a_conversation_is_shown_message_by_message() -> None:
    out = io.StringIO()
    lines = [("assistant", "add(a=1, b=2)"), ("tool", "[bold]3\x1b[2J"), ("assistant", "It is 3.")]
    messages = frozen_messages([{"role": role, "content": content} for role, content in lines])
    Terminal(Console(file=out, width=160)).completions(1, [(scored(messages), 0.5)])
    text = out.getvalue()
    assert [
        line for line in ("assistant: add(a=1, b=2)", "tool: [bold]3", "assistant: It is 3.") if line not in text
    ] == []
    assert "\x1b" not in text


def test_the_prompt_of_a_sample_is_what_its_environment_opened_with() -> None:
    out = io.StringIO()
    sample = scored("7")
    opening = frozen_messages([{"role": "user", "content": "guess my number"}])
    opened = replace(sample, trajectory=replace(sample.trajectory, opening=opening))
    Terminal(Console(file=out, width=160)).completions(1, [(opened, 0.5)])
    assert "guess my number" in out.getvalue()
    assert "3 + 4" not in out.getvalue()


def standing(**more: Any) -> Status:
    """A step in which 3 of 64 samples wait for their reward."""
    now = time.time()
    status = Status(
        state="running", pid=1, host="here", began=now, step=12, steps=200, phase="scoring", phase_began=now - 41,
        step_began=now - 50, step_s=60.0, samples=64, sampled=64, scored=61, updates=4, updated=0,
        waiting=(WaitingSamples("reward", "judge", 3, now - 41),), roles=(RoleStatus("actor", 1, 0),),
    )  # fmt: skip
    return replace(status, **more)


STEP = {"reward/mean": 0.25, "completion/length_mean": 7.4, "time/step_s": 65.0}


def test_a_log_says_what_a_long_step_does_each_half_minute_and_nothing_of_short_ones() -> None:
    out, now = io.StringIO(), [0.0]
    terminal = Terminal(Console(file=out, width=100), clock=lambda: now[0])
    terminal.begin(200, 11)
    for now[0] in range(100):
        terminal.standing(standing())
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("step 12 of 200: scoring for 41 s; 3 of 64 samples wait for reward judge")
    for now[0] in range(100, 200):
        terminal.step(now[0], STEP)
        terminal.standing(standing())
    assert len(out.getvalue().splitlines()) == 3 + 100


def test_a_log_says_what_a_long_start_does() -> None:
    out, now = io.StringIO(), [0.0]
    terminal = Terminal(Console(file=out, width=100), clock=lambda: now[0])
    now[0] = 31.0
    terminal.standing(standing(step=0, phase="starting actor, rollout", waiting=(), samples=0, sampled=0))
    assert out.getvalue().startswith("before the first step: starting actor, rollout for 41 s; actor idle")


def test_time_left_is_known_when_steps_take_longer_than_half_a_minute() -> None:
    out, now = io.StringIO(), [0.0]
    terminal = Terminal(Console(file=out, width=100), clock=lambda: now[0])
    terminal.begin(5, 0)
    for step in (1, 2):
        now[0] += 65.0
        terminal.step(step, STEP)
    assert [line.rpartition("  ")[2] for line in out.getvalue().splitlines()] == ["4 min 20 s left", "3 min 15 s left"]
    now[0] += 30.0
    terminal.standing(standing())
    assert out.getvalue().endswith("; 2 min 45 s left\n")


def test_the_bar_shows_the_current_phase_the_last_metrics_and_the_time_left() -> None:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=True, color_system=None, width=120)
    terminal = Terminal(console, clock=lambda: now[0])
    with terminal.showing():
        terminal.begin(200, 10)
        now[0] = 65.0
        shares = {"reward/zero_std_frac": 0.5, "completion/clipped_frac": 0.25, "policy/entropy": 1.5}
        terminal.step(11, {**STEP, **shares, "time/tokens_per_s": 820.4})
        terminal.standing(standing())
    shown = out.getvalue().splitlines()
    assert any(
        "step 11/200" in line and "scoring  scored 61/64" in line and "3 h 24 min left" in line for line in shown
    )
    metrics = "step 11  reward 0.250  equal 50%  length 7  cut 25%  entropy 1.5  820 tokens/s  65.0 s/step"
    assert any(metrics in line for line in shown)
    updating = progress(standing(phase="updating", scored=64, updated=2))
    assert updating == "scored 64/64  updated 2/4"
    assert progress(standing(sampled=12, scored=3)) == "sampled 12/64  scored 3/64"


def test_off_a_terminal_each_step_is_one_line() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=100))
    with terminal.showing():
        terminal.begin(3, 0)
        terminal.step(1, {"reward/mean": 0.25, "completion/length_mean": 7.4, "time/step_s": 1.25})
        terminal.evaluated(1, {"eval/heldout/mean": 0.5, "eval/heldout/num": 32.0})
    assert out.getvalue().splitlines() == [
        "step 1/3  reward 0.250  length 7  1.2 s/step",
        "step 1  held-out 'heldout': mean reward 0.500 over 32 prompts",
    ]
