"""An agent loop samples with the settings that it was given: others are refused, in the lane that they belong to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from rlcore.errors import PluginError
from rlcore.runtime.lane_settings import LaneSettings
from rlcore.types import Completion, GenerateRequest, Lane, Sampling

TRAINING = Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.01, max_tokens=8, stop=("a",))
GREEDY = replace(TRAINING, temperature=0.0)


class Served:
    """Notes the ids of requests, and completes nothing."""

    def __init__(self) -> None:
        self.requested: list[str] = []

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        self.requested += [f"{lane}: {request.id}" for request in requests]
        for completion in ():
            yield completion


def requested(rollouts: Sequence[tuple[Sampling, Lane]], sampling: Sampling, lane: Lane) -> list[str]:
    """The requests that reach the service after rollouts with these arguments."""
    served = Served()
    lanes = LaneSettings(served, "agent 'a' of plugin 'x'")
    for arguments in rollouts:
        lanes.record(*arguments)

    async def main() -> None:
        async for _ in lanes.generate([GenerateRequest("p/0", (1,), sampling, 1, 0)], lane):
            pass

    asyncio.run(main())
    return served.requested


def test_a_turn_may_have_fewer_tokens_and_more_stop_strings() -> None:
    turn = replace(TRAINING, max_tokens=3, stop=("a", "b"))
    assert requested([(TRAINING, Lane.TRAIN)], turn, Lane.TRAIN) == ["train: p/0"]


def test_greedy_baselines_share_the_lane_of_training() -> None:
    both = [(TRAINING, Lane.TRAIN), (GREEDY, Lane.TRAIN)]
    assert requested(both, GREEDY, Lane.TRAIN) == requested(both, TRAINING, Lane.TRAIN) == ["train: p/0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)],
    ids=lambda value: str(value),
)
def test_a_request_with_other_settings_than_its_lane_is_refused(name: str, value: float) -> None:
    with pytest.raises(PluginError) as caught:
        requested([(TRAINING, Lane.TRAIN)], replace(TRAINING, **{name: value}), Lane.TRAIN)  # type: ignore[arg-type]
    assert "agent 'a' of plugin 'x': rollout(): request 'p/0' in the lane 'train' has " in str(caught.value)
    assert f"{name}={value:g}" in str(caught.value)
    assert "; needs temperature=0.6, top_p=0.9, top_k=20, min_p=0.01; pass on" in str(caught.value)


def test_a_lane_has_the_settings_of_its_rollouts_only() -> None:
    both = [(TRAINING, Lane.TRAIN), (GREEDY, Lane.EVAL)]
    assert requested(both, GREEDY, Lane.EVAL) == ["eval: p/0"]
    with pytest.raises(PluginError, match=r"in the lane 'train' has temperature=0, .*; needs temperature=0\.6, "):
        requested(both, GREEDY, Lane.TRAIN)
    with pytest.raises(PluginError, match=r"in the lane 'eval' has .*; needs another lane: no rollout has this one; "):
        requested(both[:1], TRAINING, Lane.EVAL)
