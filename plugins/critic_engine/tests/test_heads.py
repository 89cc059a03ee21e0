"""A critic that starts from the head of a classifier: which one it takes, what it says, and what it refuses."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rlcore_critic_engine import start
from rlcore_critic_engine.critic import ValueCritic
from rlcore_critic_engine.heads import HEAD_FILE, StartingHead, starting_head
from rlcore_critic_engine.settings import CriticSettings
from rlcore_critic_engine.worker import HfCritic
from safetensors.torch import load_file, save_file

from rlcore.config import LoraConfig, ModelConfig, RunConfig
from rlcore.contracts.workers import WorkerContext
from rlcore.engines.hf import VALUE_HEAD_FILE
from rlcore.errors import ConfigError
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.testing.tiny import random_batch, write_tiny_classifier, write_tiny_model
from rlcore.types import Batch, Float32s

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CLASSES: Any = transformers


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `policy`, and reward models: of `Sequence` and of `Token`."""
    directory = tmp_path_factory.mktemp("models")
    write_tiny_model(directory / "policy")
    write_tiny_classifier(directory / "Sequence", seed=1)
    write_tiny_classifier(directory / "Token", seed=2, of="Token")
    with torch.no_grad():
        biased = CLASSES.AutoModelForTokenClassification.from_pretrained(directory / "Token")
        biased.score.bias.fill_(0.25)
    biased.save_pretrained(directory / "Token")
    return directory


def critic(models: Path, path: Path, **settings: Any) -> HfCritic:
    """A critic with the policy, set up."""
    worker = HfCritic(
        WorkerContext(
            role="critic",
            replica=0,
            rank=0,
            num_ranks=1,
            config=RunConfig(model=ModelConfig(path=str(models / "policy"), tokenizer="bytes")),
            section=CriticSettings(**{"lr": 1e-2, "path": str(path), **settings}),
            targets={"value_loss": "rlcore_critic_engine.loss:ValueLoss"},
            run_dir=models,
            seed=0,
            threads=1,
            device="cpu",
        )
    )
    worker.setup()
    return worker


def planned(models: Path, path: Path, *overrides: str) -> RunPlan:
    settings = [
        f"model.path={models / 'policy'}",
        "model.tokenizer=bytes",
        "data.sources.all.path=p.jsonl",
        "reward.functions.letters.fn=count_letter",
        "algo.preset=ppo",
        f"plugins.critic_engine.path={path}",
        *overrides,
    ]
    return plan_run([], settings, ["null", "critic_engine"])


def refused(models: Path, path: Path, *overrides: str) -> str:
    """The output of `rlcore plan`, on one line."""
    with pytest.raises(ConfigError) as caught:
        planned(models, path, *overrides)
    assert "\n" not in str(caught.value)
    assert "plugins.critic_engine" in str(caught.value)
    return str(caught.value)


def scores_of(path: Path, batch: Batch) -> Float32s:
    """(B, T) what transformers' own classifier says of the tokens before each loss token."""
    model = _opened(path)
    model.config.pad_token_id = None  # else the score is that of the last token which is not the pad token
    arrays = batch.tokens
    scores_BT = np.zeros(arrays.loss_mask_BT.shape, dtype=np.float32)
    for row, column in np.argwhere(arrays.loss_mask_BT):
        before = torch.tensor(arrays.token_ids_BT[row, :column][None], dtype=torch.int64)
        with torch.no_grad():
            logits = model(input_ids=before, attention_mask=torch.ones_like(before)).logits
        scores_BT[row, column] = logits.flatten()[-1]
    return scores_BT


def _opened(path: Path, **more: Any) -> Any:
    [architecture] = json.loads((path / "config.json").read_text())["architectures"]
    return getattr(CLASSES, architecture).from_pretrained(path, **more).eval()


def ready(seed: int = 0) -> Batch:
    batch = random_batch(seed=seed)
    mask_BT = batch.tokens.loss_mask_BT
    values_BT, returns_BT = (np.where(mask_BT, temperature, 0).astype(np.float32) for temperature in (0.0, 0.7))
    return replace(batch, values_BT=values_BT, returns_BT=returns_BT)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["Sequence", "Token"])
