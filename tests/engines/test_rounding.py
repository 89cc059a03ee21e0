"""Rounding float32 masters into half precision: unbiased, exact where it can be, repeatable, the same in any parts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train import rounding
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.engines.hf.train.rounding import RoundingKey, publish
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores
# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

NUM = 2**18
KEY = RoundingKey(seed=3, update=5, parameter=7)
DTYPES = [torch.bfloat16, torch.float16]
BETWEEN = {
    torch.bfloat16: [0.1, -0.1, 1.0 - 2**-12, 2.0 - 2**-10, -(0.5 - 2**-13), 3e-39, 1e-7, 1e30],
    torch.float16: [0.1, -0.1, 1.0 - 2**-13, 2.0 - 2**-13, -(0.5 - 2**-14), 1e-7, -3e-8, 2**-14 - 2**-26, 4000.3],
}
"""Numbers between two neighbours: also on both sides of a power of two, and subnormal."""


def rounded(values: torch.Tensor, dtype: torch.dtype, key: RoundingKey = KEY) -> torch.Tensor:
    weight = torch.zeros_like(values, dtype=dtype)
    publish(weight, values, "stochastic", key)
    return weight


def neighbours(value: float, dtype: torch.dtype) -> list[float]:
    """The numbers of the format below and above, of the rounded value and what follows it on the other side."""
    near = torch.tensor(value, dtype=torch.float64).to(dtype)
    others = [torch.nextafter(near, torch.tensor(to, dtype=dtype)) for to in (-math.inf, math.inf)]
    below, above = (float(other.double()) for other in others)
    middle = float(near.double())
    exact = float(torch.tensor(value))
    return [below, middle] if middle > exact else [middle, above]


@pytest.mark.parametrize(
    ("dtype", "value"), [(dtype, value) for dtype, values in BETWEEN.items() for value in values], ids=str
)
def test_a_number_becomes_one_of_its_neighbours_and_its_mean_is_the_number(dtype: torch.dtype, value: float) -> None:
    found = rounded(torch.full((NUM,), value), dtype).double()
    low, high = neighbours(value, dtype)
    assert found.unique().tolist() == [low, high]
    share = (float(torch.tensor(value)) - low) / (high - low)
    spread = math.sqrt(share * (1.0 - share) / NUM)
    assert float((found == high).double().mean()) == pytest.approx(share, abs=5.0 * spread + 2**-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_different_numbers_have_no_bias(dtype: torch.dtype) -> None:
    values = torch.randn(NUM, generator=torch.Generator().manual_seed(0)) * 0.1
    values = values[values.abs() > 2**-14]  # subnormal numbers have coarser neighbours
    errors = (rounded(values, dtype).double() - values.double()) / values.double().abs()
    unit = torch.finfo(dtype).eps
    assert abs(float(errors.mean())) < 5.0 * unit / math.sqrt(NUM)
    assert float(errors.abs().max()) < unit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_the_format_holds_and_those_that_are_not_finite_stay(dtype: torch.dtype) -> None:
    whole = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)  # every number of the format
    kept = rounded(whole.float(), dtype)
    numbers = ~whole.isnan()
    assert torch.equal(kept[numbers].view(torch.int16), whole[numbers].view(torch.int16)), "with the sign of zero"
    assert bool(kept[~numbers].isnan().all())
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert bool(odd.isnan().all())
    assert bool(rounded(odd, dtype).isnan().all()), "NaN of any payload"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_finite_number_stays_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([3.4028234e38, -3.4028234e38, min(largest * (1 + 1e-4), 3.4028234e38)])
    found = rounded(beyond.repeat(1000), dtype).float()
    assert found.unique().tolist() == [-largest, largest]


def test_the_numbers_are_a_function_of_seed_update_and_parameter() -> None:
    values = torch.rand(NUM)
    first = rounded(values, torch.bfloat16)
    assert torch.equal(rounded(values, torch.bfloat16), first)
    for other in (RoundingKey(4, 5, 7), RoundingKey(3, 6, 7), RoundingKey(3, 5, 8)):
        changed = rounded(values, torch.bfloat16, other) != first
        assert 0.25 < float(changed.double().mean()) < 0.42, "one third of independent roundings differ"


def test_neighbouring_numbers_are_rounded_independently() -> None:
    up = (rounded(torch.full((NUM,), 1.0 + 2**-8), torch.bfloat16) > 1.0).double() - 0.5
    for apart in (1, 2, 3, 576, 1024, 4096):
        assert abs(float((up[:-apart] * up[apart:]).mean())) < 5.0 * 0.25 / math.sqrt(NUM)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_that_hold_parts_draw_the_bits_of_the_whole(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(7, 33)
    whole = rounded(values, torch.bfloat16)
    for rank in range(num_ranks):
        rows = rounding.rows_of(7, rank, num_ranks)
        monkeypatch.setattr(rounding, "place", lambda tensor, rank=rank: (rank, num_ranks))
        monkeypatch.setattr(rounding, "own", lambda tensor, rows=rows: tensor[rows])
        weight = torch.zeros_like(values, dtype=torch.bfloat16)
        publish(weight, values, "stochastic", KEY)
        assert torch.equal(weight[rows], whole[rows])


def test_chunks_and_strides_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(64, 48)
    whole = rounded(values, torch.bfloat16)
    monkeypatch.setitem(rounding.CHUNK, "cpu", 100)
    assert torch.equal(rounded(values, torch.bfloat16), whole)
    strided = torch.zeros(48, 64, dtype=torch.bfloat16).T
    publish(strided, values.T.contiguous().T, "stochastic", KEY)
    assert torch.equal(strided, whole)


def test_rounding_needs_only_chunks_in_addition_to_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in pointers:
                self.elements = max(self.elements, out.untyped_storage().nbytes() // 4)
            return out

    monkeypatch.setitem(rounding.CHUNK, "cpu", 1000)
    values, weight = torch.rand(100, 1000), torch.zeros(100, 1000, dtype=torch.bfloat16)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in (values, weight)}
    with torch.no_grad(), Largest() as largest:
        publish(weight, values, "stochastic", KEY)
    assert 0 < largest.elements <= 1000


def engine_of(path: Path, seed: int = 0, **settings: Any) -> TrainEngine:
    config = EngineConfig(**{"lr": 1e-6, "dtype": "bfloat16", "micro_batch_tokens": 100, **settings})
    loss = PolicyLoss(clip, AlgoConfig())
    return TrainEngine("causal_lm", ModelConfig(path=str(path)), config, loss, seed=seed)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def stored_half(llama: Path) -> Path:
    """Weights like those of most checkpoints: in bfloat16, so that masters start where weights can be."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model.save_pretrained(llama.parent / "half")
    return llama.parent / "half"


