"""Settings that cannot work, and whole runs on the policy without torch."""

import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop import requests
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings, EnvironmentSettings, ToolSettings

from rlcore.config import AlgoConfig, RewardConfig, RewardFunctionConfig, RunConfig
from rlcore.errors import ConfigError, RewardError
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.train import train


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ({}, "there is none"),
        ({"add": ToolSettings("add")}, "found 'add'; needs file.py:name or module:name"),
        ({"add": ToolSettings("nowhere.py:add")}, "found no file 'nowhere.py'"),
    ],
)
def test_tools_that_cannot_work_are_said_when_the_plan_is_made(tools: dict[str, ToolSettings], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        requests(RunConfig(), AgentLoopSettings(tools=tools))


def test_a_variable_that_is_named_and_not_set_is_refused_unless_workers_may_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = AgentLoopSettings(tools={"add": ToolSettings("operator:add")}, env=("OUR_KEY",))
    monkeypatch.setenv("OUR_KEY", "1")
    requests(RunConfig(), settings)
    monkeypatch.delenv("OUR_KEY")
    with pytest.raises(ConfigError, match=r"plugins\.agent_loop\.env: the environment variable 'OUR_KEY' is not set"):
        requests(RunConfig(), settings)
    requests(RunConfig(), replace(settings, workers=1))


@pytest.mark.parametrize("fn", ["environment", "environment_by_turn", "rlcore_agent_loop.rewards:environment"])
def test_the_reward_of_an_environment_is_refused_without_one_or_an_agent(fn: str) -> None:
    config = RunConfig(reward=RewardConfig(functions={"game": RewardFunctionConfig(fn)}))
    tools = AgentLoopSettings(tools={"add": ToolSettings("operator:add")})
    why = (
        rf"reward\.functions\.game\.fn: {re.escape(fn)} .* there is neither; needs plugins\.agent_loop\.environment\.fn"
    )
    with pytest.raises(ConfigError, match=why):
        requests(config, tools)
    requests(config, AgentLoopSettings(agent=AgentSettings("operator:add")))
    requests(config, replace(tools, environment=EnvironmentSettings("operator:add")))


def test_a_canary_is_refused_for_the_reward_of_an_environment() -> None:
    config = RewardConfig(functions={"game": RewardFunctionConfig("environment")}, canary="{answer}")
    settings = AgentLoopSettings(environment=EnvironmentSettings("operator:add"))
    with pytest.raises(ConfigError, match=r"reward\.canary: reward\.functions\.game\.fn=environment .* leave .* out"):
        requests(RunConfig(reward=config), settings)
    requests(RunConfig(reward=replace(config, canary="")), settings)
    requests(RunConfig(reward=replace(config, functions={"mine": RewardFunctionConfig("boxed")})), settings)


def test_rewards_by_turn_are_refused_with_an_estimator_of_scores_by_function() -> None:
    settings = AgentLoopSettings(environment=EnvironmentSettings("operator:add"))
    by_turn, total = (
        RewardConfig(functions={"game": RewardFunctionConfig(fn)}) for fn in ("environment_by_turn", "environment")
    )
    gdpo = AlgoConfig(advantage="gdpo")
    with pytest.raises(
        ConfigError, match=r"functions\.game\.fn: environment_by_turn .* reward\.functions\.game\.fn=environment,"
    ):
        requests(RunConfig(reward=by_turn, algo=gdpo), settings)
    requests(RunConfig(reward=total, algo=gdpo), settings)
    requests(RunConfig(reward=by_turn), settings)


def run_of(directory: Path, code: str, reward: str, **settings: Any) -> dict[str, Any]:
    """The configuration of a run of two steps; `code` is in mine.py, and has the reward function."""
    (directory / "mine.py").write_text(code)
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 8))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"mine": {"fn": f"{directory / 'mine.py'}:{reward}"}}},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(directory), "name": "run"},
        "plugins": {"agent_loop": {"children": 1, "describe_tools": "never", **settings}},
    }


