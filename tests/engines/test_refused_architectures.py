"""Models that cannot share a prompt, or be decoded, are refused in the terms of their architecture."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.engines.hf.train.prefix_trial import check_shared_prefix
from rlcore.errors import ConfigError
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import SharedPrefix


def model_of(directory: Path, architecture: str, **settings: Any) -> PolicyModel:
    path = write_tiny_model(directory, architecture, **settings)
    attention = "eager" if architecture == "Bloom" else "sdpa"
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(str(path), attention=attention), dtype="float32", device="cpu")
    assert isinstance(model, PolicyModel)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["StableLm", "Falcon"])
def test_attention_in_the_models_code_takes_no_tree_and_its_cache_is_shared(tmp_path: Path, architecture: str) -> None:
    model = model_of(tmp_path, architecture, num_key_value_heads=4)
    words = (
        f"actor.shared_prefix=tree: {architecture}ForCausalLM cannot compute a shared prompt this way (its layers "
        "compute attention with the model's code, which takes no tree); choose actor.shared_prefix=none or cache"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
        check_shared_prefix(model, SharedPrefix.TREE, "actor")
    with warnings.catch_warnings(action="error"):
        check_shared_prefix(model, SharedPrefix.CACHE, "actor")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "settings"), [("Bloom", {}), ("Falcon", {"alibi": True})])
def test_alibi_is_named(tmp_path: Path, architecture: str, settings: dict[str, Any]) -> None:
    model = model_of(tmp_path, architecture, **settings)
    with pytest.raises(ConfigError, match=r"hf: \w+ForCausalLM adds ALiBi biases .* choose another model or another"):
        EmbeddedSampler(model, ByteTokens(), max_rows=4, device=torch.device("cpu"))
