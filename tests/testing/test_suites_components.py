"""The suites of components and pools: green on the core's own, and collected by pytest from one line."""

from pathlib import Path

import pytest

from rlcore.agents.single_turn import build_single_turn
from rlcore.contracts.components import BuildContext
from rlcore.contracts.critic import CriticEngine, NoCritic
from rlcore.contracts.requests import WorkerRequest
from rlcore.contracts.rollout import ROLLOUT
from rlcore.plugins.builtin import rlcore_resource_pools, rlcore_reward_functions
from rlcore.testing import suites
from rlcore.testing.suites.agents import AgentLoopSuite
from rlcore.testing.suites.critic import CriticEngineSuite
from rlcore.testing.suites.harness import checks
from rlcore.testing.suites.pool import ResourcePoolSuite
from rlcore.testing.suites.reward_function import RewardFunctionSuite

pytest_plugins = ["pytester"]


def build_none(context: BuildContext) -> CriticEngine:
    return NoCritic()


class TestSingleTurn(AgentLoopSuite):
    target = build_single_turn


class TestNoCritic(CriticEngineSuite):
    target = build_none


class TestRolloutPool(ResourcePoolSuite):
    target = rlcore_resource_pools
    requests = (WorkerRequest(ROLLOUT, "copies", "rollout", replicas=2, gpus=2.0),)


@pytest.mark.slow
def test_pytest_runs_a_suite_of_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from rlcore.testing.suites.reward_function import RewardFunctionSuite

        class TestMine(RewardFunctionSuite):
            target = "rlcore.testing.letters:count_letter"
            examples = {"ab1": 0.5}
        """
    )
    done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    basic = len(checks(type("Tested", (RewardFunctionSuite,), {"target": "x:y"})))
    done.assert_outcomes(passed=basic, failed=1)  # the examples' score is wrong
    done.stdout.fnmatch_lines(["*scores 0.666666*; needs 0.5*"])


def test_a_claim_adds_checks_also_to_a_subclass_of_a_subclass() -> None:
    class Basic(RewardFunctionSuite):
        target = "rlcore.testing.letters:count_letter"

    class Further(Basic):
        examples = {"abc": 1.0}

    class Back(Further):
        examples = {}

    added = {"test_examples_have_their_scores"}
    assert set(checks(Further)) - set(checks(Basic)) == added
    assert checks(Back) == checks(Basic)


def test_every_reward_function_of_the_core_runs_through_its_suite() -> None:
    source = (Path(__file__).parent / "test_suites_rewards.py").read_text()
    for offer in rlcore_reward_functions():
        assert f'target = "{offer.target}"' in source


def test_every_public_name_of_the_suites_exists() -> None:
    for name in suites.__all__:
        assert getattr(suites, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        suites.nothing  # noqa: B018