@pytest.mark.slow
def test_a_run_with_the_plugin_trains_and_measures_the_agent(tmp_path: Path) -> None:
    code = (
        "def add(a, b):\n    return a + b\n\n"
        "def score(trajectory):\n    return float(trajectory.completion[0]['role'] == 'assistant')\n"
    )
    config = run_of(tmp_path, code, "score", tools={"add": {"fn": f"{tmp_path / 'mine.py'}:add"}})
    result = train(config, plugins=["null"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["agent/turns_mean"] for row in steps] == [1.0, 1.0]
    assert [row["reward/mine/mean"] for row in steps] == [1.0, 1.0]


@pytest.mark.slow
def test_a_run_trains_on_the_rewards_of_turns(tmp_path: Path) -> None:
    code = (
        "from rlcore_agent_loop import Environment, Step\n\n"
        "class Game(Environment):\n"
        "    def step(self, messages):\n"
        "        over = len(messages) > 2\n"
        "        return Step([{'role': 'user', 'content': 'more'}], done=over, reward=2.0 if over else 1.0)\n"
    )
    config = run_of(tmp_path, code, "", environment={"fn": f"{tmp_path / 'mine.py'}:Game"})
    config["reward"]["functions"] = {"game": {"fn": "environment_by_turn"}}
    config["rollout"] |= {"max_tokens": 1000, "stop": list(string.printable)}
    config |= {"algo": {"advantage": "turn_rloo"}}
    result = train(config, plugins=["null"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [(row["reward/mean"], row["agent/turns_mean"]) for row in steps] == [(3.0, 2.0)] * 2


FAILING = """
from rlcore_agent_loop import Environment, Step

class Game(Environment):
    def __init__(self, words=None):
        self.num_words = len(words)

    async def reset(self, prompt, seed):
        if prompt.id.endswith("/3"):
            raise LookupError("no board for this one")
        return prompt.messages

    async def step(self, messages):
        return Step(done=True)

def solve(base_url, api_key):
    raise RuntimeError("my bug")

def polite(trajectory):
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "name", "why"),
    [
        ("environment", "Game", "environment failed: environment.reset: TypeError: object of type 'NoneType'"),
        ("agent", "solve", "agent failed: RuntimeError: my bug"),
    ],
)
def test_a_run_whose_every_environment_or_agent_fails_ends_with_its_error(
    slot: str, name: str, why: str, tmp_path: Path
) -> None:
    config = run_of(tmp_path, FAILING, "polite", **{slot: {"fn": f"{tmp_path / 'mine.py'}:{name}"}})
    if slot == "agent":
        del config["plugins"]["agent_loop"]["children"], config["plugins"]["agent_loop"]["describe_tools"]
    with pytest.raises(RewardError, match=rf"8 of 8 samples failed.*: {re.escape(why)}"):
        train(config, plugins=["null"])


@pytest.mark.slow
def test_samples_whose_environment_failed_are_dropped_and_the_others_trained_on(tmp_path: Path) -> None:
    game = {"fn": f"{tmp_path / 'mine.py'}:Game", "kwargs": {"words": []}}
    config = run_of(tmp_path, FAILING, "polite", environment=game)
    config["reward"]["error_budget_frac"] = 0.5
    config["train"]["max_steps"] = 4
    result = train(config, plugins=["null"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert sum(row["reward/failed"] for row in steps) == sum(row["reward/dropped_samples"] for row in steps) == 4.0
    assert [row["reward/mean"] for row in steps] == [1.0] * 4
    rows = [row for step in range(1, 5) for row in metrics.read_trajectories(result.run_dir, step)]
    failed = [row["info"]["error"] for row in rows if row["id"]["prompt"] == "train/3"]
    assert failed == ["environment failed: environment.reset: LookupError: no board for this one"] * 4
