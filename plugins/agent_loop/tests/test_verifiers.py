"""Environments of the package verifiers, unchanged, in the environment that `make setup-verifiers` makes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.agents.program import Program
from rlcore_agent_loop.verifiers import Verifiers

from rlcore.errors import ConfigError
from rlcore.report import metrics

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
GUESS = """
import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state):
        state["tries"] += 1
        return [{"role": "user", "content": f"No. That was try {state['tries']}."}]


def tried(completion, answer, state):
    return 0.25 * state["tries"] + 0.001 * int(answer)


def shortest(completions):
    return [float(len(completion) == min(map(len, completions))) for completion in completions]


def load_environment(num, group=False):
    rows = [{"question": f"Guess {index}.", "answer": str(index)} for index in range(num)]
    rubric = vf.Rubric(funcs=[tried])
    if group:
        rubric = vf.RubricGroup([rubric, vf.Rubric(funcs=[shortest])])
    return Guess(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3, system_prompt="Play.")
"""
GYM = {"gym": "leg_counting", "num_train_examples": 4, "num_eval_examples": 1}


class Counted:
    """An agent that is made once."""

    def __init__(self, start: int) -> None:
        self.calls = start

    def __call__(self, base_url: str, api_key: str) -> float:
        self.calls += 1
        return float(self.calls)


def test_a_class_is_made_once_and_called_for_each_sample() -> None:
    program = Program(f"{__file__}:Counted", {"start": 4}, alone=False)
    arguments = {"base_url": "http://127.0.0.1", "api_key": "x", "question": "?"}
    assert [program.run(arguments), program.run(arguments)] == [5.0, 6.0]


def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"verifiers is not installed; pip install verifiers"):
        Verifiers("wordle")


def trained(directory: Path, environment: str, arguments: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    """The ending of a run on the policy without torch, once the environment's rows are written."""
    if not PYTHON.exists():
        pytest.skip("the package verifiers has a separate environment, which is not here: make setup-verifiers")
    (directory / "guess_number.py").write_text(GUESS)
    rows = [str(PYTHON), "-m", "rlcore_agent_loop.verifiers", environment, "rows.jsonl"]
    rows += ["--arguments", json.dumps(arguments)]
    settings = {
        "model.path": "none",
        "model.tokenizer": "bytes",
        "actor.backend": "null",
        "data.sources.rows.path": "rows.jsonl",
        "rollout.backend": "null",
        "rollout.samples_per_prompt": "2",
        "rollout.max_tokens": "400",
        "reward.functions.game.fn": "environment",
        "train.prompts_per_step": "4",
        "train.max_steps": "1",
        "train.dir": "runs",
        "train.name": "run",
        "plugins.agent_loop.turn_tokens": "16",
        "plugins.agent_loop.agent.fn": "rlcore_agent_loop.verifiers:Verifiers",
        "plugins.agent_loop.agent.kwargs.environment": environment,
        "plugins.agent_loop.agent.children": "1",
        **{f"plugins.agent_loop.agent.kwargs.arguments.{key}": str(value) for key, value in arguments.items()},
    }
    train = [str(PYTHON), "-m", "rlcore", "train", "--plugin", "null"]
    train += [f"{key}={value}" for key, value in settings.items()]
    for command in (rows, train):
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(directory)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert command is train or done.returncode == 0, done.stderr[-2000:]
    return done


def rolled(directory: Path, environment: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversations of a run with an environment of verifiers."""
    done = trained(directory, environment, arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["reward/failed"] for row in metrics.read(directory / "runs/run") if "reward/mean" in row] == [0.0]
    [file] = (directory / "runs/run/trajectories").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.real
def test_an_environment_of_several_turns_is_one_part_with_its_rubrics_reward(tmp_path: Path) -> None:
    found = rolled(tmp_path, "guess_number", {"num": 4})
    assert [(result["turns"], result["id"]["segment"], result["num_sampled"] <= 48) for result in found] == [
        (3, 0, True)
    ] * 8
    for result in found:
        messages = [(message["role"], message["content"]) for message in result["completion"]]
        assert [role for role, _ in messages] == ["assistant", "user", "assistant", "user", "assistant"]
        assert [messages[1], messages[3]] == [("user", "No. That was try 1."), ("user", "No. That was try 2.")]
        assert result["prompt"][0] == {"role": "system", "content": "Play."}
        assert result["score"] == pytest.approx(0.5 + 0.001 * int(result["answer"]))


@pytest.mark.real
def test_an_environment_that_verifiers_brings_along_runs_unchanged(tmp_path: Path) -> None:
    found = rolled(tmp_path, "verifiers:ReasoningGymEnv", GYM)
    assert len(found) == 8
    assert {result["agent"]["ended_by"] for result in found} == {"agent"}
    assert {result["score"] for result in found} == {0.0}, "noise is not an answer"
    assert all("legs" in result["prompt"][-1]["content"] for result in found)


@pytest.mark.real
def test_a_rubric_that_judges_the_samples_of_a_prompt_together_is_refused_before_the_first_step(tmp_path: Path) -> None:
    done = trained(tmp_path, "guess_number", {"num": 4, "group": True})
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if "judges the samples of a prompt together" in line]
    assert "environment 'guess_number': its rubric" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs/run/trajectories").exists()
