"""A run with a reference or adapters does not continue with other weights at `model.path`, and its adapters are not
used with them."""

from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import rlcore
from rlcore.errors import CheckpointError
from rlcore.plugins.planning import plan_run
from rlcore.testing import write_prompts
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model
from rlcore.train.origin import Start
from rlcore.train.start_check import check_start

tqdm.monitor_interval = 0  # peft merges under a progress bar, whose watching thread would outlive the test
pytestmark = pytest.mark.slow

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "reference": ({"algo.kl.placement": "loss", "algo.kl.coef": 0.1}, "the reference would be another model"),
    "adapter": ({"actor.lora.enabled": True}, "the adapter's base would be another model"),
    "neither": ({}, ""),
}


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 3}, r"its model has layers=2, and model\.path=.*/other has 3; set model\.path"),
    "hidden size": ({"hidden_size": 64}, "its model has hidden_size=32, and .* has 64; set"),
    "vocabulary": ({"vocab_size": 300}, "its model has vocabulary=264, and .* has 300; set"),
    "adapter": ({}, "it holds a whole model, and this run trains a LoRA adapter; needs actor.lora.enabled=false"),
}


def try_to_resume(settings: dict[str, Any]) -> None:
    """Check the start as a dry run does."""
    plan = plan_run([], [f"{key}={value}" for key, value in settings.items()])
    check_start(plan, Start(resume=True))


@pytest.mark.parametrize("case", CHANGES)
def test_a_dry_run_refuses_a_model_that_the_checkpoint_does_not_fit(tmp_path: Path, case: str) -> None:
    shape, refusal = CHANGES[case]
    more = {"actor.backend": "hf", "rollout.backend": "hf", "train.name": "run", "train.max_steps": 1}
    more |= {"model.path": write_tiny_model(tmp_path / "begun"), "reward.functions.letters.fn": "exact_match"}
    settings = run_settings(tmp_path, 8, **more)
    rlcore.train(settings)
    try_to_resume(settings)
    settings["model.path"] = write_tiny_model(tmp_path / "other", **shape)
    with pytest.raises(CheckpointError, match=refusal):
        try_to_resume({**settings, "actor.lora.enabled": case == "adapter"})


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
        for begin in (try_to_resume, lambda settings: rlcore.train(settings, resume=True)):
            with pytest.raises(CheckpointError, match=rf"step_1': model\.path=.*/other has other weights .* {refusal}"):
                begin(other)
    else:
        try_to_resume(other)
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
