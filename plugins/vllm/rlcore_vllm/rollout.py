"""The rollout worker: a thin shell, whose `setup` imports vLLM and starts its engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from rlcore import Completion, GenerateRequest, RolloutWorker, WeightsHandle

if TYPE_CHECKING:
    from rlcore_vllm.nodes import NodeWorkers
    from rlcore_vllm.sampler import VllmSampler


class VllmRollout(RolloutWorker):
    """A vLLM engine that samples with the newest weights it received."""

    _sampler: VllmSampler | NodeWorkers
    _ending: Callable[[], AbstractContextManager[None]]

    def setup(self) -> None:
        """Start the engine, or the workers of its other nodes; WorkerError when vLLM is missing, too old, or does not
        know the model."""
        from rlcore import load_tokens
        from rlcore_vllm.engine import ending_with, engine_threads, open_engine, rollout_arguments
        from rlcore_vllm.nodes import NodeWorkers, node_arguments
        from rlcore_vllm.sampler import VllmSampler
        from rlcore_vllm.settings import VllmSettings

        context, config = self.context, self.context.config
        settings = context.settings(VllmSettings)
        threads = engine_threads(context.device, context.threads)
        arguments = rollout_arguments(config, settings, context.device) | node_arguments(context)
        if context.rank > 0:
            self._sampler, self._ending = NodeWorkers(arguments, str(context), threads), nullcontext
            return
        engine = open_engine(arguments, str(context), threads)
        tokens = load_tokens(config.model, config.data.system_prompt)
        adapter = context.weights_kind == "adapter"
        keeps = config.rollout.on_new_weights == "continue"
        self._sampler = VllmSampler(engine, tokens, str(context), takes_adapter=adapter, keeps_cache=keeps)
        self._ending = partial(ending_with, engine, context)

    def context_length(self) -> int | None:
        return self._sampler.context_length

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Every completion of every request, as each finishes. Samples of a request share its prompt's cache.

        The same requests and seeds give the same tokens, up to the low bits of the logits, which depend on the rows
        decoded together. A sample that is unfinished when weights arrive continues with the new ones, and its
        completion records where.
        """
        with self._ending():
            async with aclosing(self._sampler.generate(requests)) as completions:  # type: ignore[type-var]
                async for completion in completions:
                    yield completion

    async def load_weights(self, handle: WeightsHandle) -> int:
        with self._ending():
            return await self._sampler.load_weights(handle)

    async def sleep(self) -> None:
        """Stop sampling. On a GPU, also free its memory."""
        await self._sampler.sleep(release=self.context.device != "cpu")

    async def wake(self) -> None:
        await self._sampler.wake()

    async def health(self) -> str:
        return await self._sampler.health()

    def close(self) -> None:
        if hasattr(self, "_sampler"):
            self._sampler.close()
