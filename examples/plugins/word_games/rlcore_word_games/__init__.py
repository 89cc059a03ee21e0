"""Text games as environments of the plugin `agent_loop`: one prompt, one game, a reward at its end."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from rlcore_agent_loop import Environment, Step

from rlcore import RewardError, RewardFunction, Trajectory, hookimpl
from rlcore.types import Message, Prompt


class _Game(Environment, ABC):
    """A secret, which is the prompt's answer, and a number of turns. The reward is 1.0 for the secret, else 0.0."""

    def __init__(self, turns: int = 8) -> None:
        self._left = turns

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        """The prompt's messages; nothing is drawn from the seed."""
        self._secret = str(prompt.answer).strip().lower()
        return prompt.messages

    def step(self, messages: Sequence[Message]) -> Step:
        """A hint, unless the game ends."""
        self._left -= 1
        words = str(messages[-1].get("content") or "").lower().split()
        guess = words[-1].strip(".,:;!?'\"") if words else ""
        won = self._is_won(guess)
        done = won or self._left <= 0
        hint = "" if won else f"{self._hint(guess)}, {self._left} left"
        return Step(() if done else ({"role": "user", "content": hint},), done, float(won), info={"guess": guess})

    def _is_won(self, guess: str) -> bool:
        return guess == self._secret

    @abstractmethod
    def _hint(self, guess: str) -> str:
        """Words that tell the guess from the secret."""


class SecretNumber(_Game):
    """The answer is a whole number; hints are 'higher' and 'lower'."""

    def _is_won(self, guess: str) -> bool:
        return super()._is_won(guess) or (_is_number(guess) and int(guess) == int(self._secret))

    def _hint(self, guess: str) -> str:
        if not _is_number(guess):
            return "say a whole number"
        return "higher" if int(guess) < int(self._secret) else "lower"


class Code(_Game):
    """The answer is a code of digits; hints count digits in place, and those that stand elsewhere (Mastermind)."""

    def _hint(self, guess: str) -> str:
        if len(guess) != len(self._secret):
            return f"say {len(self._secret)} digits"
        placed = sum(digit == right for digit, right in zip(guess, self._secret, strict=True))
        return f"{placed} in place, {(Counter(guess) & Counter(self._secret)).total() - placed} elsewhere"


class Hangman(_Game):
    """The answer is a word; a turn ends with a letter or the whole word, and hints show the letters so far."""

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        self._letters: set[str] = set()
        return super().reset(prompt, seed)

    def _is_won(self, guess: str) -> bool:
        if len(guess) == 1:
            self._letters.add(guess)
        return guess == self._secret or (bool(self._secret) and set(self._secret) <= self._letters)

    def _hint(self, guess: str) -> str:
        return "".join(letter if letter in self._letters else "_" for letter in self._secret)


def _is_number(guess: str) -> bool:
    """True for a whole number of up to 18 digits; a model may write thousands, which `int` refuses."""
    return re.fullmatch(r"-?\d{1,18}", guess) is not None


def quick(trajectory: Trajectory) -> float:
    """The game's reward over the number of turns: 1.0 for the secret at once, 0.5 for the second turn.

    RewardError for a sample that no environment has rewarded.
    """
    reward = trajectory.info.get("environment_reward")
    if reward is None:
        raise RewardError("the sample is not of a game; needs plugins.agent_loop.environment")
    return float(reward) / max(1, trajectory.turns)


@hookimpl
def rlcore_reward_functions() -> list[RewardFunction]:
    return [RewardFunction(name="quick", target="rlcore_word_games:quick")]
