"""Notes of a plan on settings with which little is learned."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import RunConfig
from rlcore.contracts.model_files import usual_answers
from rlcore.plan import Facts, RunPlan
from rlcore.plan.learning_notes import learning_notes
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS

HALF = ("actor.dtype=bfloat16", "actor.rounding=nearest")


def write_template(directory: Path, template: str, file: str) -> Path:
    directory.mkdir()
    content = template if file.endswith(".jinja") else json.dumps({"chat_template": template})
    (directory / file).write_text(content)
    return directory


def notes(*overrides: str) -> list[str]:
    plan: RunPlan = plan_run([], [*SETTINGS, *overrides], ["null"])
    return [note for note in plan.notes if "max_tokens" in note or "rounded away" in note]


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("template", "answers", "fitting"),
    [
        ("{{ messages }}", "instruct", 512),
        ("{% if enable_thinking %}", "thinking", 4096),
        ("<think>", "thinking", 4096),
    ],
)
def test_a_budget_that_the_answers_of_a_model_do_not_fit_is_noted(
    tmp_path: Path, file: str, template: str, answers: str, fitting: int
) -> None:
    model = write_template(tmp_path / "model", template, file)
    assert usual_answers(model) == answers
    [note] = notes(f"model.path={model}", f"rollout.max_tokens={fitting - 1}")
    assert note.startswith(f"rollout.max_tokens={fitting - 1}: by its chat template model.path is a")
    assert f"up to {fitting} tokens" in note
    assert notes(f"model.path={model}", f"rollout.max_tokens={fitting}") == []


def test_a_model_without_a_template_or_with_a_damaged_one_has_no_note(tmp_path: Path) -> None:
    assert notes("rollout.max_tokens=1") == []
    assert usual_answers(tmp_path) == ""
    assert usual_answers(write_template(tmp_path / "base", "", "tokenizer_config.json")) == ""
    damaged = tmp_path / "base" / "tokenizer_config.json"
    values: list[Any] = ["{", "[]", b"\xff"]
    for value in values:
        damaged.write_bytes(value if isinstance(value, bytes) else value.encode())
        assert usual_answers(tmp_path / "base") == ""


def test_the_default_budget_fits_an_instruct_model(tmp_path: Path) -> None:
    model = write_template(tmp_path / "model", "{{ messages }}", "chat_template.jinja")
    assert notes(f"model.path={model}") == []


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [
        ((*HALF, "actor.lr=1e-6"), True),
        ((*HALF, "actor.lr=1e-4"), False),
        (("actor.dtype=float16", "actor.rounding=nearest", "actor.lr=1e-6"), True),
        (("actor.dtype=float16", "actor.rounding=nearest", "actor.lr=1e-5"), False),
        (("actor.dtype=bfloat16", "actor.lr=1e-6"), False),
        (("actor.lr=1e-6",), False),
    ],
)
def test_a_learning_rate_below_what_half_precision_resolves_is_noted(overrides: tuple[str, ...], noted: bool) -> None:
    found = notes(*overrides)
    assert bool(found) == noted
    assert all("choose actor.rounding=stochastic" in note for note in found)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (("actor.dtype=bfloat16",), "actor.dtype=bfloat16"),
        (("actor.dtype=float16",), "actor.dtype=float16"),
        (("actor.dtype=float32",), ""),
        (("actor.dtype=float64",), ""),
    ],
)
def test_recorded_logprobs_as_pi_old_are_noted_in_formats_in_which_they_are_not_the_trainers(
    overrides: tuple[str, ...], setting: str
) -> None:
    def found(*more: str) -> list[str]:
        plan: RunPlan = plan_run([], [*SETTINGS, *overrides, *more], ["null"])
        return [note for note in plan.notes if "ratios are not 1" in note]

    assert found() == [], "the default is a pass"
    behaviour = "schedule.old_logprobs=behaviour"
    notes = found(behaviour)
    assert len(notes) == bool(setting)
    assert all(note.startswith(f"{behaviour} with {setting}: ") and "gspo" not in note for note in notes)
    assert all(note.endswith("; choose schedule.old_logprobs=recompute") for note in notes)
    gspo = found(behaviour, "algo.preset=gspo")
    assert len(gspo) == bool(setting)
    assert all("algo.policy_loss=gspo clips at 1 - 0.0003 and 1 + 0.0004, and rounding" in note for note in gspo)


def test_recorded_logprobs_as_pi_old_are_noted_with_tf32_which_only_gpus_have() -> None:
    config = RunConfig()
    config = replace(
        config,
        actor=replace(config.actor, tf32=True),
        schedule=replace(config.schedule, old_logprobs="behaviour"),
    )
    [note] = learning_notes(config, Facts())
    assert note.startswith("schedule.old_logprobs=behaviour with actor.tf32=true: ")


@pytest.mark.parametrize(
    ("beta1", "beta2", "noted"),
    [(0.9, 0.8, True), (0.5, 0.0, True), (0.9, 0.95, False), (0.0, 0.0, False), (0.777, 0.603729, False)],
)
def test_betas_with_which_updates_grow_while_gradients_are_0_are_noted(beta1: float, beta2: float, noted: bool) -> None:
    plan: RunPlan = plan_run([], [*SETTINGS, f"actor.beta1={beta1}", f"actor.beta2={beta2}"], ["null"])
    words = f"choose actor.beta2 of at least beta1 squared, {beta1**2:g}"
    assert any(note.startswith(f"actor.beta2={beta2:g} ") and words in note for note in plan.notes) is noted
