"""The suites of the plugin and of rlcore: green on what is shipped, red on what breaks a promise."""

from pathlib import Path
from typing import IO, Any

import pytest
import reasoning_gym
from rlcore_agent_loop import build
from rlcore_agent_loop.suites import EnvironmentSuite, ToolSuite
from rlcore_agent_loop.testing import call
from rlcore_agent_loop.workers.worker import AGENT, AgentWorker, LoopWorker

from rlcore.testing import leaks
from rlcore.testing.rewards import make_prompt, make_trajectory
from rlcore.testing.suites.agents import AgentLoopSuite
from rlcore.testing.suites.harness import all_checks, failures
from rlcore.testing.suites.reward_function import RewardFunctionSuite
from rlcore.testing.suites.workers import WorkerSuite
from rlcore.types import FrozenDict

EXAMPLES = Path(__file__).parents[3] / "examples"
BROKEN = Path(__file__).parent / "broken"
SUMS = (({"a": 1, "b": 2}, "3"), ({"a": 5, "b": -2}, "3"))
COUNTED = (({"a": 1, "b": 2}, "1: 3"), ({"a": 5, "b": 2}, "2: 7"))
TASK = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]


class TestLoop(AgentLoopSuite):
    target = build
    plugins = ("agent_loop",)


class TestLoopWithATool(AgentLoopSuite):
    target = build
    plugins = ("agent_loop",)
    settings = {"plugins.agent_loop.tools.add.fn": f"{BROKEN}/tools.py:add"}
    responses = (call("add", a=1, b=2), "the answer is 3", "no call at all", f"so: {call('add', a=4, b=4)}")


class TestLoopWithAnEnvironment(AgentLoopSuite):
    target = build
    plugins = ("agent_loop",)
    settings = {"plugins.agent_loop.environment.fn": f"{BROKEN}/environments.py:Guess"}
    responses = ("7", "8", "9", "hm")


class TestLoopInWorkers(AgentLoopSuite):
    target = build
    plugins = ("agent_loop",)
    settings = {"plugins.agent_loop.workers": 1}
    workers = {"agent": LoopWorker}


class TestWorker(WorkerSuite):
    target = LoopWorker
    interface = AgentWorker
    role = AGENT.name
    plugins = ("agent_loop",)


class TestCalculator(ToolSuite):
    target = f"{EXAMPLES}/tool_agent/calculator.py:add"
    calls = SUMS


class TestReasoningGym(EnvironmentSuite):
    target = "rlcore_agent_loop.reasoning_gym:ReasoningGym"
    prompt = make_prompt(0, TASK["answer"], task="chain_sum", question=TASK["question"], metadata=TASK["metadata"])
    known_good = (TASK["answer"],)
    known_bad = ("x", "y", "z")
    ends_within = 3


class TestWordsByTurn(EnvironmentSuite):
    target = f"{EXAMPLES}/words_by_turn/words.py:Words"
    prompt = make_prompt(0, letters="AB")
    turns = ("Apple.", "the Bee")
    known_good = ("Apple.", "*bee*")
    known_bad = ("Apple.", "no b")
    ends_within = 2


class TestRewardOfTheEnvironment(RewardFunctionSuite):
    target = "rlcore_agent_loop.rewards:environment"

    def sample(self, response: Any, index: int = 0) -> Any:
        info = FrozenDict({"environment_reward": float(len(str(response)))})
        return make_trajectory(make_prompt(0), index, str(response), info=info)


@pytest.fixture(autouse=True)
def _what_is_left_behind_is_found_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.5)


