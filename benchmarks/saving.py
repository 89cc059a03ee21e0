"""A rank's training state, written as rlcore does and by the writer of torch's distributed checkpoints, in turns.

    .venv/bin/python benchmarks/saving.py [--gib 1] [--rounds 5] [--directory DIRECTORY]

Both write the same format and wait for the disk. The result has, per way, the seconds, the longest time in which
another thread of the process could not run, and the memory that was needed besides the tensors. Prints one JSON line on
stdout.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measure import collector_off, emit, machine, peak_rss_bytes, reset_peak_rss, resident_bytes, say, summary
from torch import Tensor

from rlcore.engines.hf.train.sharded_tensors import held
from rlcore.engines.hf.train.torch_checkpoint import files_of_rows, read_rows

NUM_TENSORS = 16


def by_rlcore(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the files as a checkpoint does, which are flushed before it is published."""
    for file in files_of_rows({name: held(tensor) for name, tensor in tensors.items()}, 0):
        file.write(directory)
        with (directory / file.path).open("rb") as written:
            os.fsync(written.fileno())


def by_torch(tensors: dict[str, Tensor], directory: Path) -> None:
    """The same state, which torch's writer flushes itself."""
    writer = dcp.HuggingFaceStorageWriter(str(directory), save_distributed=True)  # type: ignore[attr-defined]
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]


WAYS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {"rlcore": by_rlcore, "torch": by_torch}


@contextmanager
def longest_stop() -> Iterator[list[float]]:
    """The longest time, in seconds, between two turns of a thread that sleeps a millisecond in each."""
    found, ended = [0.0], threading.Event()

    def turns() -> None:
        last = time.perf_counter()
        while not ended.wait(0.001):
            here = time.perf_counter()
            found[0], last = max(found[0], here - last), here

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def measured(tensors: dict[str, Tensor], scratch: Path, rounds: int) -> dict[str, Any]:
    """Each way's medians, their ratio, and whether both files read back as the tensors."""
    found: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "stop_s": [], "extra_gib": []} for way in WAYS}
    for index in range(rounds):
        for way, write in WAYS.items():
            directory = scratch / f"{way}-{index}"
            directory.mkdir()
            resident = resident_bytes()
            reset_peak_rss()
            with collector_off(), longest_stop() as stop:
                began = time.perf_counter()
                write(tensors, directory)
                seconds = time.perf_counter() - began
            values = {"seconds": seconds, "stop_s": stop[0], "extra_gib": (peak_rss_bytes() - resident) / 2**30}
            for name, value in values.items():
                found[way][name].append(value)
            say(f"saving: round {index + 1}, {way}: {seconds:.3f} s, another thread stood still for {stop[0]:.3f} s")
            _check(tensors, directory)
    medians = {way: {name: summary(values) for name, values in kinds.items()} for way, kinds in found.items()}
    ratio = medians["torch"]["seconds"]["median"] / medians["rlcore"]["seconds"]["median"]
    return {**medians, "ratio": ratio}


def _check(tensors: dict[str, Tensor], directory: Path) -> None:
    """End the benchmark if a directory does not read as what was saved; then remove it."""
    read = read_rows(directory, {name: list(tensor.shape) for name, tensor in tensors.items()}, 0, 1)
    if not all(torch.equal(read[name], tensor) for name, tensor in tensors.items()):
        raise SystemExit(f"saving: '{directory}' has other numbers than were saved")
    for path in directory.iterdir():
        path.unlink()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the files are written; default: a temporary directory")
    parser.add_argument("--smoke", action="store_true", help="a megabyte, once")
    own = parser.parse_args(arguments)
    size, rounds = (2**20, 1) if own.smoke else (int(own.gib * 2**30), own.rounds)
    tensors = {f"t{index}": torch.randn(16, size // NUM_TENSORS // 64) for index in range(NUM_TENSORS)}
    with tempfile.TemporaryDirectory(prefix="saving-", dir=own.directory) as scratch:
        result = measured(tensors, Path(scratch), rounds)
    emit("saving", {"gib": size / 2**30, **result}, machine())


if __name__ == "__main__":
    main()
