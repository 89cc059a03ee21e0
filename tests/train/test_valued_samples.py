"""A failed sample that is trained with `failure_value` is recorded with that score, and with its error."""

from pathlib import Path

import pytest
from rlcore_view import read

import rlcore
from rlcore.report import metrics
from rlcore.testing.runs import run_settings

REWARD = """
async def score(trajectory):
    if trajectory.id.sample == 0:
        raise ValueError("no number in it")
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_recorded_score_is_the_one_that_was_trained_on(
    tmp_path: Path, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    more = {
        "schedule.stream_minibatches": stream,
        "reward.error_budget_frac": 1.0,
        "reward.functions.letters.weight": 2.0,
        "reward.functions.letters.on_failure": "value",
        "reward.functions.letters.failure_value": -0.5,
        "algo.advantage": "dr_grpo",
        "train.log_completions_every": 1,
    }
    settings = run_settings(tmp_path, 16, **more)
    settings["reward.functions.letters.fn"] = f"{tmp_path / 'rewards.py'}:score"
    run_dir = rlcore.train(settings, plugins=["null"]).run_dir

    failed, scored = metrics.read_trajectories(run_dir, 1)[:2]
    assert (failed["status"], failed["score"], failed["components"]) == ("failed", -1.0, {"letters": -0.5})
    assert "ValueError: no number in it" in failed["info"]["error"]
    assert failed["advantage"] == pytest.approx(failed["score"] - (failed["score"] + scored["score"]) / 2)
    record = metrics.read(run_dir)[0]
    assert (record["reward/failed"], record["reward/mean"], record["reward/letters/mean"]) == (2.0, 2.0, 1.0)
    sample = read(run_dir).samples[0]
    assert (sample.score, sample.info["trained with score"]) == (None, -1.0)
    assert "-0.5" in capsys.readouterr().out
