"""The best checkpoint and the early end of a run, by recorded metrics."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.config.stopping import StopConfig
from rlcore.errors import ConfigError
from rlcore.report.metrics import MetricsLog, TrajectoryLog
from rlcore.testing.runs import run_settings
from rlcore.train import checkpoint, find_checkpoint
from rlcore.train.best import StopRule, best_step, check_named
from rlcore.types import Metrics

SCORES = (0.5, 0.2, 0.7, 0.7, 0.6, math.nan, 0.65)


def rule(**settings: Any) -> StopRule:
    return StopRule(StopConfig("reward/mean", **settings))


def test_the_rule_ends_after_patience_values_that_are_not_better() -> None:
    found = rule(patience=3)
    reasons = []
    for step, score in enumerate(SCORES, 1):
        found.add(step, {"reward/mean": score})
        reasons.append(bool(found.reason))
    assert reasons == [False] * 5 + [True] * 2  # 0.7 at step 3; an equal value and NaN are not better
    assert "best 0.7 at step 3" in found.reason


def test_lower_is_better_with_min_and_small_gains_do_not_count_with_min_delta() -> None:
    falling = rule(mode="min", patience=1, min_delta=0.1)
    for step, score in enumerate((0.5, 0.35, 0.3), 1):
        falling.add(step, {"reward/mean": score})
        assert bool(falling.reason) == (step == 3)


def test_steps_without_the_metric_do_not_count() -> None:
    found = rule(patience=1)
    for step in range(5):
        found.add(step, {"other": 0.0})
    assert found.reason == ""


@pytest.mark.parametrize("metric", ["", "eval/heldout/mean", "policy/kl", "reward/fair/mean", "reward/fair/part/mean"])
def test_a_metric_that_a_step_may_lack_is_waited_for(metric: str) -> None:
    StopRule(StopConfig(metric)).check_recorded({"reward/mean": 0.0}, ["fair"])


@pytest.mark.parametrize("metric", ["policy/kll", "reward/fairr/mean", "rewards/mean"])
def test_a_metric_that_no_step_has_is_refused(metric: str) -> None:
    with pytest.raises(ConfigError, match=r"steps do not have .* choose from: reward/mean$"):
        StopRule(StopConfig(metric)).check_recorded({"reward/mean": 0.0, "time/step_s": 1.0}, ["fair"])


def test_a_metric_that_an_earlier_process_recorded_is_waited_for() -> None:
    found = StopRule(StopConfig("own/metric"))
    found.add_all([{"step": 1, "own/metric": 0.0}])
    found.check_recorded({"reward/mean": 0.0}, [])
    StopRule(StopConfig("policy/kl")).check_recorded({}, [])


def test_the_best_step_is_the_first_of_the_best_and_never_the_start() -> None:
    evaluations: list[tuple[int, Metrics]] = [
        (0, {"m": 9.0}),
        (2, {"m": 1.0}),
        (4, {"m": 3.0}),
        (6, {"m": 3.0}),
        (8, {}),
    ]
    assert best_step(evaluations, "m", "max") == 4
    assert best_step(evaluations, "m", "min") == 2
    assert best_step(evaluations[:1], "m", "max") is None


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "falling.py").write_text(FALLING)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "held out"}\n')
    more: dict[str, Any] = {
        "reward.functions.falling.fn": f"{tmp_path / 'falling.py'}:falling",
        "reward.functions.falling.children": 1,
        "reward.functions.falling.kwargs.calls": str(tmp_path / "calls"),
        "eval.sources.heldout.path": str(heldout),
        "eval.every_steps": 1,
        "eval.at_start": False,
        "train.max_steps": 6,
        "train.name": "run",
        "checkpoint.every_steps": 2,
        "checkpoint.keep": 1,
    }
    return {key: value for key, value in run_settings(tmp_path, 20, **more).items() if "letters" not in key}


FALLING = """
from pathlib import Path

SCORES = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.4, 5: 0.3, 6: 0.2}

def falling(completions, prompts, calls, failing=(), **columns):
    if "held out" not in str(prompts[0]):
        return [0.0] * len(completions)
    with Path(calls).open("a") as file:
        file.write(".")
    call = Path(calls).stat().st_size
    if call in failing:
        raise ValueError("no score")
    return [SCORES[call]] * len(completions)
