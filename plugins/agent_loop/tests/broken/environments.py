"""Environments that each break one promise, except for the first."""

import random

from rlcore_agent_loop.conversation.environments import Environment, Step


class Guess(Environment):
    """Right is 7; three guesses."""

    def __init__(self):
        self.left = 3

    def step(self, messages):
        self.left -= 1
        right = messages[-1]["content"] == "7"
        done = right or self.left == 0
        return Step(() if done else ({"role": "user", "content": f"no, {self.left} left"},), done, float(right))


class Silent(Guess):
    def reset(self, prompt, seed):
        return ()


class NoStep(Guess):
    def step(self, messages):
        return super().step(messages).messages


class Infinite(Guess):
    def step(self, messages):
        step = super().step(messages)
        return Step(step.messages, step.done, float("inf"))


class Numbers(Guess):
    def step(self, messages):
        int(messages[-1]["content"][:1] or "x")
        return super().step(messages)


class NeedsAStep(Guess):
    def close(self):
        if self.left == 3:
            raise RuntimeError("there was no step")


class Shared(Guess):
    LEFT = [5]

    def step(self, messages):
        self.LEFT[0] -= 1
        return Step(({"role": "user", "content": f"{self.LEFT[0]} left"},))


class Dice(Guess):
    def step(self, messages):
        return Step(({"role": "user", "content": str(random.random())},))


class Endless(Guess):
    def step(self, messages):
        return Step(({"role": "user", "content": "and?"},))


class Generous(Guess):
    def step(self, messages):
        return Step(done=True, reward=1.0)


class Unpicklable(Guess):
    def step(self, messages):
        return Step(done=True, info={"function": lambda: None})
