"""The agent loop 'single_turn'."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from rlcore.agents.single_turn import SingleTurn
from rlcore.contracts.agents import RolloutTask
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import WorkerError
from rlcore.types import (
    Completion,
    FinishReason,
    GenerateRequest,
    Lane,
    Prompt,
    Sampling,
    Trajectory,
    TrajectoryId,
    frozen_messages,
)


class Echo:
    """A generator that answers sample i of a request with the byte 97 + i and the end token, last request first."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[GenerateRequest], Lane]] = []
        self.delivered = 0

    async def generate(self, requests: Sequence[GenerateRequest], lane: Lane) -> AsyncIterator[Completion]:
        self.calls.append((list(requests), lane))
        for request in reversed(requests):
            for sample in range(request.n):
                self.delivered += 1
                yield Completion(
                    request_id=request.id,
                    sample=sample,
                    token_ids=np.array([97 + sample, 256], dtype=np.int32),
                    logprobs=np.array([-0.5, -0.25], dtype=np.float32),
                    finish=FinishReason.STOP,
                    version=7,
                    generate_s=1.5,
                )


def task(name: str, n: int = 2, epoch: int = 0) -> RolloutTask:
    messages = frozen_messages([{"role": "user", "content": name}])
    return RolloutTask(Prompt(f"s/{name}", messages, None, "s"), epoch, n, seed=len(name))


def rolled_out(generator: Echo, tasks: Sequence[RolloutTask]) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        return [
            trajectory async for trajectory in SingleTurn(generator, ByteTokens()).rollout(tasks, Sampling(), Lane.EVAL)
        ]

    return asyncio.run(run())


def test_every_sample_of_every_task_comes_back_with_its_own_prompt() -> None:
    trajectories = rolled_out(Echo(), [task("x", 1), task("yy", 2), task("x", 2, epoch=1)])
    expected = {("s/x", 0, 0), ("s/yy", 0, 0), ("s/yy", 0, 1), ("s/x", 1, 0), ("s/x", 1, 1)}
    assert {
        (trajectory.id.prompt, trajectory.id.epoch, trajectory.id.sample) for trajectory in trajectories
    } == expected
    for trajectory in trajectories:
        prompt_ids = ByteTokens().encode_prompt(trajectory.prompt.messages)
        assert tuple(trajectory.token_ids[: len(prompt_ids)]) == prompt_ids
        assert trajectory.prompt.id == trajectory.id.prompt
        assert trajectory.completion == "abc"[trajectory.id.sample]


def test_a_trajectory_holds_the_sampled_ids_their_logprobs_and_where_they_are() -> None:
    (trajectory,) = rolled_out(Echo(), [task("x", 1)])
    num_prompt = len(ByteTokens().encode_prompt(trajectory.prompt.messages))
    assert trajectory.id == TrajectoryId("s/x", 0, 0)
    assert trajectory.token_ids.tolist()[num_prompt:] == [97, 256]
    assert trajectory.token_ids.dtype == np.int32
    assert trajectory.loss_mask.tolist() == [False] * num_prompt + [True, True]
    assert trajectory.logprobs.tolist() == [0.0] * num_prompt + [-0.5, -0.25]
    assert (trajectory.finish, trajectory.versions) == (FinishReason.STOP, ((num_prompt, 7),))
    assert trajectory.timing["generate_s"] == 1.5


def test_all_tasks_go_to_the_generator_in_one_call() -> None:
    generator = Echo()
    rolled_out(generator, [task("x", 1), task("yy", 3)])
    ((requests, lane),) = generator.calls
    assert lane is Lane.EVAL
    assert [(request.id, request.n, request.seed) for request in requests] == [("s/x/0", 1, 1), ("s/yy/0", 3, 2)]


def test_each_trajectory_is_yielded_before_the_next_completion_is_asked_for() -> None:
    generator = Echo()

    async def run() -> list[int]:
        stream = SingleTurn(generator, ByteTokens()).rollout([task("x", 3)], Sampling(), Lane.TRAIN)
        return [generator.delivered async for _ in stream]

    assert asyncio.run(run()) == [1, 2, 3]


def test_a_prompt_that_comes_twice_in_one_epoch_is_refused() -> None:
    with pytest.raises(WorkerError, match="2 tasks hold 1 different"):
        rolled_out(Echo(), [task("x"), task("x")])
