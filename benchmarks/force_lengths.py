"""Rows of given lengths for `generate` of transformers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class ForceLengths(LogitsProcessor):
    """Ends row r with its lengths[r]-th token, and not earlier. A row of the maximal length reaches the limit."""

    def __init__(self, lengths: Sequence[int], end: int, prompt_length: int) -> None:
        self._lengths = torch.tensor(list(lengths))
        self._end = end
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self._end] = -torch.inf
        ending = self._lengths == input_ids.shape[1] - self._prompt_length + 1
        if bool(ending.any()):
            ending = ending.to(scores.device)
            scores[ending] = -torch.inf
            scores[ending, self._end] = 0.0
        return scores


def with_forced_lengths(plain: Callable[..., Any], lengths: Sequence[int], end: int) -> Callable[..., Any]:
    """The `generate` of a model with rows of these lengths."""

    def generate(**arguments: Any) -> Any:
        ids = arguments["input_ids"]
        processor = ForceLengths(lengths[: ids.shape[0]], end, ids.shape[1])
        return plain(**arguments, logits_processor=LogitsProcessorList([processor]))

    return generate
