"""An rlcore plugin for `transfer.py` and `weight_sync.py`: a worker that echoes, a replica that reads weights."""

import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlcore.contracts.components import Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.weight_groups import GroupReceiver
from rlcore.contracts.weights import weights_of
from rlcore.contracts.workers import Worker
from rlcore.types import Completion, GenerateRequest, WeightsHandle

RLCORE_API = "1"
READ = "read.json"
"""File in the run directory with the bytes that a replica read, and the seconds that this took."""


class Echo(Worker):
    """Returns its argument."""

    def setup(self) -> None:
        """Does nothing: there is nothing to load."""

    def echo(self, value: Any) -> Any:
        """The value."""
        return value


class Reader(RolloutWorker):
    """Reads all weights that it receives, and samples nothing."""

    def setup(self) -> None:
        """Does nothing: there is nothing to load."""
        self._receiver = GroupReceiver()

    def close(self) -> None:
        self._receiver.close()

    async def load_weights(self, handle: WeightsHandle) -> int:
        began, num_bytes = time.perf_counter(), 0
        together = handle.kind == "nccl"
        for _, tensor in self._receiver.weights(handle) if together else weights_of(handle, borrowed=True):
            float(tensor.sum())  # the tensor is mapped, or still arriving: reading it takes the time
            num_bytes += tensor.numel() * tensor.element_size()
        seconds = time.perf_counter() - began
        written = self.context.run_dir / f"{READ}.{os.getpid()}"
        written.write_text(json.dumps({"bytes": num_bytes, "s": seconds}))
        written.replace(self.context.run_dir / READ)  # replicas write at the same time
        return handle.version

    async def sleep(self) -> None:
        """Does nothing: it shares no device."""

    async def wake(self) -> None:
        """Does nothing."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        for _ in ():
            yield _


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[Any]]:
    asks = [
        WorkerRequest(Role("here", Echo), "echo", cpus=0.5),
        WorkerRequest(Role("apart", Echo), "echo", cpus=0.5, isolated=True),
    ]
    return [Component("echoing", lambda context: None, lambda config, section: asks)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(Echo, "echo", Echo),
        WorkerClass(
            RolloutWorker,
            "reader",
            Reader,
            isolated=True,
            weight_sync=frozenset({"disk", "ipc", "nccl", "shm", "tcp"}),
        ),
    ]
