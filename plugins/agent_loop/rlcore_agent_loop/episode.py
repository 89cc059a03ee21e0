"""A sample while it grows, turn by turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.agents import RolloutTask
from rlcore.types import Completion, Finish, FrozenDict, Trajectory, TrajectoryId, frozen_messages


@dataclass(eq=False)
class Episode:
    """The tokens and messages so far; `ids`, `mask` and `logprobs` have one entry a token, the prompt's included."""

    task: RolloutTask
    sample: int
    ids: list[int]
    mask: list[bool] = field(init=False)
    logprobs: list[float] = field(init=False)
    num_prompt: int = field(init=False)
    messages: list[dict[str, Any]] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    turns: int = 0
    generate_s: float = 0.0
    tools_s: float = 0.0
    full: bool = False
    """The results of its tools would not have fitted."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)
        self.mask = [False] * self.num_prompt
        self.logprobs = [0.0] * self.num_prompt

    @property
    def num_response(self) -> int:
        """Tokens after the prompt, sampled or not."""
        return len(self.ids) - self.num_prompt

    def sampled(self, completion: Completion, text: str) -> None:
        """The policy took a turn."""
        if not self.versions or self.versions[-1][1] != completion.version:
            self.versions.append((len(self.ids), completion.version))
        self.ids += completion.token_ids.tolist()
        self.mask += [True] * len(completion.token_ids)
        self.logprobs += completion.logprobs.tolist()
        self.messages.append({"role": "assistant", "content": text})
        self.turns += 1
        self.generate_s += completion.generate_s

    def told(self, ids: Sequence[int], role: str, results: Sequence[str]) -> None:
        """The results of its calls, which it did not sample."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.messages += [{"role": role, "content": result} for result in results]

    def trajectory(self, finish: Finish) -> Trajectory:
        """The finished sample."""
        return Trajectory(
            id=TrajectoryId(self.task.prompt.id, self.task.epoch, self.sample),
            prompt=self.task.prompt,
            token_ids=np.array(self.ids, dtype=np.int32),
            loss_mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            completion=frozen_messages(self.messages),
            finish=finish,
            versions=tuple(self.versions),
            turns=self.turns,
            timing=FrozenDict({"generate_s": self.generate_s, "tools_s": self.tools_s}),
        )
