"""What moving a batch costs: bytes a second to a worker and back, by kind of worker.

    .venv/bin/python benchmarks/transfer.py [--smoke] [--ray] [--model DIR]

A worker returns the arrays that it is given. As a thread of the driver nothing is copied; to a child process they go
through a pipe; to an actor of Ray through its object store. Prints one JSON line: seconds of a round trip and bytes a
second (there and back counted) for batches of 1, 10 and 100 MB, whether what came back is a copy, and seconds of a call
with nothing in it. Of weights: what the actor does after a step for replicas with a copy of their own (write a model
directory, into `rollout.weights_dir`) and what each of them does (read it); the embedded rollout moves none.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import emit, summary

from rlcore.cluster.deadlines import Deadlines
from rlcore.cluster.local import LocalCluster
from rlcore.launch import plan_run
from rlcore.testing.null import SETTINGS

MEGABYTES = (1, 10, 100)
PLUGIN = '''
"""A worker that returns what it is given, as a thread, and isolated."""
RLCORE_API = "1"

from rlcore.hookspecs import hookimpl
from rlcore.plan import Component, Role, WorkerClass, WorkerRequest
from rlcore.workers import Worker


class Echo(Worker):
    def setup(self):
        pass

    def echo(self, value):
        return value


@hookimpl
def rlcore_agent_loops():
    asks = [
        WorkerRequest(Role("here", Echo), "echo", cpus=0.5),
        WorkerRequest(Role("apart", Echo), "echo", cpus=0.5, isolated=True),
    ]
    return [Component("echoing", lambda context: None, lambda config, section: asks)]


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(Echo, "echo", Echo)]
'''


async def measured(replica: Any, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Round trips of arrays of these megabytes, and of nothing."""
    echo = sys.modules["rlcore_file_echoing"].Echo.echo
    found: dict[str, Any] = {"call_s": summary([await _trip(replica, echo, None) for _ in range(10 * rounds)])}
    for size in sizes:
        value = np.zeros(size * 1_000_000, np.uint8)
        await _trip(replica, echo, value)
        seconds = summary([await _trip(replica, echo, value) for _ in range(rounds)])
        copied = not np.shares_memory(value, await replica.call(echo, value))
        found[f"{size}_MB"] = {"s": seconds, "bytes_per_s": 2 * value.nbytes / seconds["median"], "copied": copied}
    return found


def weights(model: Path, directory: Path, rounds: int) -> dict[str, Any]:
    """Writing and reading a model directory, as after every step."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rlcore.backends.hf.state import tensors_of

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    num_bytes = sum(each.numel() * each.element_size() for each in loaded.parameters())
    write_s, read_s = [], []
    for number in range(rounds):
        began = time.perf_counter()
        loaded.save_pretrained(directory / str(number), state_dict=tensors_of(loaded))
        write_s.append(time.perf_counter() - began)
        for file in (directory / str(number)).glob("*.safetensors"):
            sum(float(each.sum()) for each in load_file(file).values())  # it is mapped: reading is what takes time
        read_s.append(time.perf_counter() - began - write_s[-1])
        shutil.rmtree(directory / str(number))
    return {
        "bytes": num_bytes,
        "write": {"s": summary(write_s), "bytes_per_s": num_bytes / summary(write_s)["median"]},
        "read": {"s": summary(read_s), "bytes_per_s": num_bytes / summary(read_s)["median"]},
    }


async def _trip(replica: Any, echo: Any, value: Any) -> float:
    began = time.perf_counter()
    returned = await replica.call(echo, value)
    seconds = time.perf_counter() - began
    if value is not None and returned.shape != value.shape:
        raise ValueError("the worker returned something else")
    return seconds


async def on_cluster(backend: str, directory: Path, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Each kind of worker of a cluster."""
    more = ["cluster.object_store_gib=1"] if backend == "ray" else []
    settings = [*SETTINGS, "rollout.agent=echoing", f"cluster.backend={backend}", *more]
    plan = plan_run([], settings, ["null", str(directory / "echoing.py")])
    cluster: Any
    if backend == "ray":
        from rlcore.cluster.ray import RayCluster

        cluster = RayCluster(plan, directory, Deadlines())
    else:
        cluster = LocalCluster(plan, directory, Deadlines())
    kinds = {"local": {"here": "thread", "apart": "process"}, "ray": {"here": "actor"}}[backend]
    try:
        await cluster.open()
        found = {}
        for worker in plan.workers:
            if worker.request.role.name in kinds:
                group = await cluster.start(worker)
                found[kinds[worker.request.role.name]] = await measured(group.replicas[0], sizes, rounds)
        return found
    finally:
        await cluster.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one size, few rounds: does it still run?")
    parser.add_argument("--ray", action="store_true", help="also on Ray, which is started here")
    parser.add_argument("--model", type=Path, help="also weights: those of this model directory, through /dev/shm")
    chosen = parser.parse_args(arguments)
    sizes, rounds = (MEGABYTES[:1], 2) if chosen.smoke else (MEGABYTES, 7)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="transfer-") as scratch:
        directory = Path(scratch)
        (directory / "echoing.py").write_text(PLUGIN)
        for backend in ("local", "ray") if chosen.ray else ("local",):
            result |= asyncio.run(on_cluster(backend, directory, sizes, rounds))
    if chosen.model:
        with tempfile.TemporaryDirectory(prefix="transfer-", dir="/dev/shm") as scratch:
            result["weights"] = weights(chosen.model, Path(scratch), rounds)
    emit("transfer", result)


if __name__ == "__main__":
    main()
