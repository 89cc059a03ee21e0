"""A run with a reference or adapters does not continue with other weights at `model.path`."""

from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.errors import CheckpointError
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model

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