@pytest.mark.parametrize("head", ["planned", "classifier"])
def test_values_are_the_scores_of_the_classifier(models: Path, of: str, head: str) -> None:
    worker = critic(models, models / of, head=head)
    expected_BT = scores_of(models / of, ready())
    assert np.abs(expected_BT).max() > 0.1
    np.testing.assert_allclose(worker.values(ready()), expected_BT, atol=1e-5 * np.abs(expected_BT).max())
    assert worker.facts()["head"] == f"the head 'score' of the LlamaFor{of}Classification '{models / of}'"


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), [("Qwen2", "score"), ("GPTNeoX", "classifier")])
def test_heads_of_other_names_and_models_are_found(models: Path, tmp_path: Path, architecture: str, name: str) -> None:
    path = write_tiny_classifier(tmp_path, architecture, of="Token")
    worker = critic(models, path)
    expected_BT = scores_of(path, ready())
    np.testing.assert_allclose(worker.values(ready()), expected_BT, atol=1e-5 * np.abs(expected_BT).max())
    assert f"the head '{name}' of the {architecture}ForTokenClassification" in worker.facts()["head"]


@pytest.mark.slow
def test_a_classifier_in_bfloat16_gives_its_head_bit_for_bit(models: Path, tmp_path: Path) -> None:
    for of in ("Sequence", "Token"):
        _opened(models / of, dtype=torch.bfloat16).save_pretrained(tmp_path / of)
        head = load_file(tmp_path / of / "model.safetensors")["score.weight"]
        assert head.dtype == torch.bfloat16
        for dtype in ("bfloat16", "float32"):
            model: Any = critic(models, tmp_path / of, dtype=dtype).engine.model
            assert model.value_head.weight.dtype == torch.float32
            assert torch.equal(model.value_head.weight, head.float())


def test_a_value_head_of_trl_on_a_causal_model_is_found(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "policy", tmp_path / "trl")
    tensors = load_file(tmp_path / "trl" / "model.safetensors")
    head = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.tensor([0.5])}
    save_file(tensors | head, tmp_path / "trl" / "model.safetensors", metadata={"format": "pt"})
    worker = critic(models, tmp_path / "trl")
    model: Any = worker.engine.model
    assert torch.equal(model.value_head.weight.detach(), head["v_head.summary.weight"])
    assert model.value_head.bias.item() == 0.5
    assert worker.facts()["head"].startswith("the head 'v_head.summary' of the LlamaForCausalLM")


def test_a_head_in_one_of_several_files_is_found(models: Path, tmp_path: Path) -> None:
    _opened(models / "Token").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    values = [critic(models, value).values(ready()) for value in (tmp_path, models / "Token")]
    assert np.array_equal(*values)


@pytest.mark.slow
def test_a_critic_that_started_from_a_classifier_learns_and_resumes(models: Path, tmp_path: Path) -> None:
    for lora in (False, True):
        settings = {"lora": LoraConfig(enabled=lora, rank=2)}
        worker = critic(models, models / "Token", **settings)
        before = worker.values(ready())
        worker.update(ready())
        worker.save(tmp_path / str(lora))
        after = worker.values(ready())
        assert (before != after).any()
        other = critic(models, models / "Token", **settings)
        assert np.array_equal(other.values(ready()), before)
        other.restore(tmp_path / str(lora))
        assert np.array_equal(other.values(ready()), after)


