"""The workers of this backend: thin shells whose `setup` imports torch and builds the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import EngineConfig
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.reference import ReferenceSlices, ReferenceWorker
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.weight_memory import ADDRESSES
from rlcore.engines.freed_memory import device_turn, give_back_freed_memory, yield_device
from rlcore.engines.hf.listeners import Listeners
from rlcore.engines.huge_pages import use_huge_pages
from rlcore.engines.pinned_memory import pin_exactly
from rlcore.errors import WorkerError
from rlcore.types import (
    COPIED_KINDS,
    Batch,
    Completion,
    Float32s,
    GenerateRequest,
    Metrics,
    SharedPrefix,
    TokenScores,
    WeightsHandle,
)

if TYPE_CHECKING:
    from rlcore.contracts.workers import WorkerContext
    from rlcore.engines.hf.sample.sampler import EmbeddedSampler
    from rlcore.engines.hf.train.engine import TrainEngine
    from rlcore.engines.hf.train.policy_loss import PolicyLoss
    from rlcore.engines.ipc_server import IpcServer
    from rlcore.engines.weight_server import WeightsServer


class HfActor(ActorWorker):
    """The policy, trained by a `TrainEngine`."""

    engine: TrainEngine
    version: int = 0
    """Version of the last published weights."""
    is_published: bool = True
    """True if the published weights are the current ones."""
    _server: WeightsServer[Any] | None = None
    _ipc: IpcServer | None = None
    _sendable: int | None = None
    """The version that `send_weights` can send: the offered one until the weights change."""
    _loss: PolicyLoss
    before_change: Listeners
    """Called before every change of the weights, so that samplers drop values computed from them."""

    def setup(self) -> None:
        context, config = self.context, self.context.config
        prepare_process(context)

        from rlcore.algo.importance import sampler_differs
        from rlcore.engines.hf.train.engine import TrainEngine
        from rlcore.engines.hf.train.policy_loss import PolicyLoss, taught_rows
        from rlcore.engines.hf.train.ranks import ranks_of
        from rlcore.imports import import_function

        self.before_change = Listeners()
        policy_loss = partial(import_function(context.targets["policy_loss"]), **config.algo.policy_loss_kwargs)
        self._loss = PolicyLoss(policy_loss, config.algo, sampler_differs(config))
        self.engine = TrainEngine(
            "causal_lm",
            config.model,
            config.actor,
            self._loss,
            temperature=config.rollout.temperature,
            device=context.device,
            seed=context.seed,
            peak_tflops=config.cluster.peak_tflops,
            shared_prefix=context.shared_prefix,
            taught_rows=taught_rows if context.skips_rows else None,
            ranks=ranks_of(context, config.actor.context_parallel),
        )
        yield_device(context.device)

    def close(self) -> None:
        for server in (self._server, self._ipc):
            if server is not None:
                server.close()
        engine = getattr(self, "engine", None)
        if engine is not None and engine.ranks is not None:
            engine.ranks.close()

    def logprobs(self, batch: Batch) -> Float32s:
        with device_turn(self.context):
            return self.engine.logprobs(batch)

    def token_scores(self, batch: Batch) -> TokenScores:
        with device_turn(self.context):
            return self.engine.token_scores(batch)

    def update(self, minibatch: Batch) -> Metrics:
        self._weights_change()
        if self.is_published:  # generation and updates use different sizes
            give_back_freed_memory(self.context.device)
        self._loss.weights_sampled = self.is_published
        self.is_published = False
        with device_turn(self.context):
            return self.engine.update(minibatch)

    def expect(self, num_updates: int) -> None:
        self.engine.expect(num_updates)

    def begin_updates(self) -> None:
        self.engine.begin_updates()

    def end_updates(self) -> None:
        self.engine.end_updates()

    def publish(self, version: int) -> None:
        self.version, self.is_published = version, True
        give_back_freed_memory(self.context.device)

    def weights(self, version: int, directory: Path) -> WeightsHandle:
        try:
            return self._weights(version, directory)
        finally:
            yield_device(self.context.device)  # a rollout on this device loads the weights next

    def _weights(self, version: int, directory: Path) -> WeightsHandle:
        if self.context.weights_kind == "adapter":
            self.engine.save_adapter(directory)
            return WeightsHandle(version, "adapter", str(directory))
        if self.context.weights_kind == "ipc":
            self._ipc, self._sendable = self._ipc or self._open_ipc(), version
            return WeightsHandle(version, "ipc", self._of_all_ranks(self._ipc.offer()))
        for kind in COPIED_KINDS:
            if kind == self.context.weights_kind:
                return WeightsHandle(version, kind, self._offered())
        self.engine.save_whole(directory)
        return WeightsHandle(version, "directory", str(directory))

    def send_weights(self, handle: WeightsHandle) -> None:
        if self._ipc is None or handle.version != self._sendable:
            raise WorkerError(
                f"{self.context}: version {handle.version} of the weights cannot be sent any more: they have changed"
            )
        ranks = self.engine.ranks
        try:
            with closing(self.engine.named_weights(takers=None)) as tensors:
                self._ipc.send(handle.members, tensors, None if ranks is None else ranks.gather)
        finally:
            yield_device(self.context.device)

    def _offered(self) -> str:
        """The address of the current weights, which this process now offers; empty on ranks without a server.

        Through shared memory every rank offers a share, so that all of them copy at the same time. Weights that an
        adapter is merged into are those of the first rank: each rank would make all of them.
        """
        ranks, address = self.engine.ranks, ""
        are_shared_out = ranks is not None and self.context.weights_kind == "shm" and self.engine.model.adapter is None
        takers = ranks.num if ranks is not None and are_shared_out else 1
        with closing(self.engine.named_weights(takers)) as tensors:
            if self.context.rank < takers:
                self._server = self._server or self._open_server()
                address = self._server.offer(tensors)
            for _ in tensors:  # gathering needs all ranks
                pass
        return self._of_all_ranks(address) if are_shared_out else address

    def _of_all_ranks(self, address: str) -> str:
        """The addresses of all ranks, each of which passes its address."""
        ranks = self.engine.ranks
        if ranks is None:
            return address
        return ADDRESSES.join(part["address"] for part in ranks.gather({"address": address}))

    def _open_ipc(self) -> IpcServer:
        from rlcore.engines.ipc_server import IpcServer

        rollout = self.context.config.rollout
        return IpcServer(self.context.device, rollout.weights_bucket_mib, rollout.weights_deadline_s)

    def _open_server(self) -> WeightsServer[Any]:
        context, rollout = self.context, self.context.config.rollout
        if context.weights_kind == "shm":
            from rlcore.engines.memory_server import memory_server

            return memory_server()
        if context.weights_kind == "nccl":
            from rlcore.engines.group_server import group_server

            bucket_mib, transport = rollout.weights_bucket_mib, rollout.weights_transport
            return group_server(context.address, bucket_mib, transport, context.device, rollout.weights_deadline_s)
        from rlcore.engines.weight_server import tcp_server

        return tcp_server(context.address)

    def save(self, directory: Path) -> None:
        self.engine.save(directory)

    def snapshot(self) -> bool:
        self.engine.snapshot()
        return True

    async def write_snapshot(self, directory: Path) -> None:
        self.engine.write_snapshot(directory)

    def restore(self, directory: Path) -> None:
        self._weights_change()
        self.is_published = True
        self.engine.restore(directory)
        yield_device(self.context.device)

    def facts(self) -> dict[str, Any]:
        return self.engine.facts()

    def _weights_change(self) -> None:
        self._sendable = None
        self.before_change()


class HfReference(ReferenceWorker):
    """The frozen policy: an actor's model with the LoRA adapter disabled, else a second model.

    A second model has the actor's ranks and sharding, and its context parallelism if the model supports it.
    """

    engine: TrainEngine

    def setup(self) -> None:
        if self.context.host is None:
            self.engine = self._second_model()
            return
        self.engine = _host(self.context).engine
        if self.engine.model.adapter is None:
            raise WorkerError(
                f"{self.context}: it is served inside an actor without a LoRA adapter, whose weights change; give the "
                "reference a separate process or set actor.lora.enabled=true"
            )

    def _second_model(self) -> TrainEngine:
        from rlcore.engines.hf.train.engine import TrainEngine
        from rlcore.engines.hf.train.model import ModelKind
        from rlcore.engines.hf.train.ranks import ranks_of

        context, config = self.context, self.context.config
        _use_threads(context)
        path = config.reference.path
        slices = context.spec if isinstance(context.spec, ReferenceSlices) else ReferenceSlices()
        scoring = EngineConfig(
            dtype=config.actor.dtype,
            data_parallel=context.num_ranks,
            sharding=config.actor.sharding,
            dp_replicate=config.actor.dp_replicate,
            micro_batch_tokens=config.reference.micro_batch_tokens,
            context_parallel=slices.num if context.shared_prefix is SharedPrefix.TREE else 1,
        )
        return TrainEngine(
            ModelKind.CAUSAL_LM,
            # Another model has other revisions.
            replace(config.model, path=path, revision="main") if config.has_other_reference else config.model,
            scoring,
            None,
            name=context.role,
            temperature=config.rollout.temperature,
            device=context.device,
            section="actor",
            path_key="reference.path" if path else "model.path",
            shared_prefix=context.shared_prefix,
            ranks=ranks_of(context, scoring.context_parallel),
        )

    def close(self) -> None:
        engine = getattr(self, "engine", None)
        if engine is not None and engine.ranks is not None and self.context.host is None:  # else the actor's
            engine.ranks.close()

    def logprobs(self, batch: Batch) -> Float32s:
        if self.context.host is None:
            with device_turn(self.context):
                return self.engine.logprobs(batch)
        return self.engine.base_logprobs(batch, self.context.config.reference.micro_batch_tokens)


class HfRollout(RolloutWorker):
    """The embedded rollout: samples from the weights of its host, the actor."""

    _sampler: EmbeddedSampler

    def setup(self) -> None:
        import torch

        from rlcore.data.tokenizer import load_tokens
        from rlcore.engines.hf.sample.sampler import EmbeddedSampler

        context, config = self.context, self.context.config
        actor, schedule = _host(context), config.schedule
        # If no step waits for rows that are sampled during its updates, the rows wait for the step instead: each token
        # run has one version, and their cache is recomputed once per step, not after each update.
        waits = schedule.max_staleness > 1 and not schedule.stream_minibatches
        actor.engine.stay_whole()
        actor.engine.stay_on_device()
        self._sampler = EmbeddedSampler(
            actor.engine.policy,
            load_tokens(config.model, config.data.system_prompt),
            max_rows=config.rollout.max_rows,
            device=torch.device(context.device),
            version=lambda: actor.version,
            may_sample=lambda: actor.is_published or not waits,
            keeps_cache=config.rollout.on_new_weights == "continue",
            cached_tokens=0 if context.memory is None else context.memory.cached_tokens,
            prompt_tokens=config.data.max_prompt_tokens,
        )
        actor.before_change.append(self._sampler.weights_changed)
        actor.engine.before_work.append(self._sampler.forget_turns)

    def context_length(self) -> int | None:
        return _host(self.context).engine.model.context_length

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Every completion of every request, each as it finishes; calls that overlap are decoded together.

        A row that is unfinished when the weights change continues with the new ones, and its completion records from
        where. It does so at once if mini-batches are streamed, because the step may wait for it, else when the weights
        are published. Each of several ranks samples what the rollout service dealt to it.
        """
        rank, num_ranks = self.context.rank, self.context.num_ranks
        requests = [request for request in requests if request.rank % num_ranks == rank]
        if not requests:
            return
        async with aclosing(self._sampler.generate(requests)) as completions:  # type: ignore[type-var]
            async for completion in completions:
                yield completion


