"""`offload` with `sharding=fsdp2`: two gloo ranks compute, save and resume the same bits, and hold nothing at rest."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import outputs_of_ranks

from rlcore.testing.tiny import write_tiny_model

# in one process of pytest, because each that has one of these tests starts the ranks
pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("sharded_offload")]

SCRIPT = Path(__file__).parent / "ranks_offloaded.py"
BYTES = {"float32": (4, 8), "bfloat16": (2, 12)}
"""Per parameter: weights, and optimizer state once it has made a step."""


@pytest.fixture(scope="module", params=BYTES)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked_ranks: None
) -> tuple[str, Path, list[Any]]:
    """The number format, the model, and what each rank found."""
    directory = tmp_path_factory.mktemp("ranks")
    # An odd vocabulary gives shards of unequal sizes
    model = write_tiny_model(directory / "tiny", vocab_size=301, tie_word_embeddings=False)
    outputs_of_ranks(SCRIPT, [(str(rank), str(directory), str(model), request.param) for rank in range(2)])
    return request.param, model, [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("what", ["seen", "whole", "files"])
def test_no_bit_depends_on_offload(found: tuple[str, Path, list[Any]], what: str) -> None:
    for of_rank in found[2]:
        assert of_rank["True"][what] == of_rank["False"][what]
    assert found[2][0]["True"]["whole"], "the first rank has all weights to hand over"
    saved = found[2][0]["True"]["files"]
    assert saved["copied"] == saved["saved"] != saved["end"]


def test_a_resumed_step_equals_the_undisturbed_one(found: tuple[str, Path, list[Any]]) -> None:
    for of_rank in found[2]:
        seen = of_rank["True"]["seen"]
        assert seen[3:6] == seen[6:9]


def test_weights_and_state_rest_on_the_host_at_start_between_steps_and_after_a_restore(
    found: tuple[str, Path, list[Any]],
) -> None:
    from safetensors import safe_open

    dtype, model, ranks = found
    with safe_open(model / "model.safetensors", "pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    weights, state = BYTES[dtype]
    masters = 4 if dtype == "bfloat16" else 0
    rested = [sum(sizes) for sizes in zip(*(of_rank["True"]["rested"] for of_rank in ranks), strict=True)]
    at_start = (weights + masters) * parameters
    assert at_start <= rested[0] < 1.1 * at_start, "buffers rest there, too"
    for size in rested[1:]:
        assert (weights + state) * parameters <= size < 1.1 * (weights + state) * parameters
    for of_rank in ranks:
        assert not any(of_rank["False"]["rested"])
