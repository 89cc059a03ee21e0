"""Attention and updates of packed sequences on a CUDA device against the same on the CPU in float64 or float32."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.tree import pack
from rlcore.engines.hf.train.tree_attention import attend
from rlcore.testing.tiny import batch_of_rows, random_conversations, write_tiny_model
from rlcore.types import Batch, SharedPrefix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
HEADS = 14, 2
HALF = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Tolerance per number format, relative to the largest number of the expected tensor."""


def group(prompt: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Rows that begin alike and then differ."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, 256, prompt).tolist()
    return [[*start, *rng.integers(0, 256, length).tolist()] for length in lengths]


def ragged() -> Batch:
    return batch_of_rows([group(700, [300, 40, 1, 129]), group(5, [64, 3], 1), group(130, [257], 2)])


def conversations() -> Batch:
    rng = np.random.default_rng(3)
    return batch_of_rows([random_conversations(rng, rows=16, turns=6, longest=60) for _ in range(3)])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("batch", [ragged, conversations])
def test_attention_on_the_device_equals_float64_on_the_cpu_in_output_and_all_gradients(
    batch: Callable[[], Batch], size: int, dtype: torch.dtype
) -> None:
    here, there = (pack(batch(), torch.device(device)) for device in ("cpu", "cuda"))
    assert here.tree.levels
    tokens = sum(here.tree.own.queries.lengths)
    generator = torch.Generator().manual_seed(size)
    rounded = [
        torch.randn(1, heads, tokens, size, generator=generator).to(dtype) for heads in (HEADS[0], HEADS[1], HEADS[1])
    ]
    grad = torch.randn(rounded[0].shape, generator=generator).to(dtype)
    exact = [tensor.double().requires_grad_() for tensor in rounded]
    inputs = [tensor.cuda().requires_grad_() for tensor in rounded]
    expected, ours = attend(*exact, here.tree), attend(*inputs, there.tree)
    wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    found = [ours, *torch.autograd.grad(ours, inputs, grad.cuda())]
    for result, right in zip(found, wanted, strict=True):
        apart = float((result.detach().cpu().double() - right.detach()).abs().max())
        assert apart < HALF[dtype] * max(1.0, float(right.detach().abs().max()))


def test_memory_of_attention_is_linear_in_tokens() -> None:
    peaks = []
    for length in (4096, 8192, 16384, 32768):
        tree = pack(batch_of_rows([group(1024, [length])]), torch.device("cuda")).tree
        tokens = sum(tree.own.queries.lengths)
        inputs = [
            torch.randn(1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS[0], HEADS[1], HEADS[1])
        ]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(*inputs, tree).sum().backward()
        peaks.append((torch.cuda.max_memory_allocated() - before) / tokens)
    assert all(longer < 1.1 * shorter for shorter, longer in pairwise(peaks))


def engine_on(device: str, model: Path, dtype: str, prefix: SharedPrefix) -> TrainEngine:
    settings = EngineConfig(dtype=dtype, lr=1e-3, micro_batch_tokens=4096)
    where = ModelConfig(path=str(model), tokenizer="bytes")
    return TrainEngine(
        "causal_lm", where, settings, PolicyLoss(clip, AlgoConfig()), device=device, shared_prefix=prefix
    )


@pytest.mark.parametrize(
    ("dtype", "prefix", "tolerance"),
    [("float32", SharedPrefix.NONE, 1e-3), ("bfloat16", SharedPrefix.NONE, 0.5), ("bfloat16", SharedPrefix.TREE, 0.5)],
)  # flash operations take half precision only
def test_logprobs_and_gradients_of_a_model_on_the_device_equal_the_cpus(
    tmp_path: Path, dtype: str, prefix: SharedPrefix, tolerance: float
) -> None:
    model = write_tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    batch = ragged()
    exact = engine_on("cpu", model, "float32", SharedPrefix.NONE)
    ours = engine_on("cuda", model, dtype, prefix)
    expected, found = exact.logprobs(batch), ours.logprobs(batch)
    assert float(np.abs(expected - found).max()) < tolerance
    norms = [engine.update(batch)["actor/grad_norm"] for engine in (exact, ours)]
    assert norms[1] == pytest.approx(norms[0], rel=tolerance / 5)
