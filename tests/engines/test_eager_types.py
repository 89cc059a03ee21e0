"""Kinds of models for which the plan chooses eager attention: some version of transformers has no other one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_experts import engine_of, reference_logprobs
from test_tree_types import settings_of

from rlcore.errors import ConfigError
from rlcore.plan.activations import EAGER_TYPES
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import SharedPrefix

torch.set_num_threads(1)

OTHER: dict[str, dict[str, Any]] = {"codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(EAGER_TYPES))
def test_it_trains_with_eager_attention_and_one_it_lacks_is_refused_with_the_way_out(tmp_path: Path, kind: str) -> None:
    architecture = type(transformers.AutoConfig.for_model(kind)).__name__.removesuffix("Config")
    path, batch = write_tiny_model(tmp_path, architecture, **settings_of(kind), **OTHER.get(kind, {})), random_batch()
    engine = engine_of(path, attention="eager")
    np.testing.assert_allclose(engine.logprobs(batch), reference_logprobs(path, batch), rtol=0, atol=1e-5)
    engine.update(batch)
    if getattr(transformers, f"{architecture}ForCausalLM")._supports_sdpa:  # GPT-J and CodeGen since 5.24
        np.testing.assert_allclose(
            engine_of(path, SharedPrefix.NONE).logprobs(batch), reference_logprobs(path, batch), rtol=0, atol=1e-5
        )
        return
    needed = r"model\.attention=sdpa: transformers does not have it for \w+ForCausalLM; choose model\.attention=eager"
    with pytest.raises(ConfigError, match=needed):
        engine_of(path, SharedPrefix.NONE)
