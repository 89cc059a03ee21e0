"""Shared prefixes of models with a sliding window: exact for rows that fit the window, refused for longer ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_shared_prefixes import conversations, engine_of, gradients_of
from torch import Tensor

from rlcore.data.batch import needed_tokens, select
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.errors import ConfigError
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, SharedPrefix

torch.set_num_threads(1)

ALL = {"num_key_value_heads": 2}
SOME = {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1}
WINDOWED: dict[str, dict[str, Any]] = {"Mistral": ALL, "Qwen2": SOME}


def longest(batch: Batch) -> int:
    """Tokens of the longest row that are computed."""
    return int(needed_tokens(batch).max())


def engines_of(path: Path, **settings: Any) -> tuple[TrainEngine, TrainEngine]:
    """Rows one by one (each in a separate micro-batch), and as trees."""
    alone, tree = (engine_of(path, way, **settings) for way in (SharedPrefix.NONE, SharedPrefix.TREE))
    for engine in (alone, tree):
        for module in engine.model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = exact_norm.__get__(module)  # type: ignore[method-assign, assignment]
    return alone, tree


def exact_norm(self: Any, hidden: Tensor) -> Tensor:
    """The norm without its detour over float32."""
    weight: Tensor = self.weight
    return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def hidden_states(engine: TrainEngine, batch: Batch) -> Tensor:
    with torch.no_grad(), engine.model.attending(engine.shared_prefix):
        return engine.model.hidden_at(MicroBatch(batch, engine.device, engine.shared_prefix))


@pytest.mark.parametrize("architecture", WINDOWED)
@pytest.mark.parametrize("batch", [random_batch(num_groups=3, samples=4), conversations()], ids=["groups", "turns"])
@pytest.mark.parametrize("spare", [0, 1])
def test_outputs_and_all_gradients_of_rows_that_fit_the_window_are_those_of_rows_computed_one_by_one(
    tmp_path: Path, architecture: str, batch: Batch, spare: int
) -> None:
    window = longest(batch) + spare
    path = write_tiny_model(tmp_path, architecture, sliding_window=window, **WINDOWED[architecture])
    alone, tree = engines_of(path)
    rows = [select(batch, np.array([row])) for row in range(len(batch))]
    torch.testing.assert_close(
        hidden_states(tree, batch), torch.cat([hidden_states(alone, row) for row in rows]), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(tree.logprobs(batch), alone.logprobs(batch), rtol=0, atol=1e-6)  # float32 arrays
    found, wanted = gradients_of(tree, batch), gradients_of(alone, batch)
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-3
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_a_row_that_is_longer_than_the_window_is_refused_by_every_pass_and_by_the_attention_itself(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(num_groups=3, samples=4)
    window = longest(batch) - 1
    path = write_tiny_model(tmp_path, architecture, sliding_window=window, **WINDOWED[architecture])
    alone, tree = engines_of(path)
    fitting = select(batch, np.flatnonzero(needed_tokens(batch) <= window))
    assert 0 < len(fitting) < len(batch)
    np.testing.assert_allclose(tree.logprobs(fitting), alone.logprobs(fitting), rtol=0, atol=1e-6)
    before = [parameter.detach().clone() for parameter in tree.model.parameters()]
    found = (
        rf"^actor\.shared_prefix=tree: a row has {window + 2} tokens, and {architecture}ForCausalLM has a sliding "
        rf"window of {window}, .*; choose actor\.shared_prefix=none, or fewer tokens per row$"
    )
    for compute in (tree.logprobs, tree.token_scores, tree.update):
        with pytest.raises(ConfigError, match=found):
            compute(batch)
    assert all(torch.equal(*pair) for pair in zip(before, tree.model.parameters(), strict=True))
    monkeypatch.setattr("rlcore.engines.hf.train.engine.check_windows", lambda *_: None)
    with pytest.raises(ValueError, match=rf"sliding_window={window} and softcap=None, and a row {window + 1} tokens"):
        tree.logprobs(batch)
    alone.update(batch)


def test_the_window_is_not_ignored_where_rows_fill_it(tmp_path: Path) -> None:
    batch = random_batch(num_groups=3, samples=4)
    wide, narrow = (
        engine_of(write_tiny_model(tmp_path / name, "Mistral", sliding_window=window, **ALL), SharedPrefix.NONE)
        for name, window in (("wide", longest(batch)), ("narrow", longest(batch) - 4))
    )
    difference = np.abs(wide.logprobs(batch) - narrow.logprobs(batch)).max()
    assert difference > 1e-4, "so equality with rows one by one tells the two apart"


def test_a_model_whose_window_is_not_used_shares_prefixes_of_any_length(tmp_path: Path) -> None:
    batch = random_batch(num_groups=3, samples=4)
    path = write_tiny_model(tmp_path, "Qwen2", sliding_window=4, use_sliding_window=False, **ALL)
    alone, tree = engines_of(path)
    np.testing.assert_allclose(tree.logprobs(batch), alone.logprobs(batch), rtol=0, atol=1e-6)
    unused = write_tiny_model(
        tmp_path / "full", "Qwen2", sliding_window=4, layer_types=["full_attention"] * 2, use_sliding_window=True, **ALL
    )
    alone, tree = engines_of(unused)
    np.testing.assert_allclose(tree.logprobs(batch), alone.logprobs(batch), rtol=0, atol=1e-6)


def test_a_row_that_needs_no_prediction_has_no_length(tmp_path: Path) -> None:
    batch = random_batch(num_groups=1, samples=2)
    tokens = replace(batch.tokens, loss_mask_BT=np.zeros_like(batch.tokens.loss_mask_BT))
    silent = replace(batch, tokens=tokens, num_sampled_B=np.zeros(len(batch), dtype=np.int64))
    path = write_tiny_model(tmp_path, "Mistral", sliding_window=8, **ALL)
    assert not engine_of(path, SharedPrefix.TREE).logprobs(silent).any()
