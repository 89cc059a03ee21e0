"""Scores once a group or a step is complete: post-processing and running statistics."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.errors import PluginError
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import ServiceAnswer, ServiceCall, serving
from rlcore.train import train
from rlcore.types import Lane, RewardStatus

Score = Callable[..., Any]

OWN = """
def ranks(completions, score, **columns):
    order = sorted(range(len(score)), key=lambda index: score[index])
    return [float(order.index(index)) for index in range(len(score))]

def breaks(trajectories):
    raise ValueError("no such luck")

def short(trajectories):
    return [trajectory.prompt.columns["score"] for trajectory in trajectories][:-1]
"""


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., RewardLoopSettings]:
    """One reward by one service, post-processed by a function of OWN."""
    (tmp_path / "own.py").write_text(OWN)

    def make(url: str, function: str) -> RewardLoopSettings:
        reward = RewardSettings(served_by="scorer", post_process=f"{tmp_path / 'own.py'}:{function}")
        return RewardLoopSettings(rewards={"liked": reward}, services={"scorer": ServiceSettings(urls=(url,))})

    return make


def numbers(call: ServiceCall) -> ServiceAnswer:
    number = float(call.json()["completion"])
    return ServiceAnswer(status=400) if number < 0 else ServiceAnswer({"score": number, "info": {"answer": "x"}})


@pytest.mark.slow
def test_a_function_sees_the_scores_of_a_group_and_gives_others(
    score: Score, settings: Callable[..., RewardLoopSettings]
) -> None:
    completions = [["5", "9", "7", "8"], ["3", "-1", "2", "1"]]
    samples = [make_trajectory(p, s, text=completions[p][s]) for s in (2, 0, 3, 1) for p in (1, 0)]
    with serving(numbers) as service:
        results, _ = score(settings(service.url, "ranks"), samples, lane=Lane.TRAIN)
    assert len(service.calls) == 8
    found = {(result.trajectory.prompt.id, result.trajectory.text()): result.reward for result in results}
    assert {key: reward.score for key, reward in found.items() if reward.status is RewardStatus.OK} == {
        ("test/0", "5"): 0.0, ("test/0", "7"): 1.0, ("test/0", "8"): 2.0, ("test/0", "9"): 3.0,
        ("test/1", "1"): 0.0, ("test/1", "2"): 1.0, ("test/1", "3"): 2.0,
    }  # fmt: skip
    assert found["test/1", "-1"].status is RewardStatus.FAILED
    assert dict(found["test/0", "9"].info) == {"answer": "x", "raw_score": 9.0}


@pytest.mark.slow
def test_a_group_that_stays_incomplete_is_post_processed_at_the_end_of_the_stream(
    score: Score, settings: Callable[..., RewardLoopSettings]
) -> None:
    with serving(numbers) as service:
        results, _ = score(settings(service.url, "ranks"), [make_trajectory(0, 0, text="5")], lane=Lane.TRAIN)
    assert [result.reward.score for result in results] == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "message"), [("breaks", "no such luck"), ("short", "a list of 1 for 2 samples")])
def test_post_processing_that_fails_fails_its_group(
    score: Score, settings: Callable[..., RewardLoopSettings], function: str, message: str
) -> None:
    samples = [make_trajectory(0, sample, text=str(sample)) for sample in range(2)]
    with serving(numbers) as service:
        results, _ = score(settings(service.url, function), samples, lane=Lane.TRAIN)
    assert [result.reward.status for result in results] == [RewardStatus.FAILED] * 2
    assert all("post_process: " in result.reward.info["error"] for result in results)
    assert all(message in result.reward.info["error"] for result in results)


def test_a_function_that_does_not_exist_stops_the_start(
    score: Score, settings: Callable[..., RewardLoopSettings]
) -> None:
    with serving(numbers) as service, pytest.raises(PluginError, match=r"own\.py:nothing': there is no 'nothing'"):
        score(settings(service.url, "nothing"), [make_trajectory(0)])


@pytest.mark.slow
def test_scores_are_normalised_by_the_samples_of_earlier_steps(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
    }
    with serving(lambda call: ServiceAnswer({"score": sum(map(ord, call.json()["completion"])) % 13})) as service:
        plugin = {
            "rewards": {"liked": {"served_by": "scorer", "normalise": True}},
            "services": {"scorer": {"urls": [service.url]}},
        }
        result = train({**config, "plugins": {"null": {}, "reward_loop": plugin}})
    first, second = (list(metrics.read_trajectories(result.run_dir, step)) for step in (1, 2))
    seen = [row["score"] for row in first]
    mean = sum(seen) / len(seen)
    deviation = (sum((value - mean) ** 2 for value in seen) / len(seen)) ** 0.5
    assert deviation > 0
    for row in second:
        assert row["score"] == pytest.approx((row["info"]["raw_score"] - mean) / deviation)


def test_an_evaluation_gets_raw_scores(score: Score, settings: Callable[..., RewardLoopSettings]) -> None:
    with serving(numbers) as service:
        base = settings(service.url, "ranks")
        reward = replace(base.rewards["liked"], post_process="", normalise=True)
        results, found = score(replace(base, rewards={"liked": reward}), [make_trajectory(0, text="5")])
    assert [result.reward.score for result in results] == [5.0]
    assert (found["reward/liked/running_mean"], found["reward/liked/running_std"]) == (0.0, 1.0)
