"""An rlcore plugin for `transfer.py`: a worker that returns what it is given, a replica that reads handed weights."""

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlcore.contracts.components import Component
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import WorkerClass
from rlcore.contracts.requests import Role, WorkerRequest
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.workers import Worker
from rlcore.types import Completion, GenerateRequest, WeightsHandle

RLCORE_API = "1"
READ = "read.json"
"""In the run directory: what the replica has read, and how long that took."""


class Echo(Worker):
    """Returns what it is given."""

    def setup(self) -> None:
        """There is nothing to load."""

    def echo(self, value: Any) -> Any:
        """The value."""
        return value


class Reader(RolloutWorker):
    """Reads every weight that it is handed, and samples nothing."""

    def setup(self) -> None:
        """There is nothing to load."""

    async def load_weights(self, handle: WeightsHandle) -> int:
        began, num_bytes = time.perf_counter(), 0
        for tensor in handed(handle):
            float(tensor.sum())  # it is mapped, or still on its way: reading is what takes time
            num_bytes += tensor.numel() * tensor.element_size()
        seconds = time.perf_counter() - began
        (self.context.run_dir / READ).write_text(json.dumps({"bytes": num_bytes, "s": seconds}))
        return handle.version

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        for _ in ():
            yield _


def handed(handle: WeightsHandle) -> Iterator[Any]:
    """The tensors, from files or from the actor's process."""
    if handle.kind == "tcp":
        from rlcore.contracts.weights import received

        yield from (tensor for _, tensor in received(handle.path))
    else:
        from safetensors.torch import load_file

        for file in Path(handle.path).glob("*.safetensors"):
            yield from load_file(file).values()


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
        WorkerClass(RolloutWorker, "reader", Reader, isolated=True, weight_sync=frozenset({"disk", "tcp"})),
    ]