def followed(engine: TrainEngine) -> float:
    """The mean movement of weights along their masters, as a share of the masters' movement."""
    optimizer = engine._optimizer
    start = [master.detach().clone() for master in optimizer.masters]
    for _ in range(20):
        engine.update(random_batch())
    ways = [master.detach().double() - first.double() for master, first in zip(optimizer.masters, start, strict=True)]
    gone = [
        weight.detach().double() - first.double() for weight, first in zip(optimizer.parameters, start, strict=True)
    ]
    along = sum(float((went * way.sign()).sum()) for went, way in zip(gone, ways, strict=True))
    return along / sum(float(way.abs().sum()) for way in ways)


@pytest.mark.fault
def test_weights_follow_their_masters_on_average_and_lag_when_rounded_to_nearest(stored_half: Path) -> None:
    assert followed(engine_of(stored_half)) == pytest.approx(1.0, abs=0.15)
    assert followed(engine_of(stored_half, rounding="nearest")) < 0.3


@pytest.mark.parametrize("lora", [False, True])
def test_masters_start_from_the_numbers_in_the_files(llama: Path, lora: bool) -> None:
    engine = engine_of(llama, lora=LoraConfig(enabled=lora, rank=2))
    exact = engine_of(llama, dtype="float32", lora=LoraConfig(enabled=lora, rank=2))
    stored = dict(exact.model.named_parameters())
    for name, master in engine._optimizer.half_masters().items():
        if lora:
            assert torch.equal(master, dict(engine.model.named_parameters())[name].float())
        else:
            assert torch.equal(master, stored[name])
    rounded_weights = [p.float() for p in engine._optimizer.parameters]
    assert lora or any(not torch.equal(m, w) for m, w in zip(engine._optimizer.masters, rounded_weights, strict=True))


def test_a_value_models_masters_start_from_the_numbers_in_the_files(llama: Path) -> None:
    loss = PolicyLoss(clip, AlgoConfig())
    engines = [
        TrainEngine("value", ModelConfig(path=str(llama)), EngineConfig(dtype=dtype), loss)
        for dtype in ("bfloat16", "float32")
    ]
    exact = dict(engines[1].model.named_parameters())
    masters = engines[0]._optimizer.half_masters()
    assert masters
    assert all(torch.equal(master, exact[name]) for name, master in masters.items())


@pytest.mark.slow
def test_two_engines_of_one_seed_publish_the_same_bits_and_another_seed_others(llama: Path) -> None:
    one, same, other = (engine_of(llama, seed=seed) for seed in (0, 0, 1))
    for engine in (one, same, other):
        engine.update(random_batch())
    pairs = list(zip(one._optimizer.parameters, same._optimizer.parameters, other._optimizer.parameters, strict=True))
    assert all(torch.equal(first, second) for first, second, _ in pairs)
    assert any(not torch.equal(first, third) for first, _, third in pairs)
