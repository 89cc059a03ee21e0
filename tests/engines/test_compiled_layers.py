"""Layers that run through torch.compile compute the same, for batches of any size, and compile once.

The compiler's front end is the real one; the back end `aot_eager` runs torch's own kernels, so no C compiler is needed.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, KlConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import TrainEngine
from rlcore.engines.hf.train.compiled import CompiledLayers
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import ConfigError
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import SharedPrefix

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

BATCHES = 20
LORA = LoraConfig(enabled=True, rank=4, dropout=0.1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "Qwen3", num_key_value_heads=2, head_dim=8)


@pytest.fixture(autouse=True)
def _without_the_thread_of_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # torch makes an invisible bar when it compiles


def engine_of(path: Path, shared: SharedPrefix, backend: str = "", **settings: Any) -> TrainEngine:
    """An engine; with a back end its layers are compiled."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    model, loss = ModelConfig(path=str(path)), PolicyLoss(clip, AlgoConfig(kl=KlConfig(placement="none")))
    engine = TrainEngine(
        "causal_lm", model, EngineConfig(lr=1e-3, **settings), loss, shared_prefix=shared, num_updates=BATCHES
    )
    if backend:
        engine.model.compiled = CompiledLayers(engine.model.transformer, backend)
    return engine


def num_graphs() -> int:
    return int(dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("shared", "settings"),
    [
        (SharedPrefix.TREE, {}),
        (SharedPrefix.NONE, {}),
        (SharedPrefix.TREE, {"gradient_checkpointing": True}),
        (SharedPrefix.TREE, {"lora": LORA}),
        (SharedPrefix.TREE, {"dtype": "bfloat16"}),
    ],
    ids=["tree", "none", "checkpointing", "lora", "bfloat16"],
)
def test_twenty_ragged_batches_give_what_plain_layers_give_and_compile_once(
    path: Path, shared: SharedPrefix, settings: dict[str, Any]
) -> None:
    plain, compiled = engine_of(path, shared, **settings), engine_of(path, shared, "aot_eager", **settings)
    tolerance = 0.1 if "dtype" in settings else 1e-4
    graphs = []
    for index in range(BATCHES):
        batch = random_batch(2 + index % 5, 2 + index % 3, seed=index)
        expected, found = plain.update(batch), compiled.update(batch)
        assert num_graphs() > 0, "an update compiles, also if no pass was made before it"
        np.testing.assert_allclose(compiled.logprobs(batch), plain.logprobs(batch), atol=tolerance)
        assert found["policy/loss"] == pytest.approx(expected["policy/loss"], abs=tolerance)
        assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=tolerance)
        graphs.append(num_graphs())
    assert graphs[-1] == graphs[0]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_of_a_subclass_is_compiled_and_checkpointed_once(path: Path, checkpointing: bool) -> None:
    """FSDP2 makes a subclass of each layer's class; transformers wraps its `forward` once more."""
    engine = engine_of(path, SharedPrefix.TREE, "aot_eager", gradient_checkpointing=checkpointing)
    layers = [module for module in engine.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    sharded = type("Sharded", (type(layers[0]),), {})
    for layer in layers:
        layer.__class__ = sharded
    calls: list[Any] = []
    checkpoint = layers[0]._gradient_checkpointing_func if checkpointing else None

    def counted(function: Any, *inputs: Any) -> Any:
        calls.append(function)
        return checkpoint(function, *inputs)

    if checkpointing:
        for layer in layers:
            layer._gradient_checkpointing_func = counted
    engine.update(random_batch(1, 2, seed=1))
    assert len(calls) == (len(layers) if checkpointing else 0)
    assert num_graphs() > 0


@pytest.mark.slow
def test_outside_of_updates_and_passes_layers_are_plain(path: Path) -> None:
    engine = engine_of(path, SharedPrefix.TREE, "aot_eager")
    engine.logprobs(random_batch())
    compiled = num_graphs()
    assert compiled > 0
    assert not any("forward" in vars(module) for module in engine.model.modules())
    with torch.no_grad():
        engine.model.transformer(torch.arange(5)[None])
    assert num_graphs() == compiled


@pytest.mark.slow
def test_a_compiler_that_fails_is_one_line_that_names_the_setting(path: Path) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for you\nand more")

    engine = engine_of(path, SharedPrefix.TREE)
    engine.model.compiled = CompiledLayers(engine.model.transformer, fails)
    with pytest.raises(ConfigError, match=r"^actor\.compile=true: torch .* of Qwen3ForCausalLM: .*no kernel") as found:
        engine.logprobs(random_batch())
    assert str(found.value).endswith("; set actor.compile=false")
    assert "\n" not in str(found.value)
    assert not any("forward" in vars(module) for module in engine.model.modules())


def test_only_the_setting_compiles(path: Path) -> None:
    assert engine_of(path, SharedPrefix.TREE).model.compiled is None
    assert engine_of(path, SharedPrefix.TREE, compile=True).model.compiled is not None
