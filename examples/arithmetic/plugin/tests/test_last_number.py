"""The plugin's own tests: the scorer, and that rlcore finds it."""

from importlib.metadata import entry_points

import numpy as np
import pytest
from rlcore_example_arithmetic import last_number, rlcore_reward_functions

from rlcore import FinishReason, Prompt, Trajectory, TrajectoryId
from rlcore.testing import RewardFunctionSuite


def answered(response: str, answer: str = "7") -> Trajectory:
    prompt = Prompt(id="sums/0", messages=({"role": "user", "content": "3 + 4 ="},), answer=answer, source="sums")
    return Trajectory(
        id=TrajectoryId("sums/0", epoch=0, sample=0),
        prompt=prompt,
        token_ids=np.array([5, 6], dtype=np.int32),
        loss_mask=np.array([False, True]),
        logprobs=np.array([0.0, -1.0], dtype=np.float32),
        completion=response,
        finish=FinishReason.STOP,
        versions=((0, 0),),
    )


@pytest.mark.parametrize("response", ["7", "3 + 4 = 7", "The answer is 7.", "It is 7.0", "07"])
def test_a_response_that_ends_with_the_answer_scores_one(response: str) -> None:
    assert last_number(answered(response)).score == 1.0


@pytest.mark.parametrize("response", ["", "seven", "7 is not 8", "-7", "77", "3 + 4"])
def test_any_other_response_scores_zero(response: str) -> None:
    assert last_number(answered(response)).score == 0.0


def test_a_negative_answer_needs_its_sign() -> None:
    assert last_number(answered("3 - 4 = -1", answer="-1")).score == 1.0
    assert last_number(answered("3 - 4 = 1", answer="-1")).score == 0.0


def test_the_number_that_was_read_is_reported_for_majority_votes() -> None:
    assert dict(last_number(answered("3 + 4 = 8")).info) == {"answer": "8"}


def test_the_entry_point_leads_to_the_module_and_the_offer_to_the_function() -> None:
    [entry] = entry_points(group="rlcore", name="digit_sum")
    assert entry.load().last_number is last_number
    [offer] = rlcore_reward_functions()
    module, _, attribute = offer.target.partition(":")
    assert (module, attribute) == (last_number.__module__, last_number.__name__)


class TestTheContract(RewardFunctionSuite):
    target = "rlcore_example_arithmetic:last_number"
    known_good = ("7", "3 + 4 = 7")
    known_bad = ("8", "seven")
