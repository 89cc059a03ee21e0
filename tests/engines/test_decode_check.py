"""The check of decoding compares both of its passes with the plain forward pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.engines.hf.sample.decode_check import _differences, _expected
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.testing.tiny import write_tiny_model

torch.set_num_threads(1)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("row", [0, 1])
def test_a_wrong_logit_of_either_pass_is_found(row: int, position: int, tmp_path: Path) -> None:
    config = ModelConfig(path=str(write_tiny_model(tmp_path / "model")))
    model = load_model(ModelKind.CAUSAL_LM, config, dtype="float64", device="cpu")
    assert isinstance(model, PolicyModel)
    rows: list[Any] = [
        SimpleNamespace(request=SimpleNamespace(token_ids=(5, 6, 7)[:length]), token_ids=[8, 9, 10])
        for length in (3, 2)
    ]
    with torch.no_grad():
        wholes = [torch.tensor([[*row.request.token_ids, *row.token_ids]]) for row in rows]
        logits_R2V = torch.stack([model.transformer(whole_1T).logits[0, -2:] for whole_1T in wholes])
    assert float(_differences(_expected(model, rows), logits_R2V).max()) < 1e-12
    logits_R2V[row, position, 4] += logits_R2V[row, position].abs().max() / 2
    assert float(_differences(_expected(model, rows), logits_R2V).max()) == pytest.approx(0.5)
