"""The start of a critic, and every way it can be wrong: named before the first step, nothing updated."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rlcore_critic_engine.settings import CriticSettings
from rlcore_critic_engine.start import starting_model
from rlcore_critic_engine.worker import HfCritic
from safetensors.torch import save_file

from rlcore.algo.step import weigh
from rlcore.config import AlgoConfig, LoraConfig, ModelConfig, RunConfig
from rlcore.contracts.workers import WorkerContext
from rlcore.engines.hf import ValueModel, load_value_head
from rlcore.engines.hf.train.model import ModelKind, load_model
from rlcore.errors import CheckpointError, ConfigError, RlcoreError, WorkerError
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, SharedPrefix, TokenArrays

SHARD = "trainer_state/shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy `llama`, a `wide` one and a `qwen` of its shapes, one with a `small` vocabulary, one `blind`."""
    directory = tmp_path_factory.mktemp("models")
    write_tiny_model(directory / "llama")
    write_tiny_model(directory / "wide", hidden_size=64)
    write_tiny_model(directory / "qwen", architecture="Qwen2", num_key_value_heads=4)
    write_tiny_model(directory / "small", vocab_size=257)
    write_tiny_model(directory / "blind", max_position_embeddings=8)
    return directory


def critic(models: Path, **settings: Any) -> HfCritic:
    """A critic with the policy `llama`, set up."""
    shared_prefix, attention = settings.pop("shared", SharedPrefix.NONE), settings.pop("attention", "sdpa")
    model = ModelConfig(path=str(models / "llama"), tokenizer="bytes", attention=attention)
    worker = HfCritic(
        WorkerContext(
            role="critic",
            replica=0,
            rank=0,
            num_ranks=1,
            config=RunConfig(model=model),
            section=CriticSettings(**{"lr": 1e-2, **settings}),
            targets={"value_loss": "rlcore_critic_engine.loss:ValueLoss"},
            run_dir=models,
            seed=0,
            threads=1,
            device="cpu",
            shared_prefix=shared_prefix,
        )
    )
    worker.setup()
    return worker


def ready() -> Batch:
    batch = random_batch()
    mask_BT = batch.tokens.loss_mask_BT
    values_BT, returns_BT = (np.where(mask_BT, temperature, 0).astype(np.float32) for temperature in (0.0, 0.7))
    return replace(batch, values_BT=values_BT, returns_BT=returns_BT)


def saved(models: Path, directory: Path, **settings: Any) -> HfCritic:
    """A critic after an update, saved in `directory`."""
    worker = critic(models, **settings)
    worker.update(ready())
    worker.save(directory)
    return worker


def refused(error: type[RlcoreError], make: Any) -> str:
    with pytest.raises(error) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["wide", "qwen"])
def test_another_model_with_the_policys_tokens_can_be_the_critic(models: Path, name: str) -> None:
    worker = critic(models, path=str(models / name))
    assert not worker.values(ready()).any()
    worker.update(ready())
    assert worker.values(ready()).any()


def test_a_saved_critic_is_restored_with_its_head(models: Path, tmp_path: Path) -> None:
    worker = saved(models, tmp_path)
    other = critic(models, path=str(tmp_path / "model"), head="saved")
    assert np.array_equal(other.values(ready()), worker.values(ready()))
    assert other.engine.updates_done == 0


def test_a_value_model_that_was_saved_without_its_head_is_refused(models: Path, tmp_path: Path) -> None:
    saved(models, tmp_path)
    (tmp_path / "model" / "value_head.safetensors").unlink()
    message = refused(CheckpointError, lambda: critic(models, path=str(tmp_path / "model"), head="saved"))
    assert "no value_head.safetensors" in message
    assert "head=new" in message


def test_a_head_that_would_be_left_out_is_refused(models: Path, tmp_path: Path) -> None:
    worker = saved(models, tmp_path)
    message = refused(ConfigError, lambda: critic(models, path=str(tmp_path / "model"), head="new"))
    assert "head=saved" in message
    planned = critic(models, path=str(tmp_path / "model"))
    assert np.array_equal(planned.values(ready()), worker.values(ready()))


@pytest.mark.slow
def test_the_head_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    saved(models, tmp_path / "llama")
    saved(models, tmp_path / "wide", path=str(models / "wide"))
    source = tmp_path / "wide" / "model" / "value_head.safetensors"
    source.replace(tmp_path / "llama" / "model" / "value_head.safetensors")
    message = refused(CheckpointError, lambda: critic(models, path=str(tmp_path / "llama" / "model"), head="saved"))
    assert "[1, 64]" in message
    assert "[1, 32]" in message


