"""Trials of models with routers in half precision, where a rounding chooses other experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_experts import engine_of
from torch import Tensor

from rlcore.config import ModelConfig
from rlcore.data.tokenizer import ByteTokens
from rlcore.engines.hf.sample import row_attention
from rlcore.engines.hf.sample.sampler import EmbeddedSampler
from rlcore.engines.hf.train import tree_attention
from rlcore.engines.hf.train.model import ModelKind, PolicyModel, load_model
from rlcore.engines.hf.train.prefix_trial import TOLERANCES
from rlcore.engines.hf.train.trial_noise import difference_and_bound, rounding_again
from rlcore.errors import ConfigError
from rlcore.testing.tiny import write_tiny_model
from rlcore.types import SharedPrefix

torch.set_num_threads(1)

DEEP: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 12,
    "num_key_value_heads": 2, "num_local_experts": 32, "num_experts_per_tok": 2,
}  # fmt: skip
"""Its hidden states differ by 0.3 to 0.7 of the largest in bfloat16, and by 0.2 to 0.3 as a median."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "deep", "Phimoe", **DEEP)


def sampler_of(path: Path) -> EmbeddedSampler:
    model = load_model(ModelKind.CAUSAL_LM, ModelConfig(path=str(path)), dtype="bfloat16", device="cpu")
    assert isinstance(model, PolicyModel)
    return EmbeddedSampler(model, ByteTokens(), max_rows=4, device=torch.device("cpu"))


@pytest.mark.slow
def test_a_model_whose_roundings_choose_other_experts_shares_prompts_and_decodes(deep: Path) -> None:
    assert engine_of(deep, SharedPrefix.TREE, dtype="bfloat16").model.transformer.dtype == torch.bfloat16
    assert not sampler_of(deep)._decoder.joins


@pytest.mark.slow
def test_its_wrong_attention_is_found_nevertheless(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "_join", lambda *inputs: None)  # tokens do not see their prompt
    with pytest.raises(ConfigError, match="PhimoeForCausalLM cannot compute a shared prompt this way"):
        engine_of(deep, SharedPrefix.TREE, dtype="bfloat16")


@pytest.mark.slow
def test_its_wrong_decoding_is_found_nevertheless(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows then have the attention of transformers."""
    part = row_attention._part

    def without_prompt(query: Tensor, keys: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        output, log_sum = part(query, keys, *inputs)
        return output, log_sum - 100.0 * (keys.shape[0] == 2)  # of the two prompts, not of the three rows

    monkeypatch.setattr(row_attention, "_part", without_prompt)
    assert sampler_of(deep)._decoder.joins


def trial(path: Path, dtype: str, again: float = 0.25) -> tuple[float, float]:
    transformer = engine_of(path, dtype=dtype).model.transformer
    differences_N = torch.tensor([0.1, 0.2, 0.9])
    medians = iter([again, 0.02, 0.01])

    def noise() -> Tensor:
        return torch.tensor([0.0, next(medians), 0.7])

    return difference_and_bound(transformer, differences_N, 0.05, noise)


def test_with_routers_in_half_precision_medians_are_compared_with_the_noise(tmp_path: Path) -> None:
    routers = write_tiny_model(tmp_path / "routers", "Mixtral", **{"num_local_experts": 4, "num_key_value_heads": 2})
    assert trial(routers, "bfloat16") == pytest.approx((0.2, 0.5))
    assert trial(routers, "bfloat16", again=0.01) == pytest.approx((0.2, 0.1))
    dense = write_tiny_model(tmp_path / "dense")
    for path, dtype in ((routers, "float32"), (dense, "bfloat16")):
        assert trial(path, dtype) == pytest.approx((0.9, 0.05))


def test_every_layers_output_is_rounded_once_more_in_the_same_way_each_time(tmp_path: Path) -> None:
    transformer = engine_of(write_tiny_model(tmp_path), dtype="bfloat16").model.transformer
    seen: list[Tensor] = []
    transformer.model.layers[1].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].float()))

    def compute() -> Tensor:
        with torch.no_grad():
            last: Tensor = transformer.model(input_ids=torch.arange(40)[None]).last_hidden_state
        return last

    before = compute()
    with rounding_again(transformer):
        rounded = compute(), compute()
    assert bool((rounded[0] != rounded[1]).any()), "the numbers go on within a context"
    with rounding_again(transformer):
        assert torch.equal(compute(), rounded[0])
    with rounding_again(transformer, seed=1):
        assert not torch.equal(compute(), rounded[0])
    assert torch.equal(compute(), before)
    changed = ((seen[1] - seen[0]) / seen[0]).abs()
    assert float((changed > 0).float().mean()) > 0.2
    assert float(changed.median()) <= 2 * torch.finfo(torch.bfloat16).eps < TOLERANCES[torch.bfloat16]