def test_the_plan_says_which_head_and_the_log_which_was_loaded(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    def note(path: Path, *overrides: str) -> str:
        [found] = [
            note for note in planned(models, path, *overrides).notes if note.startswith("critic: the value head")
        ]
        return found

    assert note(models / "Token").endswith(f"the head 'score' of the LlamaForTokenClassification '{models / 'Token'}'")
    assert note(models / "policy").endswith("starts from: new, zero")
    left_out = note(models / "Token", "plugins.critic_engine.head=new")
    assert left_out.endswith(f"new, zero; the head 'score' of '{models / 'Token'}' is left out")
    assert "not on this machine yet" in note(models / "nowhere")

    worker = critic(models, models / "Token")

    class Replica:
        async def call(self, method: Any) -> Any:
            return method(worker) if method.__name__ != "facts" else worker.facts()

    group: Any = type("Group", (), {"replicas": [Replica()]})()
    with caplog.at_level(logging.INFO):
        asyncio.run(ValueCritic(group, CriticSettings()).start())
    assert f"critic: the value head starts from: {worker.head}" in caplog.text


def test_a_new_head_leaves_the_classifiers_out(models: Path) -> None:
    assert not critic(models, models / "Token", head="new").values(ready()).any()


def test_files_that_come_while_the_model_is_loaded_are_looked_at(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, calls = starting_head, []

    def later(policy: ModelConfig, settings: CriticSettings) -> StartingHead:
        calls.append(settings.path)
        return StartingHead("unknown", "later") if len(calls) == 1 else known(policy, settings)

    monkeypatch.setattr(start, "starting_head", later)
    worker = critic(models, models / "Token")
    assert worker.values(ready()).any()
    assert "'score'" in worker.facts()["head"]


def test_the_name_of_the_file_of_a_saved_head_is_the_engines() -> None:
    assert HEAD_FILE == VALUE_HEAD_FILE


def test_several_labels_are_refused(models: Path, tmp_path: Path) -> None:
    for of in ("Sequence", "Token"):
        path = write_tiny_classifier(tmp_path / of, labels=2, of=of)  # type: ignore[arg-type]
        for head in ("planned", "classifier"):
            message = refused(models, path, f"plugins.critic_engine.head={head}")
            assert f"the head 'score' of the LlamaFor{of}Classification has 2 outputs" in message
            assert "num_labels=1" in message
        planned(models, path, "plugins.critic_engine.head=new")


def test_a_head_of_another_hidden_size_is_refused(models: Path, tmp_path: Path) -> None:
    message = refused(models, changed(models, tmp_path, {"score.weight": torch.ones(1, 64)}))
    assert "reads 64 numbers, and its hidden states have 32" in message


def test_a_bias_that_is_not_a_number_is_refused(models: Path, tmp_path: Path) -> None:
    assert "has shape [2]" in refused(models, changed(models, tmp_path, {"score.bias": torch.ones(2)}))


def test_files_with_two_heads_are_refused(models: Path, tmp_path: Path) -> None:
    message = refused(models, changed(models, tmp_path, {"v_head.summary.weight": torch.ones(1, 32)}))
    assert "it has 2 heads, score and v_head.summary" in message


def test_a_classifier_without_its_head_is_refused(models: Path, tmp_path: Path) -> None:
    path = changed(models, tmp_path, {}, "score.weight")
    for head in ("planned", "classifier"):
        message = refused(models, path, f"plugins.critic_engine.head={head}")
        assert "no head of scores among them" in message
        assert "score.weight" in message


def test_a_classifier_that_is_not_saved_as_safetensors_is_refused(models: Path, tmp_path: Path) -> None:
    path = changed(models, tmp_path, {})
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    message = refused(models, path)
    assert "no safetensors files (but pytorch_model.bin)" in message


def test_a_file_that_is_damaged_is_refused(models: Path, tmp_path: Path) -> None:
    path = changed(models, tmp_path, {})
    (path / "model.safetensors").write_bytes(b"torn")
    assert "headers of its safetensors files" in refused(models, path)


def test_a_model_without_a_head_is_refused_when_one_is_asked_for(models: Path) -> None:
    message = refused(models, models / "policy", "plugins.critic_engine.head=classifier")
    assert "LlamaForCausalLM" in message
    assert "head=new" in message


def test_a_classifiers_head_on_the_actors_trunk_is_refused(models: Path) -> None:
    trunk = "plugins.critic_engine.trunk=actor"
    message = refused(models, models / "Token", trunk, "plugins.critic_engine.head=classifier")
    assert "a head reads the hidden states of the classifier that it is saved with" in message
    assert "has no effect" in refused(models, models / "Token", trunk)


def test_weights_that_are_missing_are_refused_and_not_made_up(models: Path, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.up_proj.weight"
    path = changed(models, tmp_path, {}, lost)
    with pytest.raises(
        ConfigError, match=r"^plugins\.critic_engine\.path=.* lack 1 of the weights .*up_proj"
    ) as caught:
        critic(models, path)
    assert "\n" not in str(caught.value)


def test_a_head_with_numbers_that_are_not_finite_is_refused(models: Path, tmp_path: Path) -> None:
    path = changed(models, tmp_path, {"score.weight": torch.full((1, 32), float("nan"))})
    with pytest.raises(ConfigError, match=r"tensor 'score\.weight' of .* not finite; .*head=new"):
        critic(models, path)


def changed(models: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], without: str = "") -> Path:
    """A copy of the token classifier with these tensors, and without that one."""
    path = tmp_path / "changed"
    shutil.copytree(models / "Token", path)
    every = load_file(path / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in every.items() if name != without}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path
