"""Checkpoints of a critic with another adapter or trunk: errors name the critic's settings, not the actor's."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from rlcore_critic_engine.settings import CriticSettings
from rlcore_critic_engine.worker import HfCritic

from rlcore.config import LoraConfig, ModelConfig, RunConfig
from rlcore.contracts.workers import WorkerContext
from rlcore.engines.hf.worker import HfActor
from rlcore.errors import CheckpointError
from rlcore.testing.tiny import write_tiny_model

Kind = tuple[LoraConfig, Literal["own", "actor"]]
WHOLE, ADAPTER = LoraConfig(), LoraConfig(enabled=True, rank=2, alpha=8.0)
SECTION = "plugins.critic_engine.lora"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def critic(model: Path, lora: LoraConfig, trunk: Literal["own", "actor"] = "own") -> HfCritic:
    """A critic that is set up, with `trunk=actor` inside an actor."""
    config = RunConfig(model=ModelConfig(path=str(model), tokenizer="bytes"))
    context = WorkerContext(
        role="critic",
        replica=0,
        rank=0,
        num_ranks=1,
        config=config,
        section=CriticSettings(lora=lora, trunk=trunk),
        targets={"value_loss": "rlcore_critic_engine.loss:ValueLoss", "policy_loss": "rlcore.algo.loss:clip"},
        run_dir=model,
        seed=0,
        threads=1,
        device="cpu",
    )
    if trunk == "actor":
        host = HfActor(replace(context, role="actor", section=None))
        host.setup()
        context = replace(context, host=host)
    worker = HfCritic(context)
    worker.setup()
    return worker


@pytest.mark.parametrize(
    ("saved", "resumed", "message"),
    [
        (ADAPTER, WHOLE, f"it holds a LoRA adapter, and this run trains a whole model; needs {SECTION}.enabled=true,"),
        (WHOLE, ADAPTER, f"it holds a whole model, and this run trains a LoRA adapter; needs {SECTION}.enabled=false,"),
        (ADAPTER, replace(ADAPTER, rank=4), f"needs the {SECTION} settings with which it was saved"),
        (ADAPTER, replace(ADAPTER, alpha=9.0), f"this run's is 9; needs {SECTION}.alpha=8, or a new run"),
    ],
    ids=["off", "on", "rank", "alpha"],
)
def test_another_setting_of_the_adapter_is_refused_by_its_name(
    model: Path, tmp_path: Path, saved: LoraConfig, resumed: LoraConfig, message: str
) -> None:
    critic(model, saved).save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        critic(model, resumed).restore(tmp_path)
    assert message in str(caught.value)
    assert "actor.lora" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "resumed", "setting"),
    [
        ((WHOLE, "own"), (WHOLE, "actor"), "trunk=own"),
        ((ADAPTER, "own"), (ADAPTER, "actor"), "trunk=own"),
        ((WHOLE, "actor"), (WHOLE, "own"), "trunk=actor"),
        ((ADAPTER, "actor"), (ADAPTER, "own"), "trunk=actor"),
        ((WHOLE, "actor"), (ADAPTER, "actor"), "lora.enabled=false"),
        ((ADAPTER, "actor"), (WHOLE, "actor"), "lora.enabled=true"),
    ],
)
def test_a_checkpoint_of_another_trunk_is_refused_before_any_change(
    model: Path, tmp_path: Path, saved: Kind, resumed: Kind, setting: str
) -> None:
    critic(model, *saved).save(tmp_path)
    other = critic(model, *resumed)
    before = [parameter.clone() for parameter in other.engine.model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        other.restore(tmp_path)
    assert f"nothing was loaded; resume with plugins.critic_engine.{setting}, or begin a new run" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(before, other.engine.model.parameters(), strict=True))
