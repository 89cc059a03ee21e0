"""Rollout replicas with a copy of the weights: handed over every step, by version, and again after a restart."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlcore
from rlcore.errors import WorkerError
from rlcore.report import metrics
from rlcore.runtime.sampling_workers import launch_sampler
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.train import train


def config(directory: Path, **rollout: Any) -> dict[str, Any]:
    """Three steps on the null model."""
    path = directory / "prompts.jsonl"
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(path if path.exists() else write_prompts(path, 30))}}},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 8, **rollout},
        "reward": {"functions": {"letters": {"fn": "tests_letters.py:letters"}}},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 4, "max_steps": 3, "dir": str(directory / "runs"), "name": rollout["backend"]},
        "checkpoint": {"every_steps": 0},
        "plugins": {"null": {}},
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests_letters.py").write_text(
        "async def letters(completions, **columns):\n    return [float(text.count('a')) for text in completions]\n"
        "async def sums(completions, **columns):\n    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def versions(run: Path) -> list[set[int]]:
    """The versions of the weights that sampled each step's trajectories."""
    found = []
    for path in sorted((run / "trajectories").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found.append({version for row in rows for _, version in row["versions"]})
    return found


@pytest.mark.slow
def test_replicas_with_a_copy_sample_what_the_embedded_rollout_samples(here: Path) -> None:
    embedded = train(config(here, backend="null"))
    copies = train(config(here, backend="null_replica", replicas=2))
    assert differing(embedded.run_dir, copies.run_dir) == []
    assert versions(copies.run_dir) == [{0}, {1}, {2}]
    assert not (copies.run_dir / "weights").exists(), "what was handed over is removed with the run"
    seconds = [row["time/weights_s"] for row in metrics.read(copies.run_dir) if "time/weights_s" in row]
    assert len(seconds) == 3


def test_runs_of_one_name_share_a_weights_dir_but_no_weights(here: Path) -> None:
    shared, runs = here / "memory", [here / "lr_1" / "seed_0", here / "lr_2" / "seed_0"]
    plan = rlcore.plan(config(here, backend="null_replica", weights_dir=str(shared)), plugins=["null"])

    async def story() -> None:
        async with launch_sampler(plan, runs[0]) as first:
            await first.publish(1)
            async with launch_sampler(plan, runs[1]) as second:
                await second.publish(1)
                assert len(list(shared.glob("*/version_1"))) == 2
            assert len(list(shared.glob("rlcore-seed_0-*/version_1"))) == 1, "a run that ends removes only its files"

    for run in runs:
        run.mkdir(parents=True)
    asyncio.run(asyncio.wait_for(story(), 60.0))
    assert not list(shared.iterdir())


@pytest.mark.fault
def test_a_skipped_sync_is_seen_before_the_update(here: Path) -> None:
    unchecked = config(here, backend="null_replica", check_weights_every=0)
    with pytest.raises(WorkerError, match=r"sampled with version 1 of the weights, the step begins with version 2"):
        train({**unchecked, "plugins": {"null": {"forget_version": 2}}})
    assert versions(here / "runs" / "null_replica") == [{0}, {1}], "two steps were taken, the third was not"


@pytest.mark.fault
@pytest.mark.parametrize("lr", [0.1, 1e-4])
def test_replicas_that_keep_their_weights_end_the_run_before_it_learns_from_them(here: Path, lr: float) -> None:
    """Of a small change, too, which the difference of the engines' log-probs does not show."""
    settings = config(here, backend="null_replica", replicas=2)
    settings["reward"]["functions"]["letters"]["fn"] = "tests_letters.py:sums"
    settings["actor"]["lr"] = lr
    settings["plugins"]["null"]["keep_weights"] = True
    with pytest.raises(WorkerError, match=r"^rollout\[0\]: log-probs of a fixed sentence .* the actor") as caught:
        train(settings)
    assert (caught.value.role, caught.value.method) == ("rollout", "load_weights")
    assert "\n" not in str(caught.value)
    assert "rollout.check_weights_every=0" in str(caught.value)
    assert len(versions(here / "runs" / "null_replica")) == 1, "the second step is not taken"


@pytest.mark.fault
def test_what_a_dead_replica_owes_is_sampled_by_its_successor_with_the_same_weights(here: Path) -> None:
    embedded = train(config(here, backend="null"))
    faults = {"null": {"die_at_token": 3, "token_s": 0.01}}
    died = train({**config(here, backend="null_replica"), "plugins": faults})
    assert (died.run_dir / "a replica has died 1").exists()
    assert differing(embedded.run_dir, died.run_dir) == []
    assert versions(died.run_dir) == [{0}, {1}, {2}]


@pytest.mark.fault
@pytest.mark.parametrize("replicas", [1, 2])
def test_three_deaths_in_one_step_leave_the_weights_of_the_undisturbed_run(here: Path, replicas: int) -> None:
    embedded = train(config(here, backend="null"))
    faults = {"null": {"die_at_token": 3, "num_deaths": 3, "token_s": 0.01}}
    died = train({**config(here, backend="null_replica", replicas=replicas), "plugins": faults})
    log = (died.run_dir / "log.txt").read_text()
    first_step = log.split("step 1: updating", 1)[0]
    assert sum("rlcore.cluster.replica" in line and "lost (" in line for line in first_step.splitlines()) == 3, log
    assert differing(embedded.run_dir, died.run_dir) == []
    assert versions(died.run_dir) == [{0}, {1}, {2}]


@pytest.mark.fault
def test_a_replica_that_dies_too_often_ends_the_run_with_its_name(here: Path) -> None:
    faults = {**config(here, backend="null_replica"), "plugins": {"null": {"die_at_token": 3}}}
    faults["cluster"] = {"max_restarts": 0}
    with pytest.raises(WorkerError, match=r"rollout\[0\]\.generate\(\)"):
        train(faults)


@pytest.mark.slow
def test_weights_of_a_lora_model_are_handed_over_merged_or_alone_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    from rlcore.config import LoraConfig, ModelConfig
    from rlcore.engines.hf.train.model import ModelKind, load_model
    from rlcore.engines.hf.train.state import save_adapter, save_whole
    from rlcore.testing.tiny import write_tiny_model

    base = write_tiny_model(tmp_path / "tiny")
    torch.manual_seed(0)  # before peft draws A, too
    model = load_model(
        ModelKind.CAUSAL_LM,
        ModelConfig(path=str(base)),
        dtype="float32",
        device="cpu",
        lora=LoraConfig(enabled=True, rank=4),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids_BT = torch.arange(5, 13)[None]
    with torch.no_grad():
        adapted = model.transformer(ids_BT).logits
        with model.without_adapter():
            plain = model.transformer(ids_BT).logits
    save_whole(model, tmp_path / "whole")
    save_adapter(model, tmp_path / "adapter")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    whole.eval()
    with torch.no_grad():
        merged = whole(ids_BT).logits
    np.testing.assert_allclose(merged, adapted, atol=1e-4)
    original = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapter: Any = peft.PeftModel.from_pretrained(original, tmp_path / "adapter")
    with torch.no_grad():
        adapter = adapter(ids_BT).logits
    np.testing.assert_allclose(adapter, adapted, atol=1e-5)
    assert (adapted - plain).abs().max() > 0.01, "the adapter has to matter for this to mean something"
