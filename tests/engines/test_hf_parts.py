"""Tensors in parts: what some ranks wrote, any number of ranks can read, and so can torch's distributed checkpoint."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from rlcore.engines.hf.train import torch_checkpoint
from rlcore.engines.hf.train.sharded_tensors import Rows, held, rows_of
from rlcore.engines.hf.train.torch_checkpoint import files_of_rows, read_rows
from rlcore.errors import CheckpointError

NUM_ROWS = (1, 2, 3, 7, 8)
WHOLE = {f"{num}": torch.arange(2 * num).view(num, 2) for num in NUM_ROWS} | {"step": torch.tensor(5.0)}
SHAPES = {name: list(tensor.shape) for name, tensor in WHOLE.items()}


def write(directory: Path, num_parts: int) -> None:
    """The files of `num_parts` ranks; the first one has the scalar."""
    directory.mkdir(exist_ok=True)
    for part in range(num_parts):
        tensors = {"step": held(WHOLE["step"])} if part == 0 else {}
        for num in NUM_ROWS:
            rows = rows_of(num, part, num_parts)
            if rows.start < num:
                tensors[f"{num}"] = Rows(WHOLE[f"{num}"][rows], rows.start, WHOLE[f"{num}"].shape)
        for file in files_of_rows(tensors, part):
            file.write(directory)


def test_parts_follow_one_another_and_are_those_of_torch_chunk() -> None:
    for num_rows in range(12):
        for num_parts in (1, 2, 3, 5):
            lengths = [len(range(num_rows)[rows_of(num_rows, part, num_parts)]) for part in range(num_parts)]
            chunks = [len(part) for part in torch.arange(num_rows).chunk(num_parts)]
            assert lengths == [*chunks, *[0] * (num_parts - len(chunks))] or num_rows == 0
            assert sum(lengths) == num_rows


@pytest.mark.parametrize("wrote", [1, 2, 3])
@pytest.mark.parametrize("reads", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, wrote: int, reads: int) -> None:
    write(tmp_path, wrote)
    parts = [read_rows(tmp_path, SHAPES, part, reads) for part in range(reads)]
    for num in NUM_ROWS:
        assert torch.equal(torch.cat([part[f"{num}"] for part in parts]), WHOLE[f"{num}"])
        assert [len(part[f"{num}"]) for part in parts] == [
            len(range(num)[rows_of(num, part, reads)]) for part in range(reads)
        ]
    assert all(float(part["step"]) == 5.0 for part in parts)


@pytest.mark.parametrize("wrote", [1, 3])
def test_distributed_checkpoints_of_torch_open(tmp_path: Path, wrote: int) -> None:
    write(tmp_path, wrote)
    found: dict[str, Tensor] = {name: torch.full_like(tensor, -1) for name, tensor in WHOLE.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(dict(found), storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(found[name], WHOLE[name]) for name in WHOLE)


def test_a_rank_writes_files_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_checkpoint, "FILE_BYTES", 100)
    write(tmp_path, 2)
    sizes = {"shard-00001": 3, "shard-00002": 2}  # of 164 and 120 bytes
    for shard, num in sizes.items():
        names = sorted(path.name for path in tmp_path.glob(f"{shard}-*"))
        assert names == [f"{shard}-model-{number:05d}-of-{num:05d}.safetensors" for number in range(1, num + 1)]
    assert torch.equal(read_rows(tmp_path, SHAPES, 0, 1)["7"], WHOLE["7"])


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_rows_that_no_file_has_are_an_error(tmp_path: Path, shard: int) -> None:
    write(tmp_path, 3)
    next(tmp_path.glob(f"shard-{shard:05d}-*")).unlink()
    with pytest.raises(CheckpointError, match=r"^found 4 of the 6 numbers of '3'; needs the files of every rank$"):
        read_rows(tmp_path, {"3": SHAPES["3"]}, 0, 1)
