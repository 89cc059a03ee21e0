"""The training state in a checkpoint: optimizer, counters, and the random states of torch, numpy and Python."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.engines.hf.train.optimizer import MasterAdamW
from rlcore.engines.hf.train.sharded_tensors import Rows, held
from rlcore.engines.hf.train.state_files import StateFile
from rlcore.engines.hf.train.torch_checkpoint import files_of_rows, read_rows
from rlcore.errors import CheckpointError, boundary

TENSORS_DIR = "trainer_state"
VALUES_FILE = "trainer_state.json"


def training_state_files(optimizer: MasterAdamW, counters: dict[str, int], part: int = 0) -> Iterator[StateFile]:
    """Optimizer, counters and random states.

    Every rank has its rows of a sharded optimizer state; the first one also has all that is not sharded.
    """
    optimizer_tensors, optimizer_values = optimizer.state()
    tensors = _prefixed("optimizer", optimizer_tensors)
    if part == 0:
        random_tensors, random_values = _random_state()
        tensors |= _prefixed("random", {name: held(tensor) for name, tensor in random_tensors.items()})
        shapes = {name: list(rows.shape) for name, rows in tensors.items()}
        values = {"counters": counters, "optimizer": optimizer_values, "random": random_values, "shapes": shapes}
        yield StateFile(VALUES_FILE, json.dumps(values).encode())
    else:
        tensors = {name: rows for name, rows in tensors.items() if 0 < rows.first < rows.shape[0]}
    yield from (file.below(TENSORS_DIR) for file in files_of_rows(tensors, part))


def load_training_state(directory: Path, optimizer: MasterAdamW, part: int = 0, num_parts: int = 1) -> dict[str, int]:
    """Restore what ranks have written, in any number of parts; returns the counters.

    CheckpointError if it is damaged or does not match.
    """
    with boundary(f"checkpoint '{directory}': reading {TENSORS_DIR}/", CheckpointError):
        values = json.loads((directory / VALUES_FILE).read_text())
        shapes: dict[str, list[int]] = values["shapes"]
        of_optimizer, of_random = (
            {name: shape for name, shape in shapes.items() if name.startswith(f"{kind}.")}
            for kind in ("optimizer", "random")
        )
        tensors = read_rows(directory / TENSORS_DIR, of_optimizer, part, num_parts)
        random_tensors = read_rows(directory / TENSORS_DIR, of_random, 0, 1)
        optimizer.restore(_without_prefix(tensors), values["optimizer"])
        _set_random_state(_without_prefix(random_tensors), values["random"])
        return {name: int(value) for name, value in values["counters"].items()}


def _prefixed(prefix: str, tensors: dict[str, Rows]) -> dict[str, Rows]:
    return {f"{prefix}.{name}": rows for name, rows in tensors.items()}


def _without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items()}


def _random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    numpy_state: tuple[Any, ...] = tuple(np.random.get_state(legacy=True))
    name, keys, position, has_gauss, gauss = numpy_state
    version, internal, gauss_next = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(keys.astype(np.int64))}
    if torch.cuda.is_available():
        tensors |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors, {
        "numpy": [str(name), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def _set_random_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available() and f"cuda.{torch.cuda.device_count() - 1}" in tensors:
        torch.cuda.set_rng_state_all([tensors[f"cuda.{index}"] for index in range(torch.cuda.device_count())])
    name, position, has_gauss, gauss = values["numpy"]
    np.random.set_state((name, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = values["python"]
    random.setstate((version, tuple(internal), gauss_next))
