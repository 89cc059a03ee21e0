"""Gradients that layers add to their weights' sums themselves: those that torch would have added."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.config import EngineConfig, ModelConfig
from rlcore.engines.hf.train import gradients
from rlcore.engines.hf.train.gradients import adding_gradients
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.engines.hf.train.optimizer import MasterAdamW
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)

PADDING = 3


class TwoUses(nn.Module):
    """An embedding that is also the output layer, as in models with tied weights, and a frozen layer between."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(7, 4, padding_idx=PADDING)
        self.inner, self.frozen = nn.Linear(4, 5), nn.Linear(5, 4, bias=False).requires_grad_(False)
        self.output = nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.inner(self.embedding(token_ids))))
        again = nn.functional.linear(hidden, self.inner.weight[:4])  # a weight that is read in another way, too
        return torch.log_softmax(self.output(hidden + again), dim=-1)


def summed_gradients(model: nn.Module, passes: int, context: Callable[[], Any]) -> dict[str, Tensor | None]:
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    for _ in range(passes):
        token_ids = torch.randint(0, 7, (2, 6), generator=generator)
        token_ids[0, 0] = PADDING
        with context():
            model(token_ids).square().sum().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("passes", [1, 3])
def test_sums_over_several_passes_are_those_of_torch(passes: int) -> None:
    model = TwoUses()
    plain = summed_gradients(model, passes, nullcontext)
    ours = summed_gradients(model, passes, lambda: adding_gradients(model, {}))
    assert ours["frozen.weight"] is None
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_gradient_of_a_linear_layer_computed_by_hand() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = torch.tensor([[10.0, 20.0]])
    with adding_gradients(layer, {}):
        (3.0 * layer(torch.tensor([[1.0, 2.0], [0.5, 0.0]]))).sum().backward()
    assert layer.weight.grad.tolist() == [[14.5, 26.0]]


def test_half_precision_layers_without_a_master_are_left_to_torch() -> None:
    layer = nn.Linear(2, 2).bfloat16()
    with adding_gradients(layer, {}):
        assert "forward" not in vars(layer)


@pytest.mark.parametrize("piece", [2**19, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_half_precision_are_summed_in_the_float32_masters(
    dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three passes of a model, compared with its weights in float64."""
    monkeypatch.setattr(gradients, "PIECE", piece)
    model = TwoUses().to(dtype)
    optimizer = MasterAdamW(model, EngineConfig(dtype=str(dtype).removeprefix("torch.")))

    @contextmanager
    def collected() -> Iterator[None]:
        with adding_gradients(model, optimizer.summed_in()):
            yield
        optimizer.collect_gradients()

    summed_gradients(model, 3, collected)
    expected = summed_gradients(TwoUses().to(dtype).double(), 3, nullcontext)
    for name, master in optimizer.half_masters().items():
        wanted = expected[name]
        assert master.grad is not None
        assert wanted is not None
        assert master.grad.dtype == torch.float32
        assert float((master.grad - wanted).abs().max()) < 0.02 * float(wanted.abs().max()), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_half_precision_sum_keeps_what_the_format_would_lose() -> None:
    """256 + 1 is 256 in bfloat16: the second pass of the head and the embedding must not be lost."""
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    master = nn.Parameter(torch.zeros(1, 1))
    for factor in (256.0, 1.0):
        with adding_gradients(layer, {layer.weight: master}):
            layer(torch.tensor([[factor]], dtype=torch.bfloat16)).sum().backward()
    assert master.grad is not None
    assert master.grad.item() == 257.0
    assert layer.weight.grad is None


@pytest.mark.parametrize("tied", [True, False])
def test_a_policys_gradients_are_those_of_torch(tmp_path: Path, tied: bool) -> None:
    path = write_tiny_model(tmp_path / "model", tie_word_embeddings=tied, num_key_value_heads=2)
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="float64", device="cpu")
    assert isinstance(model, PolicyModel)
    found = []
    for context in (nullcontext, partial(model.adding_gradients, {})):
        model.zero_grad()
        for seed in range(2):
            with context():
                micro = MicroBatch(random_batch(seed=seed), torch.device("cpu"))
                logprobs_N, entropy_N = model(micro, 0.7, True)
                (logprobs_N.sum() + 0.3 * entropy_N.square().sum()).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
