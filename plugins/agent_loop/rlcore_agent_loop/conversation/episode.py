"""A sample as it grows turn by turn, and the trajectories made from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.contracts.agents import RolloutTask
from rlcore.types import (
    ROLLOUT_ERROR,
    Bools,
    Completion,
    FinishReason,
    Float32s,
    FrozenDict,
    Int32s,
    Message,
    Trajectory,
    TrajectoryId,
    frozen_messages,
)

STOP, MAX_TURNS, MAX_TOKENS, TURN_TOKENS = "stop", "max_turns", "max_tokens", "turn_tokens"
TIME, SAME_CALLS, ENVIRONMENT, FAILED = "time_s", "max_same_calls", "environment", "environment_failed"
AGENT, AGENT_FAILED, ROLLOUT_FAILED = "agent", "agent_failed", "rollout_failed"
CUT = (MAX_TOKENS, TURN_TOKENS, TIME)
"""End reasons for which a response counts as truncated."""
_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(eq=False)
class Segment:
    """Tokens that follow one another."""

    ids: list[int]
    """All token ids, the prompt's included."""
    opening: Sequence[Message] = ()
    """The messages that the prompt's tokens encode; empty: those of the data."""
    num_prompt: int = field(init=False)
    logprobs: list[Float32s] = field(default_factory=list)
    """Log-probs of each turn, one per token."""
    messages: list[Message] = field(default_factory=list)
    """Messages after the prompt."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    turns: list[FrozenDict[str, Any]] = field(default_factory=list)
    """Per turn: start, num_tokens, versions, finish; after a step of the environment also reward."""
    generate_s: list[float] = field(default_factory=list)
    """Seconds of each turn's generation."""
    tools_s: list[float] = field(default_factory=list)
    """Seconds of the tools, or of the environment, that followed each turn."""
    cut_by: str = ""
    """The run's budget that cut off an agent's last turn of this part; empty: none did."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.ids)

    @property
    def num_response(self) -> int:
        """Tokens after the prompt, sampled or not."""
        return len(self.ids) - self.num_prompt

    def sampled(self, completion: Completion, message: Message) -> None:
        """Append a turn of the policy."""
        runs = completion.versions or ((0, completion.version),)
        for offset, version in runs:
            if not self.versions or self.versions[-1][1] != version:
                self.versions.append((len(self.ids) + offset, version))
        self.turns.append(
            FrozenDict(
                {
                    "start": len(self.ids),
                    "num_tokens": len(completion.token_ids),
                    "versions": tuple([version for _, version in runs]),
                    "finish": completion.finish.value,
                }
            )
        )
        self.ids += completion.token_ids.tolist()
        self.logprobs.append(completion.logprobs)
        self.messages.append(message)
        self.generate_s.append(completion.generate_s)
        self.tools_s.append(0.0)

    def append_given(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Append tokens that the policy did not sample: results, user messages, and the header of the next turn."""
        self.ids += ids
        self.messages += messages

    def waited(self, seconds: float) -> None:
        """Add the time of tools or environment after the last turn."""
        self.tools_s[-1] += seconds

    def arrays(self) -> tuple[Int32s, Bools, Float32s]:
        """(T,) token ids, a mask of the sampled ones, and log-probs (0 for tokens that were not sampled).

        Messages after the policy's last turn are dropped from training: the last token is a sampled
        one, or the prompt's last.
        """
        spans = [(turn["start"], turn["start"] + turn["num_tokens"]) for turn in self.turns]
        length = max([end for start, end in spans if end > start], default=self.num_prompt)
        mask_T, logprobs_T = np.zeros(length, dtype=np.bool_), np.zeros(length, dtype=np.float32)
        for (start, end), logprobs_N in zip(spans, self.logprobs, strict=True):
            mask_T[start:end] = True
            logprobs_T[start:end] = logprobs_N
        return np.array(self.ids if length == len(self.ids) else self.ids[:length], dtype=np.int32), mask_T, logprobs_T


@dataclass(eq=False)
class Episode:
    """One sample: its parts, its end reason, and its environment's rewards."""

    task: RolloutTask
    sample: int
    segments: list[Segment] = field(default_factory=list)
    ended_by: str = STOP
    info: dict[str, Any] = field(default_factory=dict)

    def not_sampled(self, error: str) -> str:
        """Fail the sample because a turn could not be sampled. Returns the end reason."""
        self.info["error"] = self.info[ROLLOUT_ERROR] = error
        self.ended_by = ROLLOUT_FAILED
        return ROLLOUT_FAILED

    def failed(self, ended_by: str, error: str) -> str:
        """Fail the sample because its environment or agent failed. Returns the end reason."""
        self.info["error"] = error
        self.info[ROLLOUT_ERROR] = f"{ended_by.replace('_', ' ')}: {error}"
        self.ended_by = ended_by
        return ended_by

    def add_turn_reward(self, reward: float) -> None:
        """Add the reward of the environment's step, which answered the last turn."""
        turns = self.segments[-1].turns
        turns[-1] = FrozenDict({**turns[-1], "reward": float(reward)})
        self.add_reward(reward)

    def add_reward(self, reward: float) -> None:
        """Add a reward of the environment, or of the agent."""
        self.info["environment_reward"] = self.info.get("environment_reward", 0.0) + float(reward)

    def trajectories(self) -> list[Trajectory]:
        """One per part. Each states the number of parts and why the sample ended."""
        return [self._trajectory(index, part) for index, part in enumerate(self.segments)]

    def _trajectory(self, index: int, part: Segment) -> Trajectory:
        token_ids_T, loss_mask_T, logprobs_T = part.arrays()
        last = index == len(self.segments) - 1
        opening = frozen_messages(part.opening)
        return Trajectory(
            id=TrajectoryId(self.task.prompt.id, self.task.epoch, self.sample, index),
            prompt=self.task.prompt,
            token_ids=token_ids_T,
            loss_mask=loss_mask_T,
            logprobs=logprobs_T,
            completion=frozen_messages(part.messages),
            finish=FinishReason.LENGTH if last and self.ended_by in CUT else FinishReason.STOP,
            versions=tuple(part.versions),
            turns=len(part.turns),
            num_segments=len(self.segments),
            opening=None if not opening or opening == self.task.prompt.messages else opening,
            timing=FrozenDict({"generate_s": sum(part.generate_s, 0.0), "tools_s": sum(part.tools_s, 0.0)}),
            info=FrozenDict(
                {
                    **{name: frozen(value) for name, value in self.info.items()},
                    "ended_by": self.ended_by,
                    "turns": tuple(part.turns),
                    "timing": FrozenDict({"generate_s": tuple(part.generate_s), "tools_s": tuple(part.tools_s)}),
                }
            ),
        )


def frozen(value: Any) -> Any:
    """Lists as tuples and dicts as frozen dicts, recursively, so that no reader has to copy them."""
    if type(value) in _PLAIN:  # most values; the check for a mapping is many times slower
        return value
    if isinstance(value, Mapping):
        return FrozenDict({key: frozen(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(frozen(inner) for inner in value)
    return value
