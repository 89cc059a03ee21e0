"""Tasks of reasoning_gym as environments: the task's own code judges each answer, and the policy may retry."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import reasoning_gym  # takes many seconds when new: here, it counts as the start of a child and not as a first step

from rlcore.contracts.scorer import task_score
from rlcore.errors import ChildError
from rlcore.types import Message, Prompt
from rlcore_agent_loop.conversation.environments import Environment, Step

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(Environment):
    """The rows of a source with `task: <name>`, each tried up to `max_attempts` times.

    The answer is the content of the last <answer> of a turn, else the turn's last line. The reward is the task's score
    of the last attempt, 0 for an answer on which the task's code raises.
    """

    def __init__(self, max_attempts: int = 3, retry: str = "That is not right. Try again.") -> None:
        self._left, self._retry = max_attempts, retry
        self._prompt: Prompt | None = None

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        """The prompt's own messages; ChildError for a row without a task."""
        if "task" not in prompt.columns:
            raise ChildError(f"prompt '{prompt.id}' is not of a reasoning_gym task; needs a source with `task`")
        self._prompt = prompt
        return prompt.messages

    def step(self, messages: Sequence[Message]) -> Step:
        """Judge the last turn."""
        if self._prompt is None:
            raise ChildError("step() came before reset()")
        self._left -= 1
        answer = answer_of(str(messages[-1].get("content") or ""))
        columns = dict(self._prompt.columns)
        entry = {"question": columns.get("question", ""), "answer": self._prompt.answer, **columns}
        score = task_score(_scorer(str(columns["task"])).score_answer, answer, entry)
        done = score >= 1.0 or self._left <= 0
        return Step(
            messages=() if done else ({"role": "user", "content": self._retry},),
            done=done,
            reward=score if done else 0.0,
            info={"answer": answer, "attempts_left": self._left},
        )


def answer_of(text: str) -> str:
    """The answer in a turn."""
    tagged = _ANSWER.findall(text)
    lines = text.strip().splitlines()
    return str(tagged[-1]).strip() if tagged else (lines[-1].strip() if lines else "")


@cache
def _scorer(task: str) -> Any:
    return reasoning_gym.create_dataset(task, size=1, seed=0)