"""


def train(settings: dict[str, Any], *overrides: str, **more: Any) -> rlcore.TrainResult:
    return rlcore.train(settings, *overrides, plugins="null", **more)


def kept(result: rlcore.TrainResult) -> list[str]:
    return sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())


@pytest.mark.slow
def test_the_best_checkpoint_is_saved_kept_and_named(settings: dict[str, Any]) -> None:
    result = train(settings, "checkpoint.best=eval/heldout/mean")
    assert kept(result) == ["best", "latest", "step_2", "step_6"]
    assert result.best == result.run_dir / "checkpoints" / "step_2"
    assert (result.run_dir / "checkpoints" / "best").read_text() == "step_2\n"
    assert find_checkpoint(result.run_dir / "checkpoints" / "best") == result.best
    assert checkpoint.load(result.best).step == 2


@pytest.mark.slow
def test_a_best_step_at_which_no_checkpoint_is_due_is_saved(settings: dict[str, Any]) -> None:
    result = train(
        settings, "checkpoint.best=eval/heldout/mean", "checkpoint.every_steps=0", "checkpoint.best_mode=min"
    )
    assert result.best == result.run_dir / "checkpoints" / "step_1"
    assert kept(result) == ["best", "latest", "step_1", "step_6"]


@pytest.mark.slow
def test_without_the_setting_no_checkpoint_is_spared(settings: dict[str, Any]) -> None:
    result = train(settings)
    assert kept(result) == ["latest", "step_6"]
    assert result.best is None


@pytest.mark.slow
def test_a_run_ends_early_also_when_it_is_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    rules = ("train.stop.metric=eval/heldout/mean", "train.stop.patience=2")
    result = train(settings, *rules)
    assert (result.steps, kept(result)) == (4, ["latest", "step_4"])
    assert "did not get better 2 times in a row (best 0.9 at step 2)" in result.stopped
    assert train(settings, *rules, resume=True).steps == 4
    (tmp_path / "calls").write_text("")
    settings |= {"train.name": "other"}
    assert train(settings, "train.max_steps=3", *rules).steps == 3
    assert train(settings, *rules, resume=True).steps == 4


def evaluations(run_dir: Path) -> tuple[list[int], list[int]]:
    """The steps of the evaluations in the metrics, and of the samples that they recorded."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run_dir / "trajectories").iterdir())
    rows = [(file, json.loads(line)["lane"]) for file in files for line in file.read_text().splitlines()]
    return (
        [record["step"] for record in metrics if "eval/heldout/mean" in record],
        [int(file.stem.removeprefix("step_")) for file, lane in rows if lane == "eval"],
    )


ENDS_EARLY = (
    "train.stop.metric=reward/mean",
    "train.stop.patience=1",
    "eval.every_steps=0",
    "checkpoint.every_steps=1",
)


@pytest.mark.slow
def test_the_evaluation_after_an_early_end_is_in_the_checkpoint(settings: dict[str, Any]) -> None:
    result = train(settings, *ENDS_EARLY)
    assert result.steps == 2
    saved = checkpoint.load(result.run_dir / "checkpoints" / "step_2").state["evaluations"]
    assert [step for step, _ in saved] == [2]
    assert evaluations(train(settings, *ENDS_EARLY, resume=True).run_dir) == ([2], [2])


@pytest.mark.slow
def test_an_evaluation_that_its_checkpoint_does_not_have_is_recorded_once(settings: dict[str, Any]) -> None:
    """A run that was killed between an evaluation and the checkpoint with it evaluates again."""
    result = train(settings, *ENDS_EARLY, "eval.at_end=false")
    MetricsLog(result.run_dir).append(2, {"eval/heldout/mean": 0.5})
    path = result.run_dir / "trajectories" / "step_000002.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    TrajectoryLog(result.run_dir).append(2, json.dumps({**first, "lane": "eval"}).encode() + b"\n")
    assert evaluations(result.run_dir) == ([2], [2])
    again = train(settings, *ENDS_EARLY, resume=True)
    assert evaluations(again.run_dir) == ([2], [2])


@pytest.mark.slow
def test_an_evaluation_whose_rewards_failed_ends_no_run(settings: dict[str, Any]) -> None:
    failing = "reward.functions.falling.kwargs.failing=[1,5,6]"
    result = train(settings, failing, "checkpoint.best=eval/heldout/mean", "train.stop.metric=eval/heldout/mean")
    assert evaluations(result.run_dir)[0] == [2, 3, 4]
    assert (result.steps, kept(result)) == (6, ["best", "latest", "step_2", "step_6"])


FAILED: Metrics = {"eval/heldout/num": 4.0, "eval/heldout/failed": 3.0, "eval/heldout/length_mean": 8.0}


@pytest.mark.parametrize("name", ["mean", "pass@1", "pass@2", "pass@3", "maj@3"])
def test_a_metric_that_an_evaluation_could_have_had_is_waited_for(name: str) -> None:
    check_named("checkpoint.best", f"eval/heldout/{name}", [FAILED], 3)


@pytest.mark.parametrize(
    ("metric", "evaluations"),
    [
        ("eval/heldout/pass@4", [FAILED]),
        ("eval/other/mean", [FAILED]),
        ("eval/heldout/mean", [FAILED | {"eval/heldout/failed": 0.0}]),
        ("eval/heldout/maj@3", [FAILED | {"eval/heldout/mean": 1.0}]),
    ],
)
def test_a_metric_that_evaluations_do_not_have_is_refused(metric: str, evaluations: list[Metrics]) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.best: evaluations do not have '{metric}'"):
        check_named("checkpoint.best", metric, evaluations, 3)
    check_named("checkpoint.best", metric, [{metric: 0.5}, *evaluations], 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("checkpoint.best=reward/mean",), "needs a metric of evaluations"),
        (("checkpoint.best=eval/held/mean",), "eval.sources has no 'held'; did you mean 'heldout'"),
        (("train.stop.metric=eval/heldout/mean", "eval.every_steps=0"), "needs eval.every_steps"),
        (("train.stop.patience=2",), "has no effect"),
        (("train.stop.metric=rewrd/mean",), "steps do not have 'rewrd/mean'; did you mean 'reward/mean'"),
        (("checkpoint.best=eval/heldout/meen",), "evaluations do not have 'eval/heldout/meen'; did you mean"),
    ],
)
def test_a_metric_that_cannot_be_watched_is_refused(settings: dict[str, Any], overrides: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        train(settings, *overrides)
    assert words in str(refused.value)
