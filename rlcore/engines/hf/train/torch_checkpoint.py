"""Tensors that ranks hold rows of, in the format of torch's distributed checkpoint (`torch.distributed.checkpoint`).

The files are safetensors; the header of each says where its rows belong. So nothing is pickled, any number of ranks can
read the files of any number, and torch's `HuggingFaceStorageReader` opens the directory, here and outside rlcore.
torch's writer is not used: it holds the interpreter's lock while it copies a file into bytes, which stops training for
0.8 s per GiB (benchmarks/saving.py).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from rlcore.engines.hf.train.sharded_tensors import Rows, rows_of
from rlcore.engines.hf.train.state_files import StateFile
from rlcore.errors import CheckpointError

FILE_BYTES = 2**31
"""Size at which another file begins: a copy in host memory is released when its file is written."""
PLACES = "DCP_SHARDING_INFO"
"""Key of the header's JSON that has, by tensor, the index of its first element in the whole tensor."""


def files_of_rows(tensors: Mapping[str, Rows], part: int) -> Iterator[StateFile]:
    """The files of a rank's rows: shard number `part` of a directory."""
    groups = _by_size(tensors)
    for number, names in enumerate(groups, 1):
        places = {name: {"saved_offsets": _offsets(tensors[name].first, tensors[name].shape)} for name in names}
        yield StateFile(
            f"shard-{part + 1:05d}-model-{number:05d}-of-{len(groups):05d}.safetensors",
            {name: tensors[name].tensor for name in names},
            {PLACES: json.dumps(places)},  # safetensors writes several keys in an order that changes
        )


def read_rows(directory: Path, shapes: Mapping[str, Sequence[int]], part: int, num_parts: int) -> dict[str, Tensor]:
    """A part of each tensor, as `rows_of` splits it, in host memory; scalars are not split.

    `shapes` are those of the whole tensors. CheckpointError if the directory does not hold each whole tensor.
    """
    reader = HuggingFaceStorageReader(str(directory))
    metadata = reader.read_metadata()
    planner = _Load(metadata.state_dict_metadata, shapes, part, num_parts)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    return planner.tensors


class _Load(DefaultLoadPlanner):
    """Plans to read a part of each tensor, and holds it."""

    def __init__(
        self, saved: Mapping[str, STORAGE_TYPES], shapes: Mapping[str, Sequence[int]], part: int, num_parts: int
    ) -> None:
        super().__init__()
        self._saved = {name: _whole(name, saved.get(name), shape) for name, shape in shapes.items()}
        self._chunks = {name: _chunk(list(shape), part, num_parts) for name, shape in shapes.items()}
        self.tensors = {
            name: torch.empty(chunk.sizes, dtype=self._saved[name].properties.dtype)
            for name, chunk in self._chunks.items()
        }

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                read
                for name, chunk in self._chunks.items()
                for read in create_read_items_for_chunk_list(name, self._saved[name], [chunk])
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index.fqn]


def _chunk(shape: list[int], part: int, num_parts: int) -> ChunkStorageMetadata:
    """The place of a part in a tensor."""
    if not shape:
        return ChunkStorageMetadata(torch.Size(), torch.Size())
    rows = rows_of(shape[0], part, num_parts)
    sizes = [rows.stop - rows.start, *shape[1:]]
    return ChunkStorageMetadata(torch.Size(_offsets(rows.start, shape)), torch.Size(sizes))


def _offsets(first: int, shape: Sequence[int]) -> list[int]:
    """The place in a tensor of rows that begin with `first`."""
    return [first, *(0 for _ in shape[1:])] if shape else []


def _whole(name: str, found: STORAGE_TYPES | None, shape: Sequence[int]) -> TensorStorageMetadata:
    """Metadata of the files for a tensor; CheckpointError if they do not hold all of it."""
    chunks = found.chunks if isinstance(found, TensorStorageMetadata) else []
    num_found = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not isinstance(found, TensorStorageMetadata) or num_found != math.prod(shape) or list(found.size) != [*shape]:
        raise CheckpointError(
            f"found {num_found} of the {math.prod(shape)} numbers of '{name}'; needs the files of every rank"
        )
    return found


def _by_size(tensors: Mapping[str, Rows]) -> list[list[str]]:
    """The names of the tensors of each file."""
    groups: list[list[str]] = []
    size = 0
    for name, rows in tensors.items():
        num_bytes = rows.tensor.numel() * rows.tensor.element_size()
        if not groups or size + num_bytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    return groups
