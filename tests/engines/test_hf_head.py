"""Log-probs and entropy from hidden states, in chunks, with rlcore's backward pass."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlcore.config import ModelConfig
from rlcore.engines.hf.train.head import Head, check_head, find_head, token_scores
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.errors import ConfigError
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

FORMS = [(1.0, 0.0, 1.0), (0.25, 0.0, 0.7), (1.5, 2.0, 2.0)]
"""(scale, softcap, temperature)."""


def plain_scores(hidden_NH: Tensor, targets_N: Tensor, head: Head, temperature: float) -> tuple[Tensor, Tensor]:
    """A second implementation: one position at a time, one log-softmax over all logits."""
    logprobs, entropies = [], []
    for hidden_H, target in zip(hidden_NH, targets_N, strict=True):
        logits_V = head.linear(hidden_H) * head.scale
        if head.softcap:
            logits_V = head.softcap * torch.tanh(logits_V / head.softcap)
        logprobs_V = torch.log_softmax(logits_V / temperature, dim=-1)
        logprobs.append(logprobs_V[target])
        entropies.append(-sum(p.exp() * p for p in logprobs_V))
    return torch.stack(logprobs), torch.stack(entropies)  # type: ignore[arg-type]


def case(num: int = 7, vocabulary: int = 11) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(5, vocabulary, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    hidden_NH = torch.randn(num, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    return linear, hidden_NH, torch.randint(0, vocabulary, (num,), generator=generator)


@pytest.mark.parametrize(("scale", "softcap", "temperature"), FORMS)
@pytest.mark.parametrize("rows_a_chunk", [1, 3, 100])
def test_scores_and_gradients_equal_a_plain_loop(
    scale: float, softcap: float, temperature: float, rows_a_chunk: int
) -> None:
    linear, hidden_NH, targets_N = case()
    head = Head(linear, scale, softcap)
    inputs = [hidden_NH, linear.weight, linear.bias]
    upstream = torch.arange(1.0, 8.0, dtype=torch.float64)
    chunk = rows_a_chunk * 11
    ours = token_scores(hidden_NH, targets_N, head, temperature, with_entropy=True, chunk_elements=chunk)
    plain = plain_scores(hidden_NH, targets_N, head, temperature)
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):
        losses = [
            weights[0] * (upstream * logprobs_N).sum() + weights[1] * (upstream**2 * entropy_N).sum()
            for logprobs_N, entropy_N in (ours, plain)
        ]
        mine_gradients, their_gradients = (torch.autograd.grad(loss, inputs, retain_graph=True) for loss in losses)
        torch.testing.assert_close(mine_gradients, their_gradients, rtol=1e-10, atol=1e-12)


def test_a_hand_computed_case() -> None:
    linear = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.0], [1.0]]))
    hidden_NH = torch.tensor([[2.0 * torch.log(torch.tensor(3.0))]], dtype=torch.float64)
    # logits / 2 = (0, log 3): probabilities 1/4 and 3/4
    (logprob,), (entropy,) = token_scores(hidden_NH, torch.tensor([1]), Head(linear), 2.0, with_entropy=True)
    assert logprob.item() == pytest.approx(-0.2876820724517809, rel=1e-6)
    assert entropy.item() == pytest.approx(0.5623351446188083, rel=1e-6)


def test_tokens_that_the_model_rules_out_leave_finite_entropy_and_gradients() -> None:
    linear, hidden_NH, _ = case()
    with torch.no_grad():
        linear.bias[4] = -torch.inf
    targets_N = torch.zeros(7, dtype=torch.int64)
    logprobs_N, entropy_N = token_scores(hidden_NH, targets_N, Head(linear), 1.0, with_entropy=True)
    gradients = torch.autograd.grad((logprobs_N + entropy_N).sum(), [hidden_NH, linear.weight])
    assert entropy_N.isfinite().all()
    assert (entropy_N > 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_nothing_selected_gives_zero_gradients() -> None:
    linear, hidden_NH, targets_N = case()
    logprobs_N, _ = token_scores(hidden_NH[:0], targets_N[:0], Head(linear), 1.0, with_entropy=True)
    (gradient,) = torch.autograd.grad(logprobs_N.sum(), [linear.weight])
    assert len(logprobs_N) == 0
    assert not gradient.any()


def test_half_precision_weights_get_float32_scores() -> None:
    linear, hidden_NH, targets_N = case()
    exact_N, _ = token_scores(hidden_NH, targets_N, Head(linear), 1.0, with_entropy=False)
    half = linear.to(torch.bfloat16)
    rough_N, _ = token_scores(hidden_NH.detach().bfloat16(), targets_N, Head(half), 1.0, with_entropy=False)
    assert rough_N.dtype == torch.float32
    torch.testing.assert_close(rough_N, exact_N.float(), atol=0.05, rtol=0.05)


ARCHITECTURES: list[tuple[str, dict[str, Any], tuple[float, float]]] = [
    ("Llama", {"num_key_value_heads": 2}, (1.0, 0.0)),
    ("Llama", {"tie_word_embeddings": True}, (1.0, 0.0)),
    ("GPTNeoX", {}, (1.0, 0.0)),
    ("GPT2", {}, (1.0, 0.0)),
    ("Granite", {"logits_scaling": 4.0}, (0.25, 0.0)),
    ("Cohere", {"logit_scale": 0.5}, (0.5, 0.0)),
    ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "final_logit_softcapping": 3.0}, (1.0, 3.0)),
]


@pytest.mark.parametrize(("architecture", "settings", "form"), ARCHITECTURES)
def test_heads_of_common_architectures_are_found(
    tmp_path: Path, architecture: str, settings: dict[str, Any], form: tuple[float, float]
) -> None:
    path = write_tiny_model(tmp_path, architecture, **settings)
    model = load_model(
        ModelKind.CAUSAL_LM, ModelConfig(path=str(path), attention="eager"), dtype="float64", device="cpu"
    )
    assert isinstance(model, PolicyModel)
    assert (model.head.scale, model.head.softcap) == form
    batch = random_batch(num_groups=1, samples=1)
    micro = MicroBatch(batch, torch.device("cpu"))
    scores_N, entropy_N = model(micro, 0.7, True)
    token_ids_BT = micro.token_ids_BT
    logprobs_TV = torch.log_softmax(model.transformer(token_ids_BT).logits[0, :-1].double() / 0.7, dim=-1)
    sampled_T = micro.mask_BT[0, 1:]
    expected_N = logprobs_TV.gather(1, token_ids_BT[0, 1:, None])[sampled_T, 0]
    expected_entropy_N = -(logprobs_TV.exp() * logprobs_TV).sum(-1)[sampled_T]
    torch.testing.assert_close(scores_N, expected_N, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(entropy_N, expected_entropy_N, rtol=1e-9, atol=1e-9)


def test_a_head_that_is_not_one_linear_layer_is_refused(tmp_path: Path) -> None:
    model = load_model(
        ModelKind.CAUSAL_LM, ModelConfig(path=str(write_tiny_model(tmp_path))), dtype="float32", device="cpu"
    )
    model.transformer.lm_head = nn.Sequential(nn.Linear(32, 264))
    with pytest.raises(ConfigError, match=r"output layer is a Sequential; needs a plain Linear"):
        find_head(model.transformer)


def test_logits_that_are_changed_in_a_way_we_do_not_know_are_refused() -> None:
    class Odd(nn.Module):
        """Adds a position-dependent term to its logits."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(20, 4), nn.Linear(4, 20)

        def base_model(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

        def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
            logits = self.linear(self.embedding(input_ids))
            return SimpleNamespace(logits=logits + torch.arange(8.0)[None, :, None])

    odd = Odd()
    with pytest.raises(ConfigError, match=r"Odd: its logits differ by .* the one form of head that is supported"):
        check_head(odd, Head(odd.linear))
