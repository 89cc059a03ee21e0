"""Ranks that hold slices of each sequence have the log-probs, gradients and weights of one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_ranks import outputs_of_ranks
from torch import Tensor

from rlcore.config import ModelConfig
from rlcore.engines.hf.train import context as context_module
from rlcore.engines.hf.train.context import ContextGroup, slice_of
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, ValueModel, load_model
from rlcore.engines.hf.train.prefix_trial import check_context
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.errors import ConfigError
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import SharedPrefix

SCRIPT = Path(__file__).parent / "context_ranks.py"


def compared(directory: Path, num: int, cases: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Results of `num` ranks by case, those of the first rank."""
    outputs = outputs_of_ranks(
        SCRIPT, [(str(rank), str(num), str(directory), json.dumps(cases)) for rank in range(num)]
    )
    return list(json.loads(outputs[0].splitlines()[-1]).values())


def model(directory: Path, name: str, **settings: Any) -> str:
    """A tiny Llama."""
    return str(write_tiny_model(directory / name, **settings))


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_with_slices_equal_one_process(tmp_path: Path) -> None:
    """One key head for both, three, for which they are repeated, and as many as ranks."""
    odd = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    cases: list[dict[str, Any]] = [
        {"model": model(tmp_path, "one", num_key_value_heads=1), "context_parallel": 2},
        {"model": model(tmp_path, "three", **odd), "context_parallel": 2, "sharding": "fsdp2"},
        {"model": model(tmp_path, "two", num_key_value_heads=2), "context_parallel": 2, "lora": True},
    ]
    for found in compared(tmp_path, 2, cases):
        assert found["twelve: norm"] > 0.01


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_ranks")
def test_four_ranks_with_slices_equal_one_process(tmp_path: Path) -> None:
    """In one group with fewer key heads, and in two groups, each of which has other rows."""
    path = model(tmp_path, "two", num_key_value_heads=2)
    cases: list[dict[str, Any]] = [
        {"model": path, "context_parallel": 4},
        {"model": path, "context_parallel": 2},
        {"model": path, "context_parallel": 2, "sharding": "fsdp2", "gradient_checkpointing": True},
    ]
    for found in compared(tmp_path, 4, cases):
        assert found["conversations: norm"] > 0.01


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_ranks")
def test_four_ranks_with_two_copies_of_the_weights_equal_one_process(tmp_path: Path) -> None:
    """Two copies of two parts, on nodes that the ranks are on in turn; with LoRA, and with slices within a copy.

    Each case has another mesh: torch remembers the groups of one that a process had before.
    """
    path = model(tmp_path, "two", num_key_value_heads=2)
    copies = {"model": path, "context_parallel": 1, "sharding": "fsdp2", "dp_replicate": 2}
    cases: list[dict[str, Any]] = [
        {**copies, "nodes": 2},
        {**copies, "lora": True, "gradient_checkpointing": True},
        {**copies, "context_parallel": 2, "nodes": 3},
    ]
    for found in compared(tmp_path, 4, cases):
        assert found["conversations: norm"] > 0.01


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9])
def test_ranks_have_each_token_once_and_as_many_predictions_as_the_others(num_tokens: int) -> None:
    predict_M = np.random.default_rng(num_tokens).integers(0, num_tokens, 11)
    slices = [slice_of(num_tokens, predict_M, ContextGroup(rank, 3, None)) for rank in range(3)]
    held = np.concatenate([part.tokens_n for part in slices])
    assert sorted(held[held >= 0].tolist()) == list(range(num_tokens))
    assert len({(len(part.tokens_n), len(part.chosen_m)) for part in slices}) == 1
    chosen = np.concatenate([part.chosen_m for part in slices])
    assert chosen[slices[0].gathered_M].tolist() == list(range(11))
    places = np.concatenate([part.tokens_n[part.predict_m] for part in slices])
    assert places[slices[0].gathered_M].tolist() == predict_M.tolist()


@pytest.fixture
def llama(tmp_path: Path) -> PolicyModel | ValueModel:
    """A tiny Llama with four heads."""
    return load_model(ModelKind.CAUSAL_LM, ModelConfig(path=model(tmp_path, "llama")), dtype="float32", device="cpu")


def test_heads_and_attention_that_cannot_be_sliced_are_named(llama: PolicyModel) -> None:
    with pytest.raises(ConfigError, match=r"^actor\.context_parallel=3: its model has 4 heads of attention; needs a"):
        check_context(llama, SharedPrefix.TREE, ContextGroup(0, 3, None), "actor")
    with pytest.raises(ConfigError, match=r"need the attention of shared_prefix=tree, and it is cache; choose actor"):
        check_context(llama, SharedPrefix.CACHE, ContextGroup(0, 2, None), "actor")


def test_a_model_whose_slices_score_otherwise_is_refused(llama: PolicyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank's tokens never arrive, as of a layer that mixes tokens without the attention of `tree`."""

    def gathers_own(pieces: list[Tensor], own: Tensor, group: object) -> None:
        for piece in pieces:
            piece.copy_(own)

    monkeypatch.setattr(context_module, "_exchanged", lambda parts, context: torch.clone(parts))
    monkeypatch.setattr(context_module.dist, "all_gather", gathers_own)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be computed in slices \(its scores differ by"):
        check_context(llama, SharedPrefix.TREE, ContextGroup(0, 2, None), "actor")


def test_ranks_that_slices_do_not_divide_are_refused_before_they_meet() -> None:
    with pytest.raises(ConfigError, match="context_parallel=2: 3 ranks; needs a number that divides them"):
        Ranks(0, 3, "file:///nowhere/at/all", torch.device("cpu"), 2)
