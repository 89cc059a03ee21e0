"""A run with a reference or adapters does not continue with other weights at `model.path`, and its adapters are not
used with them."""

from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import rlcore
from rlcore.errors import CheckpointError
from rlcore.testing import write_prompts
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model

tqdm.monitor_interval = 0  # peft merges under a progress bar, whose watching thread would outlive the test
pytestmark = pytest.mark.slow

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "reference": ({"algo.kl.placement": "loss", "algo.kl.coef": 0.1}, "the reference would be another model"),
    "adapter": ({"actor.lora.enabled": True}, "the adapter's base would be another model"),
    "neither": ({}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_other_weights_are_refused_where_the_run_uses_them(tmp_path: Path, case: str) -> None:
    more, refusal = CASES[case]
    begun = write_tiny_model(tmp_path / "begun")
    settings = run_settings(
        tmp_path,
        8,
        **{
            "model.path": str(begun),
            "actor.backend": "hf",
            "rollout.backend": "hf",
            "reward.functions.letters.fn": "exact_match",
            "train.name": "run",
            "train.max_steps": 1,
            **more,
        },
    )
    rlcore.train(settings)
    settings["train.max_steps"] = 2
    other = {**settings, "model.path": str(write_tiny_model(tmp_path / "other", seed=1))}
    if refusal:
        with pytest.raises(CheckpointError, match=rf"step_1': model\.path=.*/other has other weights .* {refusal}"):
            rlcore.train(other, resume=True)
    else:
        assert rlcore.train(other, resume=True).steps == 2
        return
    moved = begun.rename(tmp_path / "moved")
    assert rlcore.train({**settings, "model.path": str(moved)}, resume=True).steps == 2


def test_an_adapter_is_not_evaluated_or_exported_with_another_base(tmp_path: Path) -> None:
    base, heldout = write_tiny_model(tmp_path / "base"), write_prompts(tmp_path / "heldout.jsonl", 2)
    settings = run_settings(
        tmp_path,
        8,
        **{
            "model.path": str(base),
            "actor.backend": "hf",
            "actor.lora.enabled": True,
            "rollout.backend": "hf",
            "reward.functions.letters.fn": "exact_match",
            "eval.sources.heldout.path": str(heldout),
            "eval.at_start": False,
            "train.name": "run",
            "train.max_steps": 1,
        },
    )
    run_dir = rlcore.train(settings).run_dir
    rlcore.evaluate(checkpoint=run_dir)
    rlcore.export(run_dir, tmp_path / "merged")
    base.rename(tmp_path / "former")
    write_tiny_model(base, seed=1)
    refusal = r"step_1': '.*/base' has other weights .* the adapter's base would be another model; put the former one"
    with pytest.raises(CheckpointError, match=refusal):
        rlcore.evaluate(checkpoint=run_dir)
    for form in ("hf", "merged"):
        with pytest.raises(CheckpointError, match=refusal):
            rlcore.export(run_dir, tmp_path / "other", form)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()
    rlcore.export(run_dir, tmp_path / "adapter", "adapter")
