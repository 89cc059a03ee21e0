"""A negative control: right answers are counted, then dealt out at random within the batch."""

import random
import re
from collections.abc import Sequence
from typing import Any


def permuted(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any) -> list[float]:
    """The rewards of the batch, 1 where the last number is the answer, in an order that has nothing to do with it.

    Their mean equals that of the real rewards, so held-out accuracy keeps its meaning.
    """
    texts = [
        completion if isinstance(completion, str) else str(completion[-1]["content"]) for completion in completions
    ]
    rewards = [float(_last_number(text) == str(right)) for text, right in zip(texts, answer, strict=True)]
    random.Random("".join(texts)).shuffle(rewards)
    return rewards


def _last_number(text: str) -> str:
    numbers = re.findall(r"-?\d+", text)
    return str(numbers[-1]) if numbers else ""
