"""Saving and restoring the training engine, and exporting what was saved."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from rlcore.algo.loss import clip
from rlcore.config import AlgoConfig, EngineConfig, LoraConfig, ModelConfig
from rlcore.engines.hf import LossTerms, MicroBatch, Predictions, TrainEngine
from rlcore.engines.hf.train import state
from rlcore.engines.hf.train.policy_loss import PolicyLoss
from rlcore.errors import CheckpointError, ConfigError
from rlcore.testing.runs import untimed
from rlcore.testing.tiny import random_batch, write_tiny_model

torch.set_num_threads(1)  # the models are tiny, and the tests may share their cores

tqdm.monitor_interval = 0  # peft merges under a progress bar, whose watching thread would outlive the test
# peft 0.21 reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

LORA = LoraConfig(enabled=True, rank=4, alpha=8.0)
SHARD = "trainer_state/shard-00001-model-00001-of-00001.safetensors"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-lora": {"dtype": "bfloat16", "lora": LORA},
    "nearest": {"dtype": "bfloat16", "rounding": "nearest"},
    "float16": {"dtype": "float16"},
    "lora": {"lora": LORA},
    "linear": {"lr_schedule": "linear"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    return write_tiny_model(directory, num_key_value_heads=2, tie_word_embeddings=request.param)


def engine_of(path: Path, **settings: Any) -> TrainEngine:
    seed = settings.pop("seed", 0)
    config = EngineConfig(**{"lr": 1e-3, "warmup_steps": 2, "micro_batch_tokens": 100, **settings})
    model = ModelConfig(path=str(path))
    return TrainEngine("causal_lm", model, config, PolicyLoss(clip, AlgoConfig()), num_updates=8, seed=seed)


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_three_updates_equal_two_a_restart_and_one_bit_for_bit(
    llama: Path, tmp_path: Path, variant: dict[str, Any]
) -> None:
    batches = [random_batch(seed=seed) for seed in range(3)]
    unbroken, first = engine_of(llama, **variant), engine_of(llama, **variant)
    # Another seed makes another adapter, and the saved one must win; it would also round in another way.
    second = engine_of(llama, seed=0 if "dtype" in variant else 1, **variant)
    start = weights_of(unbroken)
    expected = [untimed(unbroken.update(batch)) for batch in batches]
    metrics = [untimed(first.update(batch)) for batch in batches[:2]]
    first.save(tmp_path)
    second.restore(tmp_path)
    assert_same(weights_of(second), weights_of(first))
    metrics.append(untimed(second.update(batches[2])))
    assert metrics == expected
    assert_same(weights_of(second), weights_of(unbroken))
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights_of(second).items())


def test_the_random_states_come_back(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)

    def draws() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.random()), random.random()

    draws()
    engine.save(tmp_path)
    expected = draws()
    draws()
    engine.restore(tmp_path)
    assert draws() == expected


def test_a_saved_model_directory_opens_with_from_pretrained_and_gives_the_same_logits(
    llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_of(llama)
    engine.update(random_batch())
    engine.save(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    token_ids_BT = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(opened(token_ids_BT).logits, engine.model.transformer(token_ids_BT).logits)
    before, after = (json.loads((path / "config.json").read_text()) for path in (llama, tmp_path / "model"))
    assert after == before


def test_a_checkpoint_holds_no_pickle(llama: Path, tmp_path: Path) -> None:
    engine_of(llama).save(tmp_path)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_saving_twice_writes_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    engine.update(random_batch())
    for name in ("a", "b"):
        engine.save(tmp_path / name)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert files
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_snapshot_holds_the_state_of_its_moment_and_is_written_as_that_was(
    llama: Path, tmp_path: Path, variant: dict[str, Any]
) -> None:
    engine = engine_of(llama, **variant)
    engine.update(random_batch(seed=0))
    engine.save(tmp_path / "saved")
    engine.snapshot()
    engine.update(random_batch(seed=1))
    torch.rand(1)
    engine.write_snapshot(tmp_path / "written")
    files = files_of(tmp_path / "saved")
    assert files_of(tmp_path / "written") == files
    engine.save(tmp_path / "later")
    later = files_of(tmp_path / "later")
    assert {name for name in files if files[name] != later[name]} >= {
        "trainer_state/shard-00001-model-00001-of-00001.safetensors"
    }
    with pytest.raises(ValueError, match="found no snapshot to write"):
        engine.write_snapshot(tmp_path / "again")


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_a_model_directory_is_as_transformers_writes_it(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    engine.save(tmp_path / "saved")
    engine.model.transformer.save_pretrained(tmp_path / "expected")
    assert files_of(tmp_path / "saved" / "model") == files_of(tmp_path / "expected")


def test_a_large_model_is_split_into_files_that_from_pretrained_opens(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_of(llama)
    monkeypatch.setattr(state, "MAX_FILE_SIZE", "20KB")
    engine.save(tmp_path)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in engine.model.transformer.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor)


def test_a_missing_or_foreign_checkpoint_is_refused(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    with pytest.raises(CheckpointError, match="it has no 'model/', and a full model is to be restored"):
        engine.restore(tmp_path / "nothing")
    other = engine_of(write_tiny_model(tmp_path / "other", num_key_value_heads=4))
    other.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds another model"):
        engine.restore(tmp_path / "saved")


@pytest.mark.slow
def test_an_adapter_of_other_layers_is_refused_also_when_it_has_fewer(llama: Path, tmp_path: Path) -> None:
    both, one = ({"lora": replace(LORA, target_modules=value)} for value in (("q_proj", "v_proj"), ("q_proj",)))
    for number, (written, read) in enumerate(((one, both), (both, one))):
        engine_of(llama, **written).save(tmp_path / str(number))
        engine = engine_of(llama, seed=1, **read)
        before = weights_of(engine)
        message = r"holds an adapter of other settings: '.*v_proj.*' is .* in this run; needs the actor\.lora settings"
        with pytest.raises(CheckpointError, match=message) as caught:
            engine.restore(tmp_path / str(number))
        assert "\n" not in str(caught.value)
        assert_same(weights_of(engine), before)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "resumed"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_state_without_the_masters_of_the_run_is_refused(
    llama: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    engine = engine_of(llama, dtype=saved)
    engine.update(random_batch(seed=0))
    engine.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"masters of \d+ tensors, and this run of \d+: the dtype is another one"
    ) as caught:
        engine_of(llama, dtype=resumed).restore(tmp_path)
    assert "\n" not in str(caught.value)


def test_damaged_training_state_is_a_checkpoint_error(llama: Path, tmp_path: Path) -> None:
    engine = engine_of(llama)
    engine.save(tmp_path)
    (state,) = (tmp_path / "trainer_state").iterdir()
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"reading trainer_state") as caught:
        engine.restore(tmp_path)
    assert "\n" not in str(caught.value)


def value_loss(micro: MicroBatch, predictions: Predictions) -> LossTerms:
    assert micro.batch.returns_BT is not None
    return LossTerms((predictions.scores_BT - micro.per_token(micro.batch.returns_BT)) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["full", "lora"])
def test_a_value_model_is_restored_with_its_head_and_can_be_started_from(
    llama: Path, tmp_path: Path, lora: LoraConfig
) -> None:
    batch = random_batch()
    batch = replace(batch, returns_BT=np.ones(batch.tokens.token_ids_BT.shape, dtype=np.float32))

    def value_engine(path: Path) -> TrainEngine:
        config = EngineConfig(lr=1e-2, lora=lora)
        return TrainEngine("value", ModelConfig(path=str(path)), config, value_loss, name="critic")

    engine = value_engine(llama)
    for _ in range(2):
        engine.update(batch)
    engine.save(tmp_path)
    restored = value_engine(llama)
    restored.restore(tmp_path)
    assert engine.values(batch).any()
    np.testing.assert_array_equal(restored.values(batch), engine.values(batch))
    if not lora.enabled:
        np.testing.assert_array_equal(value_engine(tmp_path / "model").values(batch), engine.values(batch))


def test_equal_adapters_are_equal_files_also_in_another_process(llama: Path, tmp_path: Path) -> None:
    state.save_adapter(engine_of(llama, lora=LORA).model, tmp_path)
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert len(targets) == 14
    assert targets == sorted(targets), "peft has them in a set, whose order is random"


@pytest.mark.slow
def test_lora_trains_the_adapter_only_and_is_off_for_the_reference(llama: Path) -> None:
    batch = random_batch()
    engine, full = engine_of(llama, lora=LORA, warmup_steps=0), engine_of(llama)
    start = weights_of(engine)
    engine.update(batch)
    changed = [name for name, tensor in weights_of(engine).items() if not torch.equal(tensor, start[name])]
    assert changed
    assert all("lora_" in name for name in changed)
    assert engine.facts()["num_trainable"] == sum(start[name].numel() for name in start if "lora_" in name)
    with engine.model.without_adapter():
        np.testing.assert_array_equal(engine.logprobs(batch), full.logprobs(batch))
    assert (engine.logprobs(batch) != full.logprobs(batch)).any()


def test_lora_dropout_is_on_in_updates_only(llama: Path) -> None:
    batch = random_batch()
    engine = engine_of(llama, lora=replace(LORA, dropout=0.5), warmup_steps=0, lr=1e-1)
    engine.update(batch)  # the adapter starts as a no-op; now it has an effect
    scored_BT = engine.logprobs(batch)
    np.testing.assert_array_equal(engine.logprobs(batch), scored_BT)
    metrics = engine.update(replace(batch, old_logprobs_BT=scored_BT))
    assert metrics["policy/ratio_max"] > 1.001


def test_adapting_the_output_layer_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.target_modules=.*output layer 'lm_head' cannot carry"):
        engine_of(llama, lora=replace(LORA, target_modules=("lm_head", "q_proj")))


def test_a_target_that_the_model_does_not_have_is_refused_also_where_another_one_matches(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no module 'v_prj'; did you mean 'v_proj'\?"):
        engine_of(llama, lora=replace(LORA, target_modules=("q_proj", "v_prj")))


@pytest.mark.real
def test_lora_without_peft_says_what_to_install(llama: Path) -> None:
    script = f"""
import sys
sys.modules["peft"] = None
from rlcore.engines.hf import TrainEngine
from rlcore.config import EngineConfig, LoraConfig, ModelConfig
from rlcore.errors import ConfigError
try:
    TrainEngine("causal_lm", ModelConfig(path={str(llama)!r}), EngineConfig(lora=LoraConfig(enabled=True)), None)
except ConfigError as error:
    sys.exit(0 if "pip install peft" in str(error) else 1)
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False).returncode == 0
