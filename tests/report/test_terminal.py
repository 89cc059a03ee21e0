"""The output of a run."""

import io

import numpy as np
from rich.console import Console

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


def test_off_a_terminal_each_step_is_one_line() -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=100))
    with terminal.progress(3, 0):
        terminal.step(1, {"reward/mean": 0.25, "completion/length_mean": 7.4, "time/step_s": 1.25})
        terminal.evaluated(1, {"eval/heldout/mean": 0.5, "eval/heldout/num": 32.0})
    assert out.getvalue().splitlines() == [
        "step 1/3  reward 0.250  length 7  1.2 s/step",
        "step 1  held-out 'heldout': mean reward 0.500 over 32 prompts",
    ]
