"""Whole runs from Python: functions, rows and callbacks, and the files they leave for a resume."""

import json
import logging
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import rlcore
from rlcore.errors import ConfigError
from rlcore.testing.runs import differing, run_settings
from rlcore.testing.tiny import write_tiny_model

ROWS = [{"prompt": f"say a, {index}", "answer": "a"} for index in range(12)]
HELDOUT = [{"prompt": f"held out {index}", "answer": "a"} for index in range(2)]
NULL: dict[str, Any] = {
    "model": "none",
    "model.tokenizer": "bytes",
    "actor.backend": "null",
    "actor.lr": 0.5,
    "rollout.backend": "null",
    "rollout.samples_per_prompt": 4,
    "rollout.max_tokens": 8,
    "train.max_steps": 3,
    "train.prompts_per_step": 4,
    "plugins": "null",
}


def few_as(completions: list[str], **columns: Any) -> list[float]:
    return [float(completion.count("a")) for completion in completions]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    rewards = {"few_as": {"fn": few_as, "children": 1}}
    return {**NULL, "train.dir": str(tmp_path / "runs"), "data": ROWS, "rewards": rewards}


@pytest.mark.real
def test_rows_and_functions_train_as_their_files_do(settings: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(
        "def few_as(completions, **c):\n    return [float(x.count('a')) for x in completions]\n"
    )
    named = {"few_as": {"fn": f"{tmp_path / 'mine.py'}:few_as", "children": 1}}
    runs = [
        rlcore.train(**settings, **{"train.name": "rows"}),
        rlcore.train(**{**settings, "data": datasets.Dataset.from_list(ROWS)}, **{"train.name": "dataset"}),
        rlcore.train(**{**settings, "data": str(file), "rewards": named}, **{"train.name": "files"}),
    ]
    assert differing(runs[0].run_dir, runs[1].run_dir) == []
    assert differing(runs[0].run_dir, runs[2].run_dir) == []


@pytest.mark.slow
def test_a_run_of_rows_and_a_local_function_resumes_without_them_also_elsewhere(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    weight = 2.0

    def scored(completions: list[str], **columns: Any) -> list[float]:
        return [weight * completion.count("a") for completion in completions]

    settings |= {"rewards": {"scored": {"fn": scored, "children": 1}}, "eval.at_end": False}
    whole = rlcore.train(**settings, eval=HELDOUT, **{"train.name": "whole"})
    half = rlcore.train(**{**settings, "train.max_steps": 2}, eval=HELDOUT, **{"train.name": "half"})
    elsewhere = tmp_path / "elsewhere"
    half.run_dir.rename(elsewhere)
    result = rlcore.resume(elsewhere, "train.max_steps=3")
    assert (result.run_dir, result.steps) == (elsewhere, 3)
    assert differing(whole.run_dir, elsewhere) == []


@pytest.mark.real
def test_a_resume_with_other_rows_is_refused(settings: dict[str, Any]) -> None:
    rlcore.train(**settings, **{"train.name": "run"})
    settings |= {"data": ROWS[:8], "train.max_steps": 4}
    with pytest.raises(ConfigError, match=r"data_train.jsonl' differs from what was passed; continue .*rlcore.resume"):
        rlcore.train(**settings, **{"train.name": "run"}, resume=True)


@pytest.mark.slow
@pytest.mark.usefixtures("rewards_in_process")
def test_a_start_that_fails_leaves_no_run_and_a_name_that_is_taken_stays_as_it_is(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="boxedd"):
        rlcore.train(**{**settings, "rewards": "boxedd"}, **{"train.name": "run"})
    with pytest.raises(ConfigError, match="held-out questions occur in training"):
        rlcore.train(**{**settings, "eval": ROWS[:2]}, **{"train.name": "run"})
    assert not (Path(settings["train.dir"]) / "run").exists()
    result = rlcore.train(**settings, **{"train.name": "run"})
    before = (result.run_dir / "inputs" / "data_train.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"train.name: the run directory"):
        rlcore.train(**{**settings, "data": ROWS[:5]}, **{"train.name": "run"})
    assert (result.run_dir / "inputs" / "data_train.jsonl").read_bytes() == before


def test_files_mappings_keywords_and_texts_are_laid_over_one_another(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("actor: {lr: 0.1}\ntrain: {seed: 1, max_steps: 9}\nrollout: {max_tokens: 5}\n")
    del settings["rollout.max_tokens"]
    plan = rlcore.plan(tmp_path / "x.yaml", {"actor": {"lr": 0.2}, "train.seed": 2}, "train.seed=3", **settings)
    assert (plan.config.actor.lr, plan.config.train.seed) == (0.5, 3)
    assert (plan.config.train.max_steps, plan.config.rollout.max_tokens) == (3, 5)
    assert not Path(settings["train.dir"]).exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rewards": lambda completions, **columns: [0.0]}, "rewards: found a lambda"),
        ({"rewards": [few_as, few_as]}, "rewards: two are named few_as; give them names"),
        ({"rewards": []}, "rewards: it is empty"),
        ({"rewards": {"f": print}}, "reward 'f': found a builtin_function_or_method"),
        ({"data": []}, "data: it has no rows"),
        ({"data": {"train": datasets.DatasetDict({"a": datasets.Dataset.from_list(ROWS)})}}, "such as ds['train']"),
        ({"data": 3}, "data: found an int"),
        ({"eval": {"every_steps": 2}}, "eval['every_steps']: found an int"),
        ({"model": object()}, "model: found an object; needs a model directory"),
        ({"train_dataset": [], "data": None}, "train_dataset: found a list; pass it as data="),
        ({"reward": few_as}, "reward: found a function; pass it as rewards="),
        ({"reward": {"functoins": {}}}, "did you mean 'reward.functions'"),
        ({"plugins": "nul"}, "plugin 'nul' is not installed"),
        ({"plugins": [3]}, "plugins: found an int"),
        ({"lr": 1e-5}, "actor.lr"),
        ({"on_step": 3}, "on_step: found 3; needs a function of (step, metrics)"),
        ({"reward.functions.other.fn": "boxed"}, "rewards: the configuration has reward.functions.other, too"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(settings: dict[str, Any], changed: Any, words: str) -> None:
    with pytest.raises(rlcore.RlcoreError) as refused:
        rlcore.train(**{**settings, **changed})
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not Path(settings["train.dir"]).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("rewards_in_process")
def test_a_plan_checks_the_data(settings: dict[str, Any]) -> None:
    rows = [{"asks": "2+2=", "answer": "4"}]
    with pytest.raises(ConfigError, match=r"^data\.sources\.train: .*set prompt_column to one of: answer, asks"):
        rlcore.plan(**{**settings, "data": rows})


def test_the_result_has_history_table_trajectories_evaluations_and_model(settings: dict[str, Any]) -> None:
    result = rlcore.train(**settings, eval=HELDOUT)
    assert [record["step"] for record in result.history] == [1, 2, 3]
    assert list(result.metrics["step"]) == [1, 2, 3]
    assert list(result.metrics["reward/mean"]) == [record["reward/mean"] for record in result.history]
    assert len(list(result.trajectories(1))) == 16
    assert len([row for row in result.trajectories() if row["lane"] == "eval"]) == 4
    assert [step for step, _ in result.evaluations] == [0, 3]
    assert result.model.parent == result.checkpoint


@pytest.mark.real
def test_the_table_is_columns_without_pandas(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = rlcore.train(**settings)
    monkeypatch.setattr(sys.modules["rlcore.train.result"], "find_spec", lambda name: None)
    assert result.metrics["step"] == [1, 2, 3]


@pytest.mark.real
def test_callbacks_see_each_step_and_cannot_disturb_the_run(tmp_path: Path) -> None:
    import torch

    seen: list[tuple[int, bool]] = []

    def disturb(step: int, metrics: rlcore.Metrics) -> None:
        seen.append((step, "reward/mean" in metrics and "actor/grad_norm" in metrics))
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        metrics["reward/mean"] = 1e9

    model = write_tiny_model(tmp_path / "model")
    more = {
        "model.tokenizer": "bytes",
        "cluster.device": "cpu",
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 8,
        "train.max_steps": 3,
        "train.prompts_per_step": 2,
        "train.dir": str(tmp_path / "runs"),
        "reward.functions.few_as.children": 1,
    }
    common: dict[str, Any] = {"model": model, "rewards": few_as, "data": ROWS, **more}
    with_it = rlcore.train(**common, on_step=disturb, stop_when=lambda step, metrics: False, **{"train.name": "with"})
    without = rlcore.train(**common, **{"train.name": "without"})
    assert differing(with_it.run_dir, without.run_dir) == []
    assert seen == [(1, True)]  # writing to the copy is an error of the callback, which is not called again
    assert "FrozenDict" in (with_it.run_dir / "log.txt").read_text()


def test_a_callback_that_raises_is_a_warning_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest would show the warning instead

    def plot(step: int, metrics: rlcore.Metrics) -> None:
        raise SystemExit("no display")

    settings = run_settings(tmp_path, 8, **{"train.name": "run", "train.max_steps": 3})
    assert rlcore.train(settings, plugins="null", on_step=plot).steps == 3
    words = r"on_step: it called sys\.exit\(.*test_python_runs\.py:\d+\); it is not called again"
    for text in (capsys.readouterr().out, (tmp_path / "runs" / "run" / "log.txt").read_text()):
        assert len(re.findall(words, text.replace("\n", ""))) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("rewards_in_process")
def test_stop_when_ends_the_run_with_evaluation_and_checkpoint(settings: dict[str, Any]) -> None:
    seen: list[dict[str, float]] = []

    def stop(step: int, metrics: rlcore.Metrics) -> bool:
        seen.append(dict(metrics))
        return step == 2

    result = rlcore.train(**settings, eval=HELDOUT, stop_when=stop, **{"eval.every_steps": 1})
    assert (result.steps, result.stopped) == (2, "stop_when was true")
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step_2"
    assert [step for step, _ in result.evaluations] == [0, 1, 2]
    assert all("eval/heldout/mean" in metrics for metrics in seen)


@pytest.mark.real
def test_a_stop_rule_that_raises_ends_the_run_after_a_checkpoint(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"stop_when: KeyError: 'no' \(.*step 1: .*step_1, continue with --resume"):
        rlcore.train(**settings, stop_when=lambda step, metrics: metrics["no"], **{"train.name": "run"})
    assert rlcore.resume(Path(settings["train.dir"]) / "run").steps == 3


@pytest.mark.real
def test_evaluations_keep_their_samples_and_need_the_run_only(settings: dict[str, Any], tmp_path: Path) -> None:
    result = rlcore.train(**settings, eval=HELDOUT)
    found = rlcore.evaluate(checkpoint=result.run_dir)
    assert found.metrics == result.evaluations[-1][1]
    assert found.path.parent == result.run_dir / "evaluations"
    samples = list(found.samples())
    assert [sample["completion"] for sample in samples] == [
        row["completion"] for row in result.trajectories(3) if row["lane"] == "eval"
    ]
    alone = {name: value for name, value in settings.items() if name != "data"}
    assert rlcore.evaluate(**alone, eval=HELDOUT, samples=tmp_path / "s.jsonl").metrics == result.evaluations[0][1]
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == 2


def test_a_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run: found no config.yaml in it"):
        rlcore.resume(tmp_path)
    with pytest.raises(ConfigError, match=r"is not a run: found no such directory"):
        rlcore.evaluate(checkpoint=tmp_path / "nothing")


SCRIPT = """
import asyncio

import rlcore

WORTH = 0.5

def worth(completions, **columns):
    return [WORTH * completion.count("a") for completion in completions]

print("once")
settings = {settings!r}
settings["rewards"] = {{"worth": {{"fn": worth, "children": 1}}}}
{call}
print(result.steps, len(result.history))
"""


IN_A_LOOP = "async def main():\n    return rlcore.train(**settings)\nresult = asyncio.run(main())"


@pytest.mark.real
@pytest.mark.parametrize("call", ["result = rlcore.train(**settings)", IN_A_LOOP])
def test_a_script_without_a_main_guard_trains_on_its_own_function(
    settings: dict[str, Any], tmp_path: Path, call: str
) -> None:
    del settings["rewards"]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(settings=settings, call=call))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once\n") == 1
    assert "is passed as source, in inputs/reward_worth.py: it is defined in __main__" in done.stdout
    assert done.stdout.endswith("3 3\n")
