"""Two processes that share out a model hold the numbers of the whole one: from its files to its checkpoint and back."""

import json
from pathlib import Path

import pytest
from forked_ranks import outputs_of_ranks

from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.usefixtures("forked_ranks")]

SCRIPT = Path(__file__).parent / "sharded_ranks.py"
KINDS = {
    "bfloat16, tied": ("bfloat16", "causal_lm"),
    "float32": ("float32", "causal_lm"),
    "lora": ("bfloat16", "causal_lm", "lora"),
    "value": ("bfloat16", "value"),
    "experts": ("float32", "causal_lm"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_two_ranks_share_out_is_the_whole_one_bit_for_bit(tmp_path: Path, name: str) -> None:
    """Start, scores, what is written, resume, and an update after each way of loading."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    model = write_tiny_model(
        tmp_path / "tiny",
        "Mixtral" if name == "experts" else "Llama",
        tie_word_embeddings="tied" in name,
        **(experts if name == "experts" else {}),
    )
    ranks = [(str(rank), str(tmp_path), str(model), *KINDS[name]) for rank in range(2)]
    compared = [json.loads(output.splitlines()[-1]) for output in outputs_of_ranks(SCRIPT, ranks)]
    assert compared[0].keys() - compared[1].keys() == {"copied", "written"}
    expected = {"parameters", "buffers", "scores of nine", "scores of five", "scores of one", "copied", "written"}
    trains = set() if name == "value" else {"resumed", "trained"}
    assert compared[0].keys() == expected | {"masters"} | trains
    assert compared[0]["masters"] == (compared[0]["parameters"] if name == "bfloat16, tied" else compared[0]["masters"])
