"""The examples of agents: the parts of one, and each on the real model for two steps."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlcore_agent_loop.tools.calls import ToolCall
from safetensors.numpy import load_file

from rlcore.imports import import_target
from rlcore.report import metrics
from rlcore.testing.rewards import make_prompt, make_trajectory

ROOT = Path(__file__).parents[3]
CALCULATOR = ROOT / "examples" / "tool_agent" / "calculator.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add(107, 323)", [ToolCall("add", {"a": 107, "b": 323})]),
        (" add(7,5)\n", [ToolCall("add", {"a": 7, "b": 5})]),
        ("I call add(107, 323)", []),
        ("add(107)", []),
        ("add(-1, 2)", []),
        ("430", []),
    ],
)
def test_a_call_of_the_calculator_is_a_separate_turn(text: str, expected: list[ToolCall]) -> None:
    assert import_target(f"{CALCULATOR}:calls")(text) == expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("assistant", "add(1, 6)"), ("tool", "7"), ("assistant", "The sum is 7.")], 1.0),
        ([("assistant", "7")], 1.0),
        ([("assistant", "add(1, 6)"), ("tool", "7"), ("assistant", "add(1, 7)")], 0.0),
        ([("assistant", "add(1, 6)"), ("tool", "7")], 0.0),
        ([("assistant", "17")], 0.0),
        ([("assistant", "-7")], 0.0),
        ([("assistant", "3.7")], 0.0),
        ([("assistant", "seven")], 0.0),
        ([], 0.0),
    ],
)
def test_the_policys_last_words_are_judged_and_not_the_tools(messages: list[tuple[str, str]], expected: float) -> None:
    conversation = tuple({"role": role, "content": content} for role, content in messages)
    assert make_prompt(7).answer == "7"
    assert import_target(f"{CALCULATOR}:is_right")(make_trajectory(7, completion=conversation)) == expected


def test_the_curve_of_a_run_says_how_far_it_came_and_shows_a_conversation(tmp_path: Path) -> None:
    logged = [
        {"step": 0, "eval/heldout/mean": 0.25, "time/unix_s": 100.0},
        {"step": 1, "reward/mean": 0.5, "agent/num_tool_calls": 3.0, "time/step_s": 50.0, "time/unix_s": 160.0},
        {"step": 1, "eval/heldout/mean": 0.75, "time/unix_s": 220.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    messages = [{"role": "assistant", "content": "add(1, 2)"}, {"role": "tool", "content": "3"}]
    sample = {"lane": "train", "prompt": [{"role": "user", "content": "1 + 2?"}], "completion": messages}
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_1.jsonl").write_text(json.dumps(sample) + "\n")
    script = ROOT / "examples" / "agent_curve.py"
    arguments = ["tool_agent", "--run", str(tmp_path), "--out", str(tmp_path / "out"), "cluster.threads=1"]
    import_target(f"{script}:main")(arguments)
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["rise"], found["minutes"], found["passed"]) == (0.5, 2.0, True)
    lines = (tmp_path / "out.md").read_text().splitlines()
    assert "one run, cluster.threads=1." in lines[2]
    assert {"| 0 | 0.0 | 0.250 |  |  |  |  |", "| 1 | 2.0 | 0.750 | 0.500 | 3 |  | 50.0 |"} <= set(lines)
    assert lines[-5:] == ["```", "user: 1 + 2?", "assistant: add(1, 2)", "tool: 3", "```"]


def trained(example: str, directory: Path) -> list[dict[str, Any]]:
    """The training conversations of two small steps of an example."""
    command = (
        f"train examples/{example}/config.yaml --plugin agent_loop train.dir={directory} train.name=run "
        "train.max_steps=2 train.prompts_per_step=2 rollout.samples_per_prompt=4 eval.sources.heldout.limit=4"
    )
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", *command.split()],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert (directory / "run" / "checkpoints" / "step_2" / "model" / "model.safetensors").is_file()
    rows = [row for step in (1, 2) for row in metrics.read_trajectories(directory / "run", step)]
    rows = [row for row in rows if row["lane"] == "train"]
    assert len(rows) == 16
    return rows


@pytest.mark.real
@pytest.mark.timeout(400)
def test_an_agent_with_the_openai_client_is_trained_through_the_endpoint(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    assert "rlcore" not in (ROOT / "examples" / "openai_agent" / "agent.py").read_text().split('"""')[2]
    for row in trained("openai_agent", tmp_path):
        assert (row["agent"]["ended_by"], len(row["agent"]["turns"])) == ("agent", 2)


@pytest.mark.real
@pytest.mark.timeout(400)
def test_the_real_model_has_calls_of_the_calculator_answered(tmp_path: Path) -> None:
    rows = trained("tool_agent", tmp_path)
    answered = [row for row in rows if any(message["role"] == "tool" for message in row["completion"])]
    assert answered
    assert all(len(row["agent"]["turns"]) == 2 for row in answered)


@pytest.mark.real
@pytest.mark.timeout(400)
def test_turns_of_the_real_model_have_separate_advantages(tmp_path: Path) -> None:
    trained("words_by_turn", tmp_path)
    differ = 0
    for step in (1, 2):
        arrays = load_file(tmp_path / "run" / "tokens" / f"step_{step:06}.train.safetensors")
        for begin, end in pairwise(arrays["row_start"]):
            positions_N, advantages_N = arrays["position"][begin:end], arrays["advantage"][begin:end]
            turns = np.split(advantages_N, np.flatnonzero(np.diff(positions_N) > 1) + 1)
            assert all((turn == turn[0]).all() for turn in turns)
            differ += len({float(turn[0]) for turn in turns}) > 1
    assert differ > 0
