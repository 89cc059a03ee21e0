"""Tensors in parts: what some ranks wrote, any number of ranks can read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlcore.engines.hf.train.sharded_tensors import SavedTensors, rows_of
from rlcore.engines.hf.train.state import tensors_file

NUM_ROWS = (1, 2, 3, 7, 8)


def written(directory: Path, num_parts: int) -> list[Path]:
    """Files of `num_parts` ranks: for each number of rows a tensor that counts them, and a scalar that all know."""
    paths = [directory / tensors_file(part, num_parts) for part in range(num_parts)]
    for part, path in enumerate(paths):
        tensors = {f"x.{num}": torch.arange(2 * num).view(num, 2)[rows_of(num, part, num_parts)] for num in NUM_ROWS}
        save_file({"x.step": torch.tensor(5.0), **{name: tensor.clone() for name, tensor in tensors.items()}}, path)
    return paths


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
    with SavedTensors(written(tmp_path, wrote)) as saved:
        assert sorted(saved.names("x.")) == sorted([*map(str, NUM_ROWS), "step"])
        for num in NUM_ROWS:
            parts = [saved.rows(f"x.{num}", part, reads) for part in range(reads)]
            assert torch.equal(torch.cat(parts), torch.arange(2 * num).view(num, 2))
            assert [len(part) for part in parts] == [
                len(range(num)[rows_of(num, part, reads)]) for part in range(reads)
            ]
        assert all(float(saved.rows("x.step", part, reads)) == 5.0 for part in range(reads))


def test_the_files_of_a_checkpoint_say_which_part_they_are() -> None:
    assert tensors_file() == "trainer_state.safetensors"
    assert tensors_file(1, 4) == "trainer_state-00002-of-00004.safetensors"
