"""Metrics are declared: the page of the docs is made of the declarations, and no run logs another name."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.report import metrics
from rlcore.report.metric_names import CORE, Metric, declared, page, undeclared
from rlcore.testing import write_prompts
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

ROOT = Path(__file__).parent.parent.parent
FILES = [CORE, *sorted((ROOT / "plugins").glob("*/*/metrics.toml"))]
HF = {"actor.backend": "hf", "rollout.backend": "hf", "cluster.threads": 1}
PPO = {"algo.preset": "ppo", "plugins.critic_engine.lr": 0.001}
RUNS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "null": ({"algo.kl.placement": "reward", "reference.backend": "null"}, ("null",)),
    "resampled": ({"algo.dynamic_sampling": True}, ("null",)),
    "greedy": ({"algo.preset": "remax"}, ("null",)),
    "dropping": ({"schedule.max_staleness": 1, "schedule.on_stale": "drop"}, ("null",)),
    "streamed": ({"schedule.stream_minibatches": True, "actor.minibatch_prompts": 1}, ("null",)),
    "replicas": ({"rollout.backend": "null_replica", "schedule.max_staleness": 2}, ("null",)),
    "hf": ({**HF, "algo.kl.placement": "loss", "schedule.max_staleness": 1, "actor.epochs": 2}, ()),
    "half": ({**HF, "actor.dtype": "float16", "cluster.peak_tflops": 1.0}, ()),
    "cov": ({**HF, "algo.policy_loss": "clip_cov", "algo.dual_clip": 3.0, "actor.epochs": 2}, ()),
    "sapo": ({**HF, "algo.policy_loss": "sapo", "actor.epochs": 2}, ()),
    "ppo": ({**HF, **PPO, "plugins.critic_engine.trunk": "actor"}, ("critic_engine",)),
    "null ppo": ({**PPO, "plugins.critic_engine.backend": "null"}, ("null", "critic_engine")),
}


def test_the_page_of_the_docs_is_made_of_the_declarations() -> None:
    command = "python -m rlcore.report.metric_names docs/metrics.md plugins/*/*/metrics.toml"
    assert (ROOT / "docs" / "metrics.md").read_text() == page(declared(FILES)), f"make it again: {command}"


def test_a_metric_is_declared_once_with_its_meaning() -> None:
    found = declared(FILES)
    assert len(found) == len({metric.name for metric in found}) > 80
    assert [metric.name for metric in found if not metric.meaning] == []
    assert [metric.name for metric in found if metric.otherwise and not metric.normal] == []


def test_a_declaration_with_a_field_too_few_and_a_name_without_a_heading_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.toml").write_text('["reward/x"]\nmeaning = "x"\n')
    with pytest.raises(ValueError, match="needs meaning, unit, normal and otherwise"):
        declared([tmp_path / "metrics.toml"])
    with pytest.raises(ValueError, match="no heading for odd"):
        page([Metric("odd/x", "x", "", "", "")])


def test_a_placeholder_stands_for_one_part_of_a_name() -> None:
    metric = Metric("reward/<function>/mean", "x", "", "", "")
    assert metric.matches("reward/my.reward/mean")
    assert not metric.matches("reward/a/b/mean")
    assert not metric.matches("reward/a/means")
    assert undeclared(["reward/a/mean", "b"], [metric]) == ["b"]


def logged(run_dir: Path) -> set[str]:
    return {name for row in metrics.read(run_dir) for name in row} - {"step"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_logs_declared_metrics_only(name: str, tmp_path: Path) -> None:
    more, plugins = RUNS[name]
    letters = {"reward.functions.letters.fn": "rlcore.testing.letters:count_letter"}
    settings = run_settings(tmp_path, 12, **{"checkpoint.at_end": False, **letters, **more})
    heldout = write_prompts(tmp_path / "heldout.jsonl", 2, "held out {index}")
    settings |= {"eval.sources.heldout.path": str(heldout), "eval.at_end": True}
    if settings["actor.backend"] == "hf":
        settings["model.path"] = str(write_tiny_model(tmp_path / "tiny"))
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    names = logged(train({}, *overrides, plugins=list(plugins)).run_dir)
    assert undeclared(names, declared(FILES)) == []
    assert {"reward/mean", "eval/heldout/mean", "time/tokens_per_s"} <= names
