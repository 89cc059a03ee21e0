"""The agent loop 'single_turn': one prompt, one response."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np

from rlcore.agents.loop import AgentLoop, RolloutTask
from rlcore.errors import WorkerError
from rlcore.types import Completion, FrozenDict, GenerateRequest, Lane, Sampling, Trajectory, TrajectoryId

if TYPE_CHECKING:
    from rlcore.plan import BuildContext
    from rlcore.rollout import Generator
    from rlcore.tokens import Tokens


class SingleTurn(AgentLoop):
    """Continues each prompt's conversation by one assistant turn."""

    def __init__(self, generator: "Generator", tokens: "Tokens") -> None:
        self._generator = generator
        self._tokens = tokens

    async def rollout(self, tasks: Sequence[RolloutTask], sampling: Sampling, lane: Lane) -> AsyncIterator[Trajectory]:
        """Every trajectory of every task, the moment its completion is finished; all go to the generator at once."""
        asked = {f"{task.prompt.id}/{task.epoch}": task for task in tasks}
        if len(asked) != len(tasks):
            raise WorkerError(
                f"agent 'single_turn': {len(tasks)} tasks hold {len(asked)} different pairs of prompt and epoch; each "
                "must come once"
            )
        prompts = {name: self._tokens.encode_prompt(task.prompt.messages) for name, task in asked.items()}
        requests = [
            GenerateRequest(id=name, token_ids=prompts[name], sampling=sampling, n=task.n, seed=task.seed)
            for name, task in asked.items()
        ]
        async with aclosing(self._generator.generate(requests, lane)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                name = completion.request_id
                yield self._trajectory(asked[name], prompts[name], completion)

    def _trajectory(self, task: RolloutTask, prompt_ids: tuple[int, ...], completion: Completion) -> Trajectory:
        num_prompt, num_sampled = len(prompt_ids), len(completion.token_ids)
        return Trajectory(
            id=TrajectoryId(task.prompt.id, task.epoch, completion.sample),
            prompt=task.prompt,
            token_ids=np.concatenate([np.asarray(prompt_ids, dtype=np.int32), completion.token_ids]),
            loss_mask=np.arange(num_prompt + num_sampled) >= num_prompt,
            logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), completion.logprobs]),
            completion=self._tokens.decode(completion.token_ids.tolist()),
            finish=completion.finish,
            versions=tuple(
                (num_prompt + offset, version) for offset, version in completion.versions or ((0, completion.version),)
            ),
            timing=FrozenDict({"generate_s": completion.generate_s}),
        )


def build_single_turn(context: "BuildContext") -> SingleTurn:
    """The component's builder; the run's rollout service must exist by then."""
    if context.generator is None:
        raise WorkerError("agent 'single_turn': it was built without a rollout service; it needs the role 'rollout'")
    return SingleTurn(context.generator, context.tokens)