@pytest.mark.slow
def test_the_head_of_a_model_of_another_type_is_refused_also_when_it_is_as_wide(models: Path, tmp_path: Path) -> None:
    saved(models, tmp_path / "llama")
    saved(models, tmp_path / "qwen", path=str(models / "qwen"))
    (tmp_path / "qwen" / "model" / "value_head.safetensors").replace(tmp_path / "llama/model/value_head.safetensors")
    message = refused(CheckpointError, lambda: critic(models, path=str(tmp_path / "llama" / "model"), head="saved"))
    assert "of type 'qwen2'" in message
    assert "'llama'" in message


def test_a_head_that_does_not_name_its_model_belongs_to_the_model_in_its_directory(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "llama")
    save_file({"weight": torch.ones(1, 32), "bias": torch.zeros(1)}, path / "value_head.safetensors")
    assert critic(tmp_path, path=str(path), head="saved").values(ready()).any()
    head = ValueModel(
        load_model(ModelKind.CAUSAL_LM, ModelConfig(str(path)), dtype="float32", device="cpu").transformer
    )
    (path / "config.json").write_text('{"model_type": "qwen2"}')
    assert "of type 'qwen2'" in refused(CheckpointError, lambda: load_value_head(head, path))


def test_a_damaged_head_is_refused(models: Path, tmp_path: Path) -> None:
    saved(models, tmp_path)
    (tmp_path / "model" / "value_head.safetensors").write_bytes(b"torn")
    assert "value_head.safetensors" in refused(
        CheckpointError, lambda: critic(models, path=str(tmp_path / "model"), head="saved")
    )


def test_adapters_without_their_model_are_refused_as_a_start(models: Path, tmp_path: Path) -> None:
    saved(models, tmp_path, lora=LoraConfig(enabled=True, rank=2))
    message = refused(CheckpointError, lambda: critic(models, path=str(tmp_path / "model"), head="saved"))
    assert "without a model" in message


def test_a_model_with_another_vocabulary_is_refused(models: Path) -> None:
    message = refused(ConfigError, lambda: critic(models, path=str(models / "small")))
    assert "257" in message
    assert "264" in message


@pytest.mark.timeout(60)
def test_a_critic_whose_configuration_is_a_pipe_is_refused(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "wide", tmp_path / "piped")
    (tmp_path / "piped" / "config.json").unlink()
    os.mkfifo(tmp_path / "piped" / "config.json")
    assert "'config.json' is a pipe" in refused(ConfigError, lambda: critic(models, path=str(tmp_path / "piped")))


def test_a_model_with_another_tokenizer_is_refused(models: Path, tmp_path: Path) -> None:
    import json
    import shutil

    for name, vocabulary in (("llama", {"a": 0, "b": 1}), ("wide", {"b": 0, "a": 1})):
        shutil.copytree(models / name, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert "tokenizer" in refused(ConfigError, lambda: critic(tmp_path, path=str(tmp_path / "wide")))


def test_what_is_no_model_is_refused(models: Path, tmp_path: Path) -> None:
    assert str(tmp_path) in refused(ConfigError, lambda: critic(models, path=str(tmp_path)))


def test_a_model_without_weights_is_refused_by_the_critics_own_key(models: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((models / "llama" / "config.json").read_text())
    message = refused(ConfigError, lambda: critic(models, path=str(tmp_path)))
    assert message.startswith(f"plugins.critic_engine.path='{tmp_path}'")
    assert "model.path" not in message


def test_adapters_that_fit_no_layer_are_refused_by_the_critics_own_key(models: Path) -> None:
    lora = LoraConfig(enabled=True, target_modules=("nothing",))
    message = refused(ConfigError, lambda: critic(models, lora=lora))
    assert message.startswith("plugins.critic_engine.lora.target_modules=['nothing']")


def test_prompts_that_the_model_cannot_share_are_refused_by_the_critics_own_key(models: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, architecture="Bloom", n_head=4, n_layer=1)
    message = refused(
        ConfigError, lambda: critic(models, path=str(tmp_path), shared=SharedPrefix.TREE, attention="eager")
    )
    assert message.startswith("plugins.critic_engine.shared_prefix=tree")
    assert "choose plugins.critic_engine.shared_prefix=none" in message


def test_the_revision_of_the_policy_is_not_that_of_another_repository() -> None:
    policy = ModelConfig(path="org/policy", revision="v2")
    assert starting_model(policy, CriticSettings()) == policy
    other = starting_model(policy, CriticSettings(path="org/critic"))
    assert (other.path, other.revision) == ("org/critic", "main")
    named = starting_model(policy, CriticSettings(path="org/critic", revision="abc"))
    assert named.revision == "abc"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "qwen"])
def test_a_checkpoint_of_another_architecture_is_refused_and_the_critic_stays_as_it_was(
    models: Path, tmp_path: Path, name: str
) -> None:
    saved(models, tmp_path / "other", path=str(models / name))
    worker = saved(models, tmp_path / "a")
    before = state_of(worker, tmp_path / "b")
    assert "model" in refused(CheckpointError, lambda: worker.restore(tmp_path / "other"))
    assert state_of(worker, tmp_path / "c") == before