def prepare_process(context: WorkerContext) -> None:
    """Set the number of compute threads to the plan's, and seed Python, numpy and torch with the run's seed.

    Call it before torch is imported, which reads settings of its allocator, and before a model is loaded: checkpoints
    hold these random states.
    """
    if context.device == "cpu":
        use_huge_pages()
    else:
        pin_exactly()
    import random

    import numpy as np
    import torch

    from rlcore.engines.hf.device import prepare_device

    _use_threads(context)
    if context.device != "cpu":
        prepare_device(context)
    random.seed(context.seed)
    np.random.seed(context.seed % 2**32)
    torch.manual_seed(context.seed)


def _use_threads(context: WorkerContext) -> None:
    import torch

    if context.threads > 0:
        torch.set_num_threads(context.threads)


def actor_engine(context: WorkerContext) -> TrainEngine:
    """The training engine of the actor that a worker is embedded in.

    Its `policy` changes with every update of the actor, and its `ranks` are those of the worker. WorkerError naming the
    actual host if it is a different one.
    """
    return _host(context).engine


def _host(context: WorkerContext) -> HfActor:
    if not isinstance(context.host, HfActor):
        found = type(context.host).__name__ if context.host is not None else "nothing"
        raise WorkerError(f"{context}: it must be served inside the actor of backend 'hf', and is inside {found}")
    return context.host
