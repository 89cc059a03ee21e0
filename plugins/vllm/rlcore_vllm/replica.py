"""A replica on vLLM, a generative judge or a classifier: a thin shell, so that planning does not import vllm."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore import RawScore, RewardReplica, ScoreRequest, WorkerError
from rlcore.aio import SleepGate
from rlcore.contracts.model_files import check_model_files
from rlcore.contracts.reward_models import Unreadable, model_of
from rlcore.errors import boundary
from rlcore_vllm.replica_resources import GPU_MEMORY_FRAC

if TYPE_CHECKING:
    from rlcore_vllm.nodes import NodeWorkers

KV_CACHE_GIB = 1.0


class VllmReplica(RewardReplica):
    """Answers conversations: with a number if the model has a scoring head, else with text.

    An engine over several nodes has a rank on each. The first one answers, the others have vLLM's workers.
    """

    _workers: NodeWorkers | None = None
    """The workers of the first rank's engine on this node; None on the first rank."""

    def setup(self) -> None:
        """Start the engine, or the workers of its other nodes; WorkerError when vLLM is missing, too old, or cannot
        serve the model.

        ConfigError when the model is of the wrong kind for the rewards that use it.
        """
        from rlcore_vllm.engine import device_arguments, engine_threads, open_engine
        from rlcore_vllm.nodes import NodeWorkers, node_arguments

        device, self.model = self.context.device, model_of(self.context)
        reader = self._open_reader()
        arguments = {
            "model": self.model.path,
            "dtype": self.model.dtype,
            "max_model_len": reader.max_tokens,
            "enable_sleep_mode": device != "cpu",
            **reader.arguments(),
        }
        arguments |= device_arguments(device, KV_CACHE_GIB, GPU_MEMORY_FRAC) | dict(self.model.options)
        arguments |= node_arguments(self.context)
        who, threads = str(self.context), engine_threads(device, self.context.threads)
        if self.context.rank > 0:
            self._workers = NodeWorkers(arguments, who, threads)
            return
        self.open_with(reader, open_engine(arguments, who, threads))

    def open_with(self, reader: Any, engine: Any) -> None:
        """Serve a VllmClassifier or VllmJudge with an engine."""
        from rlcore_vllm.engine import ending_with

        self._reader, self._engine = reader, engine
        self._ending = partial(ending_with, self._engine, self.context)
        self._gate = SleepGate()
        self._numbers = itertools.count()

    def _open_reader(self) -> Any:
        """A VllmClassifier or a VllmJudge, by the model's own configuration."""
        from transformers import AutoConfig

        from rlcore.contracts.reward_models import serves_scores
        from rlcore_vllm.classifier import VllmClassifier
        from rlcore_vllm.judge import VllmJudge

        path = self.model.path
        whose = f"reward model '{path}' cannot be loaded"
        with boundary(whose, WorkerError):
            check_model_files(whose, Path(path))
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if serves_scores(path, config.architectures or (), self.model.kinds):
            return VllmClassifier(self.model)
        return VllmJudge(self.model, config)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RawScore]:
        """The answer to each conversation; one that cannot be read or has a wrong option has an error instead.

        Empty on ranks other than the first.
        """
        if self._workers is not None:
            return []
        async with self._gate.inside():
            with self._ending(), boundary(f"{self.context}: its engine", WorkerError):
                return list(await asyncio.gather(*(self._answer(request) for request in requests)))

    async def _answer(self, request: ScoreRequest) -> RawScore:
        try:
            with boundary("vLLM", Unreadable):
                number = f"{request.id}.{next(self._numbers)}"
                answer: RawScore = await self._reader.answer(self._engine, request, number)
        except Unreadable as cause:
            if self._engine.errored:
                raise WorkerError(f"{self.context}: its engine: {cause}") from cause
            return RawScore(request.id, error=str(cause))  # the engine is fine: the request was at fault
        return answer

    async def health(self) -> str:
        if self._workers is not None:
            return await self._workers.health()
        with boundary(f"{self.context}: its engine", WorkerError):
            await self._engine.check_health()
        return f"{self.model.path} on vLLM, {self.context.device}"

    async def sleep(self) -> None:
        """Drain, then free the device's memory; does nothing else on a CPU. The workers of other nodes sleep when the
        engine tells them."""
        if self._workers is not None:
            return
        await self._gate.close()
        if self.context.device != "cpu" and not await self._engine.is_sleeping():
            await self._engine.sleep(1)

    async def wake(self) -> None:
        if self._workers is not None:
            return
        if not self._gate.is_open and await self._engine.is_sleeping():
            await self._engine.wake_up()
        self._gate.open()

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
        if hasattr(self, "_engine"):
            self._engine.shutdown()
