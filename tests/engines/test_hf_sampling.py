"""Drawing tokens: frequencies as transformers' filters say, and rows that do not disturb each other."""

from typing import Any

import numpy as np
import pytest
import torch

from rlcore.engines.hf.sample.sampling import RowSampling, draw
from rlcore.types import Sampling

torch.set_num_threads(1)  # the tensors are small, and the tests may share their cores

CPU = torch.device("cpu")


def settings_of(sampling: Sampling, num: int, vocabulary: int) -> RowSampling:
    return RowSampling.of([sampling] * num, vocabulary, CPU)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.7),
        Sampling(min_p=0.2),
        Sampling(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05),
    ],
)
def test_tokens_are_drawn_as_often_as_transformers_filters_say(sampling: Sampling) -> None:
    from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits_1V = torch.randn((1, 12), generator=torch.Generator().manual_seed(1)) * 1.5
    kept_1V = logits_1V / sampling.temperature
    unused: Any = torch.zeros((1, 0), dtype=torch.int64)
    if sampling.top_k:
        kept_1V = TopKLogitsWarper(sampling.top_k)(unused, kept_1V)
    if sampling.top_p < 1.0:
        kept_1V = TopPLogitsWarper(sampling.top_p)(unused, kept_1V)
    if sampling.min_p:
        kept_1V = MinPLogitsWarper(sampling.min_p)(unused, kept_1V)
    expected_V = torch.softmax(kept_1V[0], dim=-1)
    num = 5_000
    # Evenly spaced numbers instead of random ones: frequencies are exact to one in `num`.
    uniforms = (np.arange(num) + 0.5) / num
    token_R, logprob_R = draw(logits_1V.expand(num, -1), settings_of(sampling, num, 12), uniforms)
    frequency_V = torch.bincount(token_R, minlength=12) / num
    torch.testing.assert_close(frequency_V, expected_V, atol=2.0 / num, rtol=0.0)
    torch.testing.assert_close(logprob_R, torch.log_softmax(kept_1V[0], dim=-1)[token_R])


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    logits_RV = torch.randn((4, 30), generator=torch.Generator().manual_seed(2))
    settings = [Sampling(temperature=0.0), Sampling(top_k=2), Sampling(top_p=0.4, temperature=2.0), Sampling()]
    uniforms = np.array([0.9, 0.8, 0.7, 0.999999])
    token_R, logprob_R = draw(logits_RV, RowSampling.of(settings, 30, CPU), uniforms)
    for row, sampling in enumerate(settings):
        alone = draw(logits_RV[row : row + 1], settings_of(sampling, 1, 30), uniforms[row : row + 1])
        assert token_R[row] == alone[0][0]
        assert logprob_R[row] == pytest.approx(float(alone[1][0]), abs=1e-6)
    assert token_R[0] == logits_RV[0].argmax()


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_draw_a_token_with_probability(uniform: float) -> None:
    logits_RV = torch.full((1, 6), -torch.inf)
    logits_RV[0, 2:4] = 0.0
    token_R, _ = draw(logits_RV, settings_of(Sampling(), 1, 6), np.array([uniform]))
    assert int(token_R) == (2 if uniform == 0.0 else 3)


def whole_kept(logprobs_V: torch.Tensor, sampling: Sampling) -> set[int]:
    """The tokens that stay, by sorting the whole vocabulary and a plain loop."""
    order = sorted(range(len(logprobs_V)), key=lambda i: -float(logprobs_V[i]))
    probs = [float(logprobs_V[i].double().exp()) for i in order]
    if sampling.top_k:
        num = sum(prob >= probs[min(sampling.top_k, len(probs)) - 1] for prob in probs)
        order, probs = order[:num], probs[:num]
    total, before, kept = sum(probs) if sampling.top_k else 1.0, 0.0, set()
    for token, prob in zip(order, probs, strict=True):
        if (before / total < sampling.top_p or sampling.top_p == 1.0) and prob >= sampling.min_p * probs[0]:
            kept.add(token)
        before += prob
    return kept | {order[0]}


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.9),
        Sampling(top_p=0.999),
        Sampling(top_k=100),
        Sampling(top_k=64),
        Sampling(min_p=0.3),
        Sampling(top_k=700, top_p=0.95, min_p=0.01),
        Sampling(top_k=1299, min_p=1e-6),
    ],
)
def test_what_stays_is_what_sorting_the_whole_vocabulary_says(sampling: Sampling, spread: float) -> None:
    """Also where more than the first few of the most probable tokens have to be looked at."""
    logits_1V = torch.randn((1, 1300), generator=torch.Generator().manual_seed(3)) * spread
    kept = whole_kept(torch.log_softmax(logits_1V[0], dim=-1), sampling)
    num = 300
    uniforms = (np.arange(num) + 0.5) / num
    token_R, _ = draw(logits_1V.expand(num, -1), settings_of(sampling, num, 1300), uniforms)
    drawn = set(token_R.tolist())
    assert drawn <= kept
    if len(kept) <= 50:
        probs_V = torch.softmax(logits_1V[0].double(), dim=-1)
        mass = sum(float(probs_V[i]) for i in kept)
        assert drawn >= {i for i in kept if float(probs_V[i]) / mass > 2.0 / num}
    assert len(drawn) > 0.3 * min(len(kept), num) or spread > 1.0


def test_a_large_vocabulary_is_drawn_from_as_its_cumulated_probabilities_say() -> None:
    """More than one block, the last of them not full; against sums over the whole vocabulary."""
    logits_RV = torch.randn((40, 5000), generator=torch.Generator().manual_seed(4)) * 3.0
    uniforms = np.random.default_rng(5).random(40)
    token_R, logprob_R = draw(logits_RV.clone(), settings_of(Sampling(), 40, 5000), uniforms)
    cumulated_RV = torch.softmax(logits_RV.double(), dim=-1).cumsum(dim=-1)
    for row in range(40):
        token = int(token_R[row])
        assert uniforms[row] < float(cumulated_RV[row, token]) + 1e-5
        assert token == 0 or uniforms[row] > float(cumulated_RV[row, token - 1]) - 1e-5
    expected_R = torch.log_softmax(logits_RV.double(), dim=-1).gather(1, token_R[:, None])[:, 0]
    assert (logprob_R - expected_R).abs().max() < 1e-5


def test_the_logits_are_left_as_they_were() -> None:
    logits_RV = torch.randn((3, 50), generator=torch.Generator().manual_seed(6))
    before_RV = logits_RV.clone()
    draw(logits_RV, RowSampling.of([Sampling(0.5), Sampling(top_k=3), Sampling(0.0)], 50, CPU), np.full(3, 0.5))
    assert torch.equal(logits_RV, before_RV)
