"""Rows that share more than a prompt, computed as a tree: the same attention and gradients as row by row."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.data import token_tree
from rlcore.data.batch import needed_tokens, select
from rlcore.data.dealt import split
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.ranks import computed_tokens
from rlcore.engines.hf.train.tree import PackedBatch, pack
from rlcore.engines.hf.train.tree_attention import attend
from rlcore.testing.tiny import batch_of_rows, random_conversations, write_tiny_model
from rlcore.types import Batch, SharedPrefix

torch.set_num_threads(1)

CPU = torch.device("cpu")
HEADS = [(4, 4), (8, 2), (3, 1)]
EQUAL = [9, 1, 2, 3, 4, 0]
SHARED = "actor/shared_tokens_frac"


def named_by_path(batch: Batch) -> Batch:
    """The batch with ids that are equal where rows of a group are equal up to there, and nowhere else."""
    seen: dict[tuple[int, ...], int] = {}
    token_ids_BT = batch.tokens.token_ids_BT.copy()
    for row, length in enumerate(batch.lengths_B.tolist()):
        path = batch.tokens.token_ids_BT[row, :length].tolist()
        token_ids_BT[row, :length] = [
            seen.setdefault((int(batch.group_B[row]), *path[: end + 1]), len(seen)) for end in range(length)
        ]
    return replace(batch, tokens=replace(batch.tokens, token_ids_BT=token_ids_BT))


def row_by_row(bases: list[Tensor], batch: Batch) -> Tensor:
    """(M, heads, size): attention from which each loss token is predicted, by a plain softmax over its row."""
    outputs, repeats = [], bases[0].shape[1] // bases[1].shape[1]
    for ids, needed in zip(batch.tokens.token_ids_BT, needed_tokens(batch).tolist(), strict=True):
        query, key, value = (base[torch.tensor(ids[:needed]).long()].transpose(0, 1) for base in bases)
        scores = query @ key.repeat_interleave(repeats, 0).transpose(-1, -2) * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~torch.ones(needed, needed, dtype=torch.bool).tril(), -torch.inf)
        outputs.append((scores.softmax(-1) @ value.repeat_interleave(repeats, 0)).transpose(0, 1))
    return torch.cat(outputs)


def check_equal(groups: list[list[list[int]]], heads: int, key_heads: int) -> PackedBatch:
    batch = named_by_path(batch_of_rows(groups))
    sequence = pack(batch, CPU)
    generator = torch.Generator().manual_seed(len(batch))
    names = int(batch.tokens.token_ids_BT.max()) + 1
    bases = [
        torch.randn(names, num, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        for num in (heads, key_heads, key_heads)
    ]
    inputs = [base[sequence.token_ids_N].transpose(0, 1)[None] for base in bases]
    ours, plain = (
        attend(*inputs, sequence.tree)[0].transpose(0, 1)[sequence.predict_M],
        row_by_row(bases, batch),
    )
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    results = [ours, *torch.autograd.grad(ours, bases, grad)]
    expected = [plain, *torch.autograd.grad(plain, bases, grad)]
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
    return sequence


@pytest.fixture
def shares_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_tree, "JOINED_PER_TOKEN", np.inf)
    monkeypatch.setattr(token_tree, "LEVEL_TOKENS", 0)


@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.usefixtures("shares_everything")
def test_ragged_conversations_equal_rows_computed_one_by_one_in_output_and_all_gradients(
    seed: int, heads: int, key_heads: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_conversations(rng, rows=int(rng.integers(1, 9))) for _ in range(rng.integers(1, 5))]
    sequence = check_equal([*groups, random_conversations(rng, rows=20, turns=6, longest=5)], heads, key_heads)
    assert len(sequence.tree.levels) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_by_the_rule_that_shares_what_saves_they_are_equal_too(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [random_conversations(rng, rows=16, turns=6, longest=60) for _ in range(3)]
    assert len(check_equal(groups, 8, 2).tree.levels) >= 2


@pytest.mark.parametrize(
    ("groups", "levels"),
    [
        ([[EQUAL, EQUAL, EQUAL]], 0),
        ([[EQUAL[:3], EQUAL, EQUAL[:2], EQUAL[:5]]], 0),
        ([[[1, 2, 3], [4, 5, 6], [7, 8]]], 0),
        ([[EQUAL, EQUAL, [9, 1, 2, 7, 7, 0], [9, 1, 2, 7, 7, 0]]], 1),
        ([[[9, 1], [9, 1, 2], [9, 1, 2, 3, 4], [9, 1, 2, 5, 4], [9, 6, 6]]], 2),
        ([[EQUAL, [9, 1, 2, 3, 5, 5, 0]], [EQUAL, EQUAL], [[3, 3, 3], [3, 4, 4], [5, 5]]], 1),
    ],
    ids=["equal rows", "prefixes of another", "nothing in common", "two equal pairs", "ends inside", "several groups"],
)
@pytest.mark.parametrize(("heads", "key_heads"), HEADS)
@pytest.mark.usefixtures("shares_everything")
def test_rows_at_the_edges_equal_rows_computed_one_by_one(
    groups: list[list[list[int]]], levels: int, heads: int, key_heads: int
) -> None:
    sequence = check_equal(groups, heads, key_heads)
    assert len(sequence.tree.levels) == levels
    distinct = {(group, *row[:end]) for group, rows in enumerate(groups) for row in rows for end in range(1, len(row))}
    assert len(sequence.token_ids_N) == len(distinct)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose norms compute in float64, too."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "max_position_embeddings": 256}
    return write_tiny_model(tmp_path_factory.mktemp("models") / "gpt2", "GPT2", **sizes)


def engine_of(path: Path, shared: SharedPrefix, budget: int = 100_000, dtype: str = "float64") -> TrainEngine:
    config = EngineConfig(dtype=dtype, micro_batch_tokens=budget)  # type: ignore[arg-type]
    loss = PolicyLoss(clip, AlgoConfig(entropy_coef=0.1))
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, loss, shared_prefix=shared)


def gradients_of(engine: TrainEngine, batch: Batch) -> tuple[dict[str, float], Tensor]:
    """Metrics and gradients of an update that changes nothing."""
    seen: list[Tensor] = []
    engine._optimizer.step = lambda lr: seen.extend(  # type: ignore[method-assign]
        parameter.grad.flatten().clone() for parameter in engine._optimizer.parameters if parameter.grad is not None
    )
    metrics = engine.update(batch)
    return dict(metrics), torch.cat(seen)


def long_conversations() -> Batch:
    rng = np.random.default_rng(1)
    return batch_of_rows([random_conversations(rng, rows=12, turns=5, longest=40) for _ in range(3)])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [60, 300, 100_000])
def test_gradients_and_logprobs_of_a_model_are_those_of_rows_one_by_one_under_any_split(
    model: Path, budget: int
) -> None:
    batch = long_conversations()
    assert len(pack(batch, CPU).tree.levels) >= 2
    plain, sharing = engine_of(model, SharedPrefix.NONE), engine_of(model, SharedPrefix.TREE, budget)
    np.testing.assert_allclose(sharing.logprobs(batch), plain.logprobs(batch), rtol=0, atol=1e-6)  # written in float32
    (_, wanted), (_, found) = gradients_of(plain, batch), gradients_of(sharing, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_an_update_of_conversations_is_the_same_bit_for_bit_each_time(model: Path) -> None:
    runs = [gradients_of(engine_of(model, SharedPrefix.TREE, 300, "float32"), long_conversations()) for _ in range(2)]
    assert torch.equal(runs[0][1], runs[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("budget", [300, 100_000])
def test_the_shared_tokens_that_are_logged_are_those_that_no_micro_batch_computes(model: Path, budget: int) -> None:
    batch = long_conversations()
    engine = engine_of(model, SharedPrefix.TREE, budget)
    computed, hidden_at = [], engine.model.hidden_at
    engine.model.hidden_at = lambda micro: computed.append(len(micro.packed.token_ids_N)) or hidden_at(micro)  # type: ignore[method-assign,func-returns-value]
    metrics, _ = gradients_of(engine, batch)
    assert len(computed) == len(split(batch, budget, SharedPrefix.TREE))
    needed = int(needed_tokens(batch).sum())
    assert metrics[SHARED] == pytest.approx(1 - sum(computed) / needed, abs=1e-12)
    assert 0.2 < metrics[SHARED] < 1
    metrics, _ = gradients_of(engine_of(model, SharedPrefix.NONE), batch)
    assert SHARED not in metrics


def test_ranks_count_what_each_group_computes_and_not_what_its_rows_would_by_themselves() -> None:
    batch = long_conversations()
    tokens_B = computed_tokens(batch, SharedPrefix.TREE)
    for group in range(3):
        rows = np.flatnonzero(batch.group_B == group)
        assert int(tokens_B[rows].sum()) == len(pack(select(batch, rows), CPU).token_ids_N)
