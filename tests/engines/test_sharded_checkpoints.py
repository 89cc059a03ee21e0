"""Checkpoints whose ranks write a part each: the same bits on any number of ranks, and every file is missed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import outputs_of_ranks
from safetensors import safe_open
from torch import Tensor

from rlcore.engines.hf.train.torch_checkpoint import read_rows
from rlcore.engines.hf.train.training_state import TENSORS_DIR, VALUES_FILE
from rlcore.errors import CheckpointError
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import checkpoint

# in one process of pytest, because each that has one of these tests starts the ranks
pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("sharded_checkpoints")]

SCRIPT = Path(__file__).parent / "ranks_on_disk.py"
NUM = {"a1": 1, "b2": 2, "c4": 4, "d4": 2, "e1": 1}
"""Parts of the training state; d4 are two copies of the weights on two ranks each."""
LAYERS = 3
SHARD = f"{TENSORS_DIR}/shard-00003-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Path:
    """Checkpoints of one model by 1, 2, 4, two copies on 4, and 1 ranks, each going on from the one before."""
    directory = tmp_path_factory.mktemp("ranks")
    model = write_tiny_model(directory / "tiny", num_hidden_layers=LAYERS, tie_word_embeddings=False)
    outputs_of_ranks(SCRIPT, [(str(rank), str(directory), str(model)) for rank in range(4)])
    return directory


def state_of(directory: Path, num: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The training state that ranks have saved, each tensor whole, and its plain values."""
    assert len(list((directory / TENSORS_DIR).iterdir())) == num
    values = json.loads((directory / VALUES_FILE).read_text())
    shapes = {name: shape for name, shape in values["shapes"].items() if name.startswith("optimizer.")}
    tensors = read_rows(directory / TENSORS_DIR, shapes, 0, 1)
    return tensors, {name: values[name] for name in ("counters", "optimizer")}


def weights_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted((directory / "model").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("stage", ["b2", "c4", "d4", "e1"])
def test_another_mesh_of_ranks_resumes_with_the_same_bits(saved: Path, stage: str) -> None:
    (tensors, values), (first, plain) = state_of(saved / stage, NUM[stage]), state_of(saved / "a1", 1)
    assert values == plain
    assert plain["counters"]["updates_done"] == 1, "which the numbers of stochastic rounding are drawn from"
    for ours, theirs in ((tensors, first), (weights_of(saved / stage), weights_of(saved / "a1"))):
        assert ours.keys() == theirs.keys()
        different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
        assert not different


@pytest.mark.parametrize("stage", NUM)
def test_snapshots_of_ranks_hold_the_state_of_their_moment(saved: Path, stage: str) -> None:
    ours, theirs = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (saved / f"{stage}-copied", saved / stage)
    )
    assert ours == theirs
    assert len(ours) >= 5


def test_a_sharded_model_is_a_file_per_layer_that_from_pretrained_opens(saved: Path) -> None:
    from transformers import AutoModelForCausalLM

    names = sorted(path.name for path in (saved / "c4" / "model").glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-{LAYERS + 1:05d}.safetensors" for number in range(1, LAYERS + 2)]
    opener: Any = AutoModelForCausalLM
    opened, found = opener.from_pretrained(saved / "c4" / "model", output_loading_info=True, dtype="auto")
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in weights_of(saved / "a1").items():
        assert torch.equal(opened.state_dict()[name], tensor)
    for rank in range(4):
        written = (saved / f"written-by-{rank}").read_text().split()
        assert [name for name in written if name.startswith("c4")] == [f"c4/model/{names[rank]}"]
    parts = [path.stat().st_size for path in (saved / "c4" / TENSORS_DIR).iterdir()]
    assert len(parts) == 4
    assert max(parts) < 1.5 * min(parts)


@pytest.mark.parametrize("name", [SHARD, "model/model-00002-of-00004.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_shard_that_is_missing_or_damaged_is_named(saved: Path, tmp_path: Path, name: str, harm: str) -> None:
    staging = checkpoint.staging(tmp_path, 3)
    for path in (saved / "c4").rglob("*.*"):
        copy = staging / path.relative_to(saved / "c4")
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    published = checkpoint.publish(staging, tmp_path, 3, {}, 0)
    checkpoint.load(published)
    shard = published / name
    if harm == "missing":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"'{name}' is {harm}; choose another checkpoint"):
        checkpoint.load(published)


def test_ranks_that_do_not_see_one_run_directory_are_refused_with_their_names(saved: Path) -> None:
    lines = {(saved / f"refused-{rank}").read_text() for rank in range(4)}
    assert len({line.partition(":")[2] for line in lines}) == 1, "all ranks say the same"
    for line in lines:
        assert line.startswith(f"run directory '{saved}/run-")
        assert "rank 1 on node " in line
        assert "rank 3 on node " in line
        assert "rank 2 on node " not in line
        assert line.endswith("needs a file system that all ranks share; set train.dir to a directory on one")
    assert not [*(saved / "run").iterdir(), *(saved / "run-0").iterdir()]
