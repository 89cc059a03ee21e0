"""In half precision whatever is exponentiated, normalised or summed over tokens is float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, KlConfig, ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf import LossTerms, MicroBatch, Predictions, TrainEngine
from rlcore.engines.hf.sample.decode import Decoder
from rlcore.engines.hf.sample.decode_row import rows_of
from rlcore.engines.hf.train.head import Head, token_scores
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.plan.cpu_products import MAX_ISA
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import GenerateRequest, Sampling, SharedPrefix

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

SENSITIVE = ("exp", "log", "softmax", "logsumexp", "amax", "rsqrt", "vecdot", "mean", "cumsum")
HALF = (torch.bfloat16, torch.float16)


class Formats(TorchDispatchMode):
    """The operations of `SENSITIVE` that gave half precision, and all that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.half: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name.removesuffix("_backward_data") in SENSITIVE:
            self.seen.add(name)
            results = out if isinstance(out, (tuple, list)) else [out]
            if any(isinstance(result, torch.Tensor) and result.dtype in HALF for result in results):
                self.half.add(name)
        return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "llama", num_key_value_heads=2)


def engine_of(
    path: Path, dtype: Any, loss: Callable[..., LossTerms], attention: Any, shared: SharedPrefix
) -> TrainEngine:
    model = ModelConfig(path=str(path), attention=attention)
    return TrainEngine("causal_lm", model, EngineConfig(dtype=dtype, lr=1e-3), loss, shared_prefix=shared)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("attention", "shared"), [("sdpa", SharedPrefix.NONE), ("sdpa", SharedPrefix.TREE), ("eager", SharedPrefix.NONE)]
)
def test_log_probs_softmax_losses_and_sums_of_an_update_are_float32(
    llama: Path, dtype: Any, attention: str, shared: SharedPrefix
) -> None:
    found: list[torch.Tensor] = []
    policy_loss = PolicyLoss(clip, AlgoConfig(entropy_coef=0.1, kl=KlConfig(placement="none")))

    def loss(micro: MicroBatch, predictions: Predictions) -> LossTerms:
        terms = policy_loss(micro, predictions)
        found.extend((predictions.scores_BT, predictions.entropy_BT, terms.loss_BT, *terms.metrics.values()))
        return terms

    engine, formats = engine_of(llama, dtype, loss, attention, shared), Formats()
    masters = engine._optimizer.masters
    step, gradients = engine._optimizer.step, []
    engine._optimizer.step = lambda lr: (gradients.extend(master.grad for master in masters), step(lr))  # type: ignore
    with formats:
        engine.logprobs(random_batch())
        assert engine.update(random_batch())["actor/skipped"] == 0.0
    assert {"exp", "log", "rsqrt"} <= formats.seen
    assert formats.half == set()
    assert {result.dtype for result in found} == {torch.float32}
    assert {gradient.dtype for gradient in gradients if gradient is not None} == {torch.float32}
    assert {master.dtype for master in masters} == {torch.float32}


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_logits_of_half_precision_are_not_rounded_to_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_ISA, "AVX512_CORE")
    check_logits(dtype, lambda exact: torch.full_like(exact, 1e-5))


@pytest.mark.usefixtures("native_bfloat16")
def test_logits_of_two_bfloat16_products_are_exact_to_16_bits() -> None:
    check_logits(torch.bfloat16, lambda exact: 2.0**-17 * exact.abs() + 1e-5)


def check_logits(dtype: torch.dtype, allowed: Callable[[Tensor], Tensor]) -> None:
    """Compare logits, log-probs and entropy with float64; a log-prob has the largest error of its row's logits."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 3000, bias=True).to(dtype).requires_grad_(False)
    hidden_NH = (3.0 * torch.randn(40, 64)).to(dtype)
    exact_NV = torch.nn.functional.linear(hidden_NH.double(), linear.weight.double(), linear.bias.double())
    with torch.no_grad():
        logits_NV = Head(linear).logits(hidden_NH)
    assert logits_NV.dtype == torch.float32
    assert bool(((logits_NV.double() - exact_NV).abs() < allowed(exact_NV)).all())
    targets_N = torch.arange(40)
    logprobs_N, entropy_N = token_scores(hidden_NH, targets_N, Head(linear), 1.0, with_entropy=True)
    expected_NV = exact_NV.log_softmax(-1)
    largest = float(allowed(exact_NV).max())
    torch.testing.assert_close(logprobs_N.double(), expected_NV[targets_N, targets_N], atol=largest, rtol=0)
    torch.testing.assert_close(
        entropy_N.double(), -(expected_NV.exp() * expected_NV).sum(-1), atol=10 * largest, rtol=0
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sampler_decodes_with_the_logits_of_the_trainers_head(llama: Path, dtype: Any) -> None:
    engine = engine_of(llama, dtype, PolicyLoss(clip, AlgoConfig()), "sdpa", SharedPrefix.NONE)
    decoder = Decoder(engine.policy, max_rows=4, device=torch.device("cpu"))
    request = GenerateRequest("probe", (1, 2, 3, 4), Sampling(max_tokens=8), 2, 0)
    decoder.join(rows_of(request, 0, ByteTokens()))
    with Formats() as formats:
        logits_RV = decoder.logits()
    assert formats.half == set()
    assert logits_RV.dtype == torch.float32
    hidden_RH = decoder._hidden_RH
    assert hidden_RH is not None
    weight_VH = engine.policy.head.linear.weight.detach()
    exact_RV = hidden_RH.double() @ weight_VH.double().T
    assert float((logits_RV.double() - exact_RV).abs().max()) < 1e-4
    assert np.isfinite(logits_RV.numpy()).all()
