"""The suites of rewards: green on the core's scorers and manager."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import reasoning_gym

from rlcore.aio import Stopwatch
from rlcore.contracts.components import BuildContext
from rlcore.reward.calls import FunctionCalls
from rlcore.reward.functions import build_function_rewards, function_spec
from rlcore.reward.watchdog import LoopWatch
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.suites.harness import failures
from rlcore.testing.suites.reward_function import RewardFunctionSuite
from rlcore.testing.suites.reward_manager import RewardManagerSuite
from rlcore.testing.suites.scorer import ScorerSuite
from rlcore.types import Trajectory

BROKEN = Path(__file__).parent.parent / "broken" / "rewards.py"
SCORERS = Path(__file__).parent.parent / "scorers" / "scorers.py"
TASK = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]


class TestExactMatch(RewardFunctionSuite):
    target = "rlcore.reward.scorers:exact_match"
    known_good = ("7", " 7\n")
    known_bad = ("8", "77", "")
    reads_messages = True


class TestBoxed(RewardFunctionSuite):
    target = "rlcore.reward.scorers:boxed"
    known_good = (r"\boxed{7}", r"\boxed{3} no, \boxed{7}")
    known_bad = (r"\boxed{8}", "7", r"\boxed{7} no, \boxed{8}")
    reads_messages = True


class TestGsm8k(RewardFunctionSuite):
    target = "rlcore.reward.scorers:gsm8k"
    answer = "3 + 4 = <<3+4=7>>7\n#### 7"
    known_good = ("#### 7", "The answer is 7.")
    known_bad = ("#### 8", "no")


class TestMathVerify(RewardFunctionSuite):
    target = "rlcore.reward.scorers:math_verify"
    known_good = (r"$\boxed{7}$", r"$\boxed{14/2}$")
    known_bad = (r"$\boxed{8}$", "no")


class TestReasoningGym(RewardFunctionSuite):
    target = "rlcore.reward.scorers:reasoning_gym"
    answer = TASK["answer"]
    columns = {"task": "chain_sum", "question": TASK["question"], "metadata": TASK["metadata"]}
    known_good = (TASK["answer"],)
    known_bad = ("x",)


class TestFormatMatch(RewardFunctionSuite):
    target = "rlcore.reward.scorers:format_match"
    kwargs = {"pattern": "<a>.*</a>"}
    known_good = ("<a>7</a>",)
    known_bad = ("7", "<a>7")


class TestLengthPenalty(RewardFunctionSuite):
    target = "rlcore.reward.scorers:length_penalty"
    kwargs = {"free": 10, "limit": 20}
    examples = {"seven": 0.0, "x" * 30: -1.0}
    reads_messages = True


class TestCountLetter(RewardFunctionSuite):
    target = "rlcore.testing.letters:count_letter"
    examples = {"ab1": 2 / 3, "": 0.0, "123": 0.0}


class TestFunctions(RewardManagerSuite):
    target = build_function_rewards

    @staticmethod
    def expected(trajectory: Trajectory) -> float:
        return sum(letter.islower() for letter in trajectory.text()) / len(trajectory.text())


class TestFunctionsThatFail(RewardManagerSuite):
    target = build_function_rewards
    settings = {"reward.functions.letters.fn": f"{BROKEN}:right"}
    failing = (make_trajectory(9, 0, "unreadable"),)


class TestFunctionsOfGroups(RewardManagerSuite):
    target = build_function_rewards
    settings = {"reward.functions.letters.fn": f"{BROKEN}:centres", "reward.functions.letters.scope": "group"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", lambda sample: len(sample.text())),
        ("async_slow", lambda trajectory: trajectory.id.sample),
        ("trl", lambda trajectory: float(trajectory.prompt.answer in trajectory.text())),
    ],
)
def test_the_manager_is_green_on_functions_in_children(name: str, expected: Callable[[Trajectory], float]) -> None:
    settings = {"reward.functions.letters.fn": f"{SCORERS}:{name}"}
    arguments = {"target": build_function_rewards, "settings": settings, "processes": True, "expected": expected}
    only = [
        "test_each_trajectory_comes_back_once_in_either_lane_and_any_order",
        "test_each_trajectory_gets_its_own_score",
    ]
    assert failures(type("Tested", (RewardManagerSuite,), arguments), only) == {}


async def function_calls(context: BuildContext) -> AsyncIterator[FunctionCalls]:
    [(name, function)] = context.reward_functions.items()
    spec = function_spec(context, name, function.target, function.scope.value, function.kwargs)
    calls, watch = FunctionCalls(spec, context.config.reward.functions[name], 1.0, 10.0), LoopWatch()
    try:
        await calls.start(context.children, watch, Stopwatch())
        yield calls
    finally:
        await calls.close()
        watch.close()


class TestFunctionCalls(ScorerSuite):
    target = function_calls
    known_good = ("seven",)
    known_bad = ("7", "seven is 7")
