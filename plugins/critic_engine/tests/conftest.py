"""Fixtures of this plugin's tests."""

from typing import Any

import pytest


@pytest.fixture
def sizes() -> dict[str, Any]:
    """The config.json of a small decoder, without its kind."""
    return {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 16,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
