"""Number of rows of logits that are computed at a time, by device; on meta tensors, and in the memory plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.engines.hf.train.head import CHUNK_ELEMENTS, KEPT_ELEMENTS, Head, chunk_rows, token_scores
from rlcore.plan.activations import CHUNK_LOGITS, KEPT_LOGITS

VOCABULARIES = {"bytes": 264, "SmolLM2": 49152, "Llama 2": 32000, "Llama 3": 128256, "Qwen": 151936, "Gemma": 256000}


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_chunks_have_a_thousand_to_four_thousand_rows_on_cuda_and_fit_a_cache_on_a_cpu(vocabulary: int) -> None:
    assert 1024 <= chunk_rows(vocabulary, "cuda") <= 4096
    assert chunk_rows(vocabulary, "cpu") * vocabulary <= CHUNK_ELEMENTS
    assert chunk_rows(vocabulary, "cuda", 10 * vocabulary) == chunk_rows(vocabulary, "cpu", 10 * vocabulary) == 10


def test_chunks_are_smaller_where_the_vocabulary_is_larger() -> None:
    rows = [chunk_rows(vocabulary, "cuda") for vocabulary in (32000, 49152, 128256, 256000)]
    assert rows == [4096, 2730, 1046, 1024]
    assert chunk_rows(10**9, "cpu") == 1


class Products(TorchDispatchMode):
    """Rows of each product with the output layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm"):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_a_device_that_is_not_a_cpu_gets_the_large_chunks() -> None:
    vocabulary, num = 151936, 5000
    linear = nn.Linear(8, vocabulary, bias=False, device="meta")
    hidden_NH = torch.empty(num, 8, device="meta")
    targets_N = torch.empty(num, dtype=torch.int64, device="meta")
    with torch.no_grad(), Products() as products:
        token_scores(hidden_NH, targets_N, Head(linear), 1.0, with_entropy=True)
    assert products.rows == [1000] * 5
    assert (CHUNK_LOGITS, KEPT_LOGITS) == (CHUNK_ELEMENTS, KEPT_ELEMENTS)
