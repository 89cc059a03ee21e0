"""Answers that `cache` keeps: they are those to a question, whichever sample asked it first."""

from collections.abc import Callable
from typing import Any

import pytest
from rlcore_reward_loop.settings import JudgeSettings, RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import ServiceAnswer, ServiceCall, serving
from rlcore.types import Lane, RewardStatus

Score = Callable[..., Any]
SAME = [make_trajectory(0, sample, text="the same") for sample in range(4)]


def settings(url: str, concurrency: int = 8, **reward: Any) -> RewardLoopSettings:
    """A reward by a service that keeps answers."""
    service = ServiceSettings(urls=(url,), cache=8, concurrency=concurrency)
    rewards = {"helpful": RewardSettings(served_by="scorer", **reward)}
    return RewardLoopSettings(rewards=rewards, services={"scorer": service})


def echo(call: ServiceCall) -> ServiceAnswer:
    """Scores 5, and says of which sample."""
    body = call.json()
    if "samples" in body:
        return ServiceAnswer({"scores": [{"id": sample["id"], "score": 5} for sample in body["samples"]]})
    return ServiceAnswer({"id": body["id"], "score": 5}, after_s=0.02)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_service_that_echoes_ids_answers_every_sample_with_the_same_question(score: Score, concurrency: int) -> None:
    with serving(echo) as service:
        results, numbers = score(settings(service.url, concurrency), SAME, lane=Lane.TRAIN)
    assert [result.reward.score for result in results] == [5.0] * 4
    assert (len(service.calls), numbers["reward/num_cache_hits"]) == (1, 3.0)


def test_a_group_with_the_same_questions_gets_the_answer_of_the_first(score: Score) -> None:
    again = [make_trajectory(SAME[0].prompt, sample + 4, text="the same") for sample in range(4)]
    with serving(echo) as service:
        results, _ = score(settings(service.url, scope="group"), [*SAME, *again], lane=Lane.TRAIN)
    assert [result.reward.score for result in results] == [5.0] * 8
    assert len(service.calls) == 1


WRONG: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "no score": ({}, {"note": "busy"}, {"score": 5}),
    "no score of one of a group": (
        {"scope": "group"},
        {"scores": [{"score": 5}] * 3 + [{}]},
        {"scores": [{"score": 5}] * 4},
    ),
    "prose of a judge": (
        {"kind": "judge", "judge": JudgeSettings()},
        {"choices": [{"message": {"content": "It is fine."}}]},
        {"choices": [{"message": {"content": '{"score": 5}'}}]},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_answer_without_a_usable_score_fails_who_asked_and_the_next_asks_again(name: str, score: Score) -> None:
    reward, wrong, right = WRONG[name]
    again = [make_trajectory(SAME[0].prompt, sample + 4, text="the same") for sample in range(4)]
    with serving(lambda call: ServiceAnswer(right if len(service.calls) > 1 else wrong)) as service:
        results, _ = score(settings(service.url, **reward), [*SAME, *again], lane=Lane.TRAIN)
    failed = [result for result in results if result.reward.status is RewardStatus.FAILED]
    assert (len(service.calls), len(failed)) == (2, 1)
    assert {result.reward.score for result in results if result not in failed} == {5.0}
