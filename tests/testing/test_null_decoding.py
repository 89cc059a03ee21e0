"""The truncated sampling of the plugin `null`: by hand, and with the numbers of the transformers backend."""

from typing import Any

import numpy as np
import pytest
import torch

from rlcore.engines.hf.sample.sampling import RowSampling, draw
from rlcore.testing.null_decoding import log_softmax, truncated
from rlcore.types import Sampling

HALVES_V = np.log([0.125, 0.5, 0.125, 0.25])
CUTS: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [0.125, 0.5, 0.125, 0.25]),
    ({"top_k": 1}, [0, 1, 0, 0]),
    ({"top_k": 2}, [0, 2 / 3, 0, 1 / 3]),
    ({"top_k": 3}, [0.125, 0.5, 0.125, 0.25]),  # the third and the fourth are equal
    ({"top_k": 9}, [0.125, 0.5, 0.125, 0.25]),
    ({"top_p": 0.5}, [0, 1, 0, 0]),
    ({"top_p": 0.6}, [0, 2 / 3, 0, 1 / 3]),
    ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),  # the first is 2/3 of what top_k keeps
    ({"min_p": 0.5}, [0, 2 / 3, 0, 1 / 3]),
    ({"temperature": 0.0, "top_k": 1}, [0.125, 0.5, 0.125, 0.25]),
]


@pytest.mark.parametrize(("cut", "chances"), CUTS)
def test_what_is_kept_is_divided_by_its_mass(cut: dict[str, Any], chances: list[float]) -> None:
    assert np.exp(truncated(HALVES_V, Sampling(**cut))) == pytest.approx(chances)


@pytest.mark.parametrize("cut", [{"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8}], ids=str)
def test_log_probs_are_those_of_the_transformers_backend(cut: dict[str, Any]) -> None:
    logits_V = np.random.default_rng(0).standard_normal(257)
    sampling = Sampling(0.7, **cut)
    rows_RV = torch.as_tensor(logits_V).expand(64, -1)
    settings = RowSampling.of([sampling] * 64, 257, torch.device("cpu"))
    tokens_R, logprobs_R = draw(rows_RV, settings, np.linspace(0, 1, 64, endpoint=False))
    expected_V = truncated(log_softmax(logits_V, 0.7), sampling)
    assert logprobs_R.numpy() == pytest.approx(expected_V[tokens_R.numpy()], abs=1e-5)
