"""Runs that learn from a teacher: the divergence falls without any reward, and on a resume the teacher is the same."""

from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.errors import CheckpointError
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model

pytestmark = pytest.mark.slow


def settings_of(directory: Path, **more: Any) -> dict[str, Any]:
    """A tiny student of a teacher to which all tokens are equally probable, and no reward."""
    settings = run_settings(
        directory,
        32,
        **{
            "model.path": str(write_tiny_model(directory / "student", seed=1, initializer_range=0.05)),
            "reference.path": str(write_tiny_model(directory / "teacher", seed=0, initializer_range=1e-6)),
            "algo.preset": "distillation",
            "actor.backend": "hf",
            "actor.lr": 0.02,
            "rollout.backend": "hf",
            "rollout.samples_per_prompt": 1,
            "train.name": "run",
            **more,
        },
    )
    return {key: value for key, value in settings.items() if not key.startswith("reward.functions.letters")}


def test_a_student_approaches_its_teacher_without_rewards(tmp_path: Path) -> None:
    done = rlcore.train(settings_of(tmp_path, **{"train.max_steps": 10, "train.prompts_per_step": 32}))
    divergences = [step["policy/kl"] for step in done.history]
    first, last = (sum(part) / len(part) for part in (divergences[:3], divergences[-3:]))
    assert last < first / 2
    assert {step["reward/mean"] for step in done.history} == {0.0}


def test_a_run_does_not_continue_with_another_teacher(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **{"train.max_steps": 1})
    rlcore.train(settings)
    settings["train.max_steps"] = 2
    other = {**settings, "reference.path": str(write_tiny_model(tmp_path / "other", seed=2))}
    refusal = r"step_1': reference\.path=.*/other has other weights .* the reference would be another model"
    with pytest.raises(CheckpointError, match=refusal):
        rlcore.train(other, resume=True)
    student = {**settings, "model.path": str(write_tiny_model(tmp_path / "another_student", seed=3))}
    assert rlcore.train(student, resume=True).steps == 2, "the checkpoint has all weights of the student"
    moved = (tmp_path / "teacher").rename(tmp_path / "moved")
    settings |= {"train.max_steps": 3, "reference.path": str(moved)}
    assert rlcore.train(settings, resume=True).steps == 3