TOOLS = [
    ("untyped", SUMS, "test_the_policy_can_be_shown_it"),
    ("other_name", SUMS, "test_the_policy_can_be_shown_it"),
    ("wrong", SUMS, "test_calls_have_their_results"),
    ("no_text", SUMS, "test_calls_have_their_results"),
    ("RaisesAtTheEnd", COUNTED, "test_calls_have_their_results"),
    ("gone", SUMS, "test_it_runs_in_a_separate_process"),
    ("takes_anything", SUMS, "test_a_wrong_call_is_a_text_and_disturbs_no_other"),
    ("Breaks", COUNTED, "test_a_wrong_call_is_a_text_and_disturbs_no_other"),
    ("Shared", COUNTED, "test_samples_do_not_share_state"),
]
ENVIRONMENTS = [
    ("Silent", "test_it_opens_answers_and_closes"),
    ("NoStep", "test_it_opens_answers_and_closes"),
    ("Infinite", "test_it_opens_answers_and_closes"),
    ("Unpicklable", "test_it_runs_in_a_separate_process"),
    ("NeedsAStep", "test_it_closes_without_a_step"),
    ("Numbers", "test_odd_turns_are_answered"),
    ("Shared", "test_samples_do_not_share_state"),
    ("Dice", "test_samples_do_not_share_state"),
    ("Endless", "test_it_ends"),
    ("Generous", "test_wrong_turns_earn_less_than_right_ones"),
]
GUESSES: dict[str, Any] = {"known_good": ("7",), "known_bad": ("6", "8", "9"), "ends_within": 3, "turns": ("1", "2")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "calls", "check"), TOOLS)
def test_a_broken_tool_is_red(name: str, calls: Any, check: str) -> None:
    tested = type("Tested", (ToolSuite,), {"target": f"{BROKEN}/tools.py:{name}", "calls": calls})
    assert check in failures(tested, [check])


@pytest.mark.slow
def test_without_calls_each_check_that_needs_them_says_so() -> None:
    found = failures(type("Tested", (ToolSuite,), {"target": f"{BROKEN}/tools.py:add"}))
    assert len(found) == 4
    assert all("needs `calls`, at least one" in error for error in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "calls"), [("add", SUMS), ("Notes", COUNTED)])
def test_a_tool_that_is_as_it_should_be_is_green(name: str, calls: Any) -> None:
    tested = type("Tested", (ToolSuite,), {"target": f"{BROKEN}/tools.py:{name}", "calls": calls})
    assert failures(tested) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), ENVIRONMENTS)
def test_a_broken_environment_is_red(name: str, check: str) -> None:
    tested = type("Tested", (EnvironmentSuite,), {**GUESSES, "target": f"{BROKEN}/environments.py:{name}"})
    assert check in failures(tested, [check])


@pytest.mark.slow
def test_an_environment_that_is_as_it_should_be_is_green() -> None:
    tested = type("Tested", (EnvironmentSuite,), {**GUESSES, "target": f"{BROKEN}/environments.py:Guess"})
    assert failures(tested) == {}


class Unready(LoopWorker):
    def close(self) -> None:
        self.tokens.pad_id  # noqa: B018
        super().close()


class Narrow(LoopWorker):
    async def check(self) -> None:  # type: ignore[override]
        return None


LEFT: list[IO[bytes]] = []


class Leaving(LoopWorker):
    def setup(self) -> None:
        super().setup()
        LEFT.append(open("/dev/null", "rb"))  # noqa: SIM115


WORKERS = {
    Unready: "test_it_closes_also_without_a_setup",
    Narrow: "test_it_is_what_its_role_calls_for",
    Leaving: "test_it_starts_and_ends_without_leaving_anything",
}


@pytest.mark.slow
@pytest.mark.parametrize("target", WORKERS)
def test_a_broken_worker_of_conversations_is_red(target: type[LoopWorker]) -> None:
    tested = type("Tested", (TestWorker,), {"target": target})
    try:
        assert set(failures(tested)) == {WORKERS[target]}
    finally:
        while LEFT:
            LEFT.pop().close()


@pytest.mark.parametrize(("suite", "rows"), [(ToolSuite, TOOLS), (EnvironmentSuite, ENVIRONMENTS)])
def test_every_check_has_a_mutant(suite: Any, rows: Any) -> None:
    assert set(all_checks(suite)) == {row[-1] for row in rows}
