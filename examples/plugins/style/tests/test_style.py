"""Both rewards keep their contract and score as they say."""

import pytest
from rlcore_style import short, tagged

from rlcore.testing import RewardFunctionSuite
from rlcore.testing.rewards import make_trajectory


@pytest.mark.parametrize(("length", "score"), [(0, 1.0), (10, 1.0), (20, 0.5), (30, 0.0), (99, 0.0)])
def test_a_response_loses_by_the_token_after_those_that_are_free(length: int, score: float) -> None:
    assert short(make_trajectory(text="x" * length), free_tokens=10, zero_tokens=30).score == score


def test_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 0 <= free < zero"):
        short(make_trajectory(text="x"), free_tokens=30, zero_tokens=30)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>\n<answer>b</answer>", 1.0),
        ("<answer>b</answer><think>a</think>", 0.5),
        ("<think>a</think> so <answer>b</answer>", 0.5),
        ("<think>a</think>", 0.25),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.25),
        ("b", 0.0),
    ],
)
def test_tags_count_once_closed_and_in_order(text: str, score: float) -> None:
    assert tagged(make_trajectory(text=text)).score == score


class TestShort(RewardFunctionSuite):
    target = "rlcore_style:short"
    kwargs = {"free_tokens": 4, "zero_tokens": 40}
    known_good = ("yes",)
    known_bad = ("yes " * 20,)


class TestTagged(RewardFunctionSuite):
    target = "rlcore_style:tagged"
    known_good = ("<think>a</think><answer>b</answer>",)
    known_bad = ("b", "<think>")
