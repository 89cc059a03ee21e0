"""Several ranks score rows with one classifier: the outputs are transformers' own, and no rank has the whole model."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from forked_ranks import outputs_of_ranks

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engines.hf import ClassifierEngine
from rlcore.errors import ConfigError
from rlcore.testing.tiny import write_tiny_classifier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "ranks_classifying.py"
sys.path.insert(0, str(SCRIPT.parent))
NUM = 4
TOLERANCES = {"float64": 1e-7, "float32": 2e-6}
"""Relative to the largest output; results are float32 in both formats."""


def expected(path: Path, rows: list[list[int]], dtype: str) -> npt.NDArray[np.float64]:
    """(B, L) outputs by transformers alone, each row by itself."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=getattr(torch, dtype))
    with torch.no_grad():
        return np.array([model(input_ids=torch.tensor([row])).logits[0].double().tolist() for row in rows])


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> tuple[Path, list[dict[str, Any]]]:
    """The model, of fewer key heads than slices and fewer labels than ranks, and the findings of each rank."""
    directory = tmp_path_factory.mktemp("classifying")
    path = write_tiny_classifier(directory / "model", labels=3, key_heads=1)
    ranks = [(str(rank), str(directory), str(path)) for rank in range(NUM)]
    outputs_of_ranks(SCRIPT, ranks, {"GLOO_SOCKET_IFNAME": "lo"})
    return path, [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(NUM)]


def test_outputs_of_several_ranks_are_those_of_one_process(found: tuple[Path, list[dict[str, Any]]]) -> None:
    """One test for all meshes and formats, because each worker of pytest would start the ranks again."""
    from ranks_classifying import MESHES, rows

    path, of_ranks = found
    wanted = {dtype: expected(path, rows(), dtype) for dtype in TOLERANCES}
    wrong = []
    for mesh, dtype in itertools.product(MESHES, TOLERANCES):
        numbers = [ranks[f"{mesh}, {dtype}"] for ranks in of_ranks if f"{mesh}, {dtype}" in ranks]
        tolerance = TOLERANCES[dtype] * np.abs(wanted[dtype]).max()
        right = [
            np.array(every).shape == (9, 3)
            and np.abs(np.array(every) - wanted[dtype]).max() <= tolerance
            and np.abs(np.array(alone) - wanted[dtype][3:4]).max() <= tolerance
            and again == every
            for every, alone, again in numbers
        ]
        if right != [True] * (2 if mesh == "two sharded" else NUM):
            wrong.append((mesh, dtype, right))
    assert wrong == []


def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_tiny_classifier(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"^m\.path='.*': its files lack 1 of the weights of a Llama.*score\.weight"):
        ClassifierEngine(ModelConfig(path=str(path)), EngineConfig(), name="reward", path_key="m.path")


def test_a_classifier_that_is_not_a_decoder_with_a_linear_head_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^m\.path='.*': a BertFor.* has no linear layer 'score' on a decoder"):
        ClassifierEngine(ModelConfig(path=str(tmp_path / "model")), EngineConfig(), name="reward", path_key="m.path")


def test_a_head_that_reads_more_than_the_last_hidden_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForSequenceClassification

    path = write_tiny_classifier(tmp_path / "model")
    forward = LlamaForSequenceClassification.forward

    def doubled(self: Any, *args: Any, **settings: Any) -> Any:
        output = forward(self, *args, **settings)
        output.logits = 2.0 * output.logits
        return output

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", doubled)
    with pytest.raises(ConfigError, match="are not those of its head 'score' at the last token of a decoder"):
        ClassifierEngine(ModelConfig(path=str(path)), EngineConfig(), name="reward", path_key="m.path")


def test_a_row_may_fill_the_window_of_learned_positions(tmp_path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16, pad_token_id=1, num_labels=2
    )
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "model")
    row = [(7 * place) % 60 + 2 for place in range(16)]
    engine = ClassifierEngine(ModelConfig(path=str(tmp_path / "model")), EngineConfig(), name="reward")
    assert engine.outputs([row, row[:3]]) == pytest.approx(
        expected(tmp_path / "model", [row, row[:3]], "float32"), rel=1e-4, abs=1e-6
    )
