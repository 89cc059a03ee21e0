"""The agent loop 'single_turn': one prompt, one response."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np

from rlcore.contracts.agents import AgentLoop, RolloutTask
from rlcore.errors import WorkerError
from rlcore.types import (
    ROLLOUT_ERROR,
    Bools,
    Completion,
    Float32s,
    FrozenDict,
    GenerateRequest,
    Int32s,
    Lane,
    Sampling,
    Trajectory,
    TrajectoryId,
)

if TYPE_CHECKING:
    from rlcore.contracts.components import BuildContext
    from rlcore.contracts.rollout import Generator
    from rlcore.contracts.tokens import Tokens


class SingleTurn(AgentLoop):
    """Continues each prompt's conversation by one assistant turn."""

    def __init__(self, generator: "Generator", tokens: "Tokens") -> None:
        self._generator = generator
        self._tokens = tokens

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Yield every trajectory of every task as soon as its completion is finished.

        Sends all requests to the generator at once.
        """
        by_id = {f"{task.prompt.id}/{task.epoch}": task for task in tasks}
        if len(by_id) != len(tasks):
            raise WorkerError(
                f"agent 'single_turn': {len(tasks)} tasks hold {len(by_id)} different pairs of prompt and epoch; each "
                "must come once"
            )
        requests = [
            GenerateRequest(
                id=name,
                token_ids=self._tokens.encode_prompt(task.prompt.messages),
                sampling=sampling,
                n=task.n,
                seed=task.seed,
            )
            for name, task in by_id.items()
        ]
        prompts = {request.id: _Opening(request.token_ids, sampling.max_tokens) for request in requests}
        async with aclosing(self._generator.generate(requests, lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                name = completion.request_id
                yield self._trajectory(by_id[name], prompts[name], completion)

    def _trajectory(self, task: RolloutTask, prompt: "_Opening", completion: Completion) -> Trajectory:
        num_prompt = len(prompt.token_ids_P)
        token_ids_T = np.concatenate((prompt.token_ids_P, completion.token_ids), dtype=np.int32)
        logprobs_T = np.concatenate((prompt.logprobs_P, completion.logprobs), dtype=np.float32)
        loss_mask_T = prompt.loss_mask_T[: len(token_ids_T)]
        versions = () if completion.error else completion.versions or ((0, completion.version),)
        return Trajectory(
            id=TrajectoryId(task.prompt.id, task.epoch, completion.sample),
            prompt=task.prompt,
            token_ids=token_ids_T,
            loss_mask=loss_mask_T,
            logprobs=logprobs_T,
            completion=self._tokens.decode(completion.token_ids.tolist()),
            finish=completion.finish,
            versions=tuple([(num_prompt + offset, version) for offset, version in versions]),
            timing=FrozenDict({"generate_s": completion.generate_s}),
            info=FrozenDict({ROLLOUT_ERROR: completion.error} if completion.error else {}),
        )


class _Opening:
    """The common beginning of a prompt's trajectories."""

    def __init__(self, token_ids: Sequence[int], max_tokens: int) -> None:
        self.token_ids_P: Int32s = np.array(token_ids, dtype=np.int32)
        self.logprobs_P: Float32s = np.zeros(len(token_ids), dtype=np.float32)
        self.loss_mask_T: Bools = np.arange(len(token_ids) + max_tokens) >= len(token_ids)
        """Array for the longest trajectory; each trajectory has a read-only prefix of it."""
        self.loss_mask_T.setflags(write=False)


def build_single_turn(context: "BuildContext") -> SingleTurn:
    """Build the component; WorkerError without the run's rollout service."""
    if context.generator is None:
        raise WorkerError("agent 'single_turn': it was built without a rollout service; it needs the role 'rollout'")
    return SingleTurn(context.generator, context.tokens)
