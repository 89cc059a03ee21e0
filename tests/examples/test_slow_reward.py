"""The verdicts of examples/slow_reward/compare.py, on runs that are made up."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "slow_reward" / "compare.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def steps(*times: tuple[float, float]) -> list[dict[str, float]]:
    rows = [{"time/step_s": step, "time/ideal_s": ideal, "time/reward_hidden_frac": 0.5} for step, ideal in times]
    return [{"eval/heldout/mean": 0.5}, *rows]


def made_up(timed: Callable[..., Any], ratio: float, height: float) -> dict[str, Any]:
    times = timed(steps((100.0, 1.0), (10.0 * ratio, 10.0), (20.0 * ratio, 20.0)))
    return {"curve": {0: 0.5, 4: height}, "step_s": 1.0, "explained_variance": [], "times": times}


@pytest.mark.parametrize(
    ("ratio", "height", "passed"), [(1.04, 0.7, True), (1.06, 0.7, False), (1.04, 0.9, False), (1.04, 0.5, False)]
)
def test_a_schedule_passes_when_it_is_fast_and_learns_as_the_synchronous_one(
    script: dict[str, Any], ratio: float, height: float, passed: bool
) -> None:
    timed = script["timed"]
    runs = {name: [made_up(timed, 1.0, 0.7)] * 3 for name in script["MODES"]}
    runs["one_step_off"] = [made_up(timed, ratio, height)] * 3
    judgement = script["judged"](runs)
    assert judgement["times"]["one_step_off"]["ratio"] == pytest.approx(ratio)
    assert judgement["staleness"]["difference"] == pytest.approx((height - 0.7) / 2)
    assert judgement["passed"] is passed
    text = "\n".join(script["report"](runs, judgement, {"commit": "c", "machine": "m"}, ["a.b=1"]))
    assert "of the pipelines with a.b=1." in text
    assert f"| one step off-policy | {15 * ratio:.2f} | 15.00 | {ratio:.3f} | 0.50 |" in text
