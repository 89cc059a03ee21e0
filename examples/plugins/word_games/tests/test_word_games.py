"""Each game keeps its contract, gives its hints and ends."""

from typing import Any

import pytest
from rlcore_agent_loop.suites import EnvironmentSuite
from rlcore_word_games import Code, Hangman, SecretNumber, quick

from rlcore import RewardError
from rlcore.testing.rewards import make_prompt, make_trajectory


def played(game: Any, answer: str, *turns: str) -> list[tuple[str, float]]:
    """The hint and the reward of each turn."""
    game.reset(make_prompt(0, answer), 1)
    steps = [game.step([{"role": "assistant", "content": turn}]) for turn in turns]
    return [(step.messages[0]["content"] if step.messages else "", step.reward) for step in steps]


@pytest.mark.parametrize(
    ("game", "answer", "turns"),
    [
        (SecretNumber(3), "7", {"I say 3": "higher, 2 left", "9!": "lower, 1 left", "7.": ""}),
        (Code(4), "1123", {"3111": "1 in place, 2 elsewhere, 3 left", "12": "say 4 digits, 2 left", "1123": ""}),
        (Hangman(), "noon", {"x": "____, 7 left", "o": "_oo_, 6 left", "n": ""}),
    ],
)
def test_hints_lead_to_the_secret(game: Any, answer: str, turns: dict[str, str]) -> None:
    found = played(game, answer, *turns)
    assert [hint for hint, _ in found] == list(turns.values())
    assert [reward for _, reward in found] == [0.0, 0.0, 1.0]


def test_a_game_takes_any_text_for_a_guess_and_ends_without_a_reward_when_its_turns_are_used() -> None:
    assert played(SecretNumber(2), "7", "x", "") == [("say a whole number, 1 left", 0.0), ("", 0.0)]
    found = played(SecretNumber(4), "7", "--5", "9" * 5000, "08", "007")
    hints = ["say a whole number, 3 left", "say a whole number, 2 left", "lower, 1 left", ""]
    assert found == list(zip(hints, [0.0, 0.0, 0.0, 1.0], strict=True))


def test_a_quick_win_is_worth_more() -> None:
    won = {"environment_reward": 1.0}
    assert [quick(make_trajectory(text="7", info=won, turns=turns)) for turns in (1, 2, 4)] == [1.0, 0.5, 0.25]
    with pytest.raises(RewardError, match="is not of a game"):
        quick(make_trajectory(text="7"))


class TestSecretNumber(EnvironmentSuite):
    target = "rlcore_word_games:SecretNumber"
    prompt = make_prompt(0, "7")
    known_good = ("7",)
    known_bad = ("8", "seven")
    ends_within = 8


class TestCode(TestSecretNumber):
    target = "rlcore_word_games:Code"


class TestHangman(EnvironmentSuite):
    target = "rlcore_word_games:Hangman"
    prompt = make_prompt(0, "noon")
    known_good = ("noon",)
    known_bad = ("x",)
    ends_within = 8