def test_a_checkpoint_of_a_run_without_a_critic_is_refused(models: Path, tmp_path: Path) -> None:
    worker = critic(models)
    before = state_of(worker, tmp_path / "b")
    message = refused(CheckpointError, lambda: worker.restore(tmp_path / "step_2" / "critic"))
    assert "step_2': it has no 'critic/', so it is of a run without a critic" in message
    assert state_of(worker, tmp_path / "c") == before


def test_a_checkpoint_without_its_head_is_refused_and_the_critic_stays_as_it_was(models: Path, tmp_path: Path) -> None:
    saved(models, tmp_path / "a")
    (tmp_path / "a" / "model" / "value_head.safetensors").unlink()
    worker = critic(models)
    before = state_of(worker, tmp_path / "b")
    message = refused(CheckpointError, lambda: worker.restore(tmp_path / "a"))
    assert "saved without its head; nothing was loaded" in message
    assert state_of(worker, tmp_path / "c") == before


def state_of(worker: HfCritic, directory: Path) -> bytes:
    """Weights and optimizer, as a checkpoint holds them."""
    worker.save(directory)
    files = (
        "model/model.safetensors",
        "model/value_head.safetensors",
        "trainer_state/shard-00001-model-00001-of-00001.safetensors",
    )
    return b"".join((directory / file).read_bytes() for file in files)


def bytes_of(worker: HfCritic) -> bytes:
    """The weights, which a checkpoint takes only if they are finite."""
    return b"".join(weight.detach().numpy().tobytes() for weight in worker.engine.model.parameters())


def test_values_that_are_not_numbers_stop_the_run_before_any_update(models: Path, tmp_path: Path) -> None:
    worker = saved(models, tmp_path / "a")
    with torch.no_grad():
        worker.engine.model.value_head.bias.fill_(float("nan"))  # type: ignore[union-attr,operator]
    before = bytes_of(worker)
    message = refused(WorkerError, lambda: worker.values(ready()))
    assert "not finite" in message
    assert "nothing was updated" in message
    assert bytes_of(worker) == before


def test_targets_that_are_not_numbers_skip_the_update_and_end_the_run_if_they_persist(
    models: Path, tmp_path: Path
) -> None:
    worker = saved(models, tmp_path / "a", max_skipped_updates=2)
    before, batch = state_of(worker, tmp_path / "b"), ready()
    bad = replace(batch, returns_BT=np.where(batch.tokens.loss_mask_BT, np.nan, 0).astype(np.float32))
    assert worker.update(bad)["critic/skipped"] == 1.0
    message = refused(WorkerError, lambda: worker.update(bad))
    assert "plugins.critic_engine.max_skipped_updates=2" in message
    assert _weights(before, tmp_path / "b") == _weights(state_of(worker, tmp_path / "c"), tmp_path / "c")


def _weights(_: bytes, directory: Path) -> list[bytes]:
    """Everything but the counter of skipped updates, which is not a tensor."""
    names = (
        "model/model.safetensors",
        "model/value_head.safetensors",
        "trainer_state/shard-00001-model-00001-of-00001.safetensors",
    )
    return [(directory / name).read_bytes() for name in names]


def test_a_minibatch_without_a_sampled_token_is_skipped_and_nothing_moves(models: Path, tmp_path: Path) -> None:
    worker = saved(models, tmp_path / "a")
    before, batch = state_of(worker, tmp_path / "b"), ready()
    tokens = batch.tokens
    masked = TokenArrays(
        tokens.token_ids_BT, tokens.valid_BT, np.zeros_like(tokens.loss_mask_BT), tokens.rollout_logprobs_BT
    )
    nothing = replace(batch, tokens=masked, num_sampled_B=np.zeros_like(batch.num_sampled_B))
    assert worker.update(weigh(nothing, AlgoConfig())) == {"critic/skipped": 1.0}
    assert state_of(worker, tmp_path / "c") == before


def test_a_minibatch_that_the_loss_leaves_out_moves_nothing_either(models: Path, tmp_path: Path) -> None:
    worker = saved(models, tmp_path / "a")
    before, batch = state_of(worker, tmp_path / "b"), ready()
    left_out = replace(batch, weights_B=np.zeros(len(batch), dtype=np.float32))
    assert worker.update(left_out)["critic/skipped"] == 1.0
    assert state_of(worker, tmp_path / "c") == before


def test_a_row_that_does_not_fit_the_critics_window_is_refused(models: Path) -> None:
    worker = critic(models, path=str(models / "blind"))
    assert "window holds 8" in refused(ConfigError, lambda: worker.values(ready()))
