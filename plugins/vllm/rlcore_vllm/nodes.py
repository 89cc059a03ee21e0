"""An engine over several nodes: each rank of the replica starts vLLM's workers of one node.

The first rank also has the engine, which schedules for the workers of all nodes. The workers of the other nodes get
their work from it over the network, so the other ranks only watch theirs (vLLM's headless mode). vllm is imported
inside functions, as in `rlcore_vllm.engine`.
"""

import os
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rlcore import Completion, GenerateRequest, WeightsHandle, WorkerContext, WorkerError
from rlcore.errors import boundary
from rlcore.errors.redaction import displayable
from rlcore_vllm.engine import ENGINE_DIED, engine_arguments, serving
from rlcore_vllm.processes import METHOD, forking

MEET_S = 300.0
"""Timeout for all ranks to reach the rendezvous."""
PLACE, SEEN = "vllm", "vllm seen by {}"
"""Keys of the rendezvous: where the engine's workers meet, and that a rank has read it."""


def node_arguments(context: WorkerContext) -> dict[str, Any]:
    """The AsyncEngineArgs of vLLM for this rank's node; none for an engine on one node.

    All ranks must call it. WorkerError if they do not all come in time.
    """
    if context.num_ranks == 1:
        return {}
    os.environ["VLLM_HOST_IP"] = context.address  # an inherited value is that of another node
    host, _, port = _meeting_place(context).rpartition(":")
    return {
        "nnodes": context.num_ranks,
        "node_rank": context.rank,
        "master_addr": host,
        "master_port": int(port),
        "disable_custom_all_reduce": True,  # it needs the devices of one node
    }


def _meeting_place(context: WorkerContext) -> str:
    """HOST:PORT where vLLM's workers of all nodes meet: a free port of the first rank."""
    from torch.distributed.rendezvous import rendezvous

    rank, num, timeout = context.rank, context.num_ranks, timedelta(seconds=MEET_S)
    with boundary(f"{context}: meeting the replica's other nodes at {context.rendezvous}", WorkerError):
        store, *_ = next(rendezvous(context.rendezvous, rank, num, timeout=timeout))
        store.set_timeout(timeout)
        if rank == 0:
            with socket.create_server((context.address, 0)) as listening:
                store.set(PLACE, f"{context.address}:{listening.getsockname()[1]}")
            store.wait(
                [SEEN.format(other) for other in range(1, num)]
            )  # this process serves the store until it returns
        place = str(store.get(PLACE), "ascii")
        store.set(SEEN.format(rank), "yes")
    return place


class NodeWorkers:
    """vLLM's workers on a node without the engine. Calls have no effect: the engine passes them on to its workers."""

    def __init__(self, arguments: Mapping[str, Any], who: str, threads: int) -> None:
        """Start them; `arguments` as in `open_engine`. The process ends when one of them dies, so that the replica is
        restarted."""
        parsed = engine_arguments(arguments, who, threads)
        with serving(who, arguments):
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # type: ignore[import-not-found]

            method = os.environ.get(METHOD)
            config = parsed.create_engine_config(headless=True)
            self.context_length = int(config.model_config.max_model_len)
            with forking(arguments, threads, method):
                self._who, self._executor = who, MultiprocExecutor(config)
        self._executor.register_failure_callback(self._end)

    def _end(self) -> None:
        sys.stderr.write(f"{displayable(self._who)}: a worker of vLLM died\n")
        sys.stderr.flush()
        os._exit(ENGINE_DIED)

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Nothing: the first rank yields all completions."""
        return
        yield

    async def load_weights(self, handle: WeightsHandle) -> int:
        """The version, which this node's workers load together with the others."""
        return handle.version

    async def sleep(self, release: bool) -> None:
        """The workers sleep when the engine tells them."""

    async def wake(self) -> None:
        """The workers wake when the engine tells them."""

    async def health(self) -> str:
        """A description; a dead worker has ended this process."""
        return f"{self._who}: workers of another node's engine"

    def close(self) -> None:
        """End the workers."""
        self._executor.shutdown()
