"""An environment of several turns that rewards each of them: a word that begins with the letter that it names."""

import re
from collections.abc import Sequence
from typing import Any

from rlcore_agent_loop import Environment, Step

from rlcore.types import Message, Prompt

WORD = re.compile(r"[A-Za-z]+")


def question(letter: str) -> dict[str, str]:
    """The message that opens a turn."""
    return {"role": "user", "content": f"Say one word that begins with the letter {letter}."}


class Words(Environment):
    """Asks for a word for each letter of the column `letters`. Each right one earns its share of 1."""

    def reset(self, prompt: Prompt, seed: int) -> list[Any]:
        """The first question."""
        self.letters = str(prompt.columns["letters"])
        self.turn = 0
        return [question(self.letters[0])]

    def step(self, messages: Sequence[Message]) -> Step:
        """The reward of the last turn, and the next question."""
        word = WORD.search(str(messages[-1]["content"]))
        right = word is not None and word[0][0].upper() == self.letters[self.turn]
        self.turn += 1
        reward = right / len(self.letters)
        if self.turn == len(self.letters):
            return Step(done=True, reward=reward)
        return Step([question(self.letters[self.turn])], reward=reward)
