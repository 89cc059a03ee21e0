"""A service with several addresses of which one answers wrongly, and at once."""

from collections.abc import Callable
from typing import Any

import pytest
from rlcore_reward_loop.settings import RewardLoopSettings

from rlcore.testing.service import ServiceAnswer, serving
from rlcore.types import RewardStatus

Samples = Callable[[int], Any]
Score = Callable[..., Any]
Settings = Callable[..., RewardLoopSettings]

WRONG = {
    "a page": ServiceAnswer(b"<html>", content_type="text/html"),
    "no path": ServiceAnswer(status=404),
    "no token": ServiceAnswer(status=401),
    "half": ServiceAnswer({"score": 1}, cut_at=3),
    "a redirect": ServiceAnswer(status=302, headers={"Location": "http://elsewhere"}),
    "overloaded": ServiceAnswer(status=503, headers={"Retry-After": "600"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_address_that_answers_wrongly_and_at_once_costs_no_sample(
    name: str, score: Score, samples: Samples, one_service: Settings
) -> None:
    good = ServiceAnswer({"score": 1}, after_s=0.02)
    with serving(lambda call: good) as service, serving(lambda call: WRONG[name]) as other:
        results, _ = score(one_service(other.url, service.url, deadline_s=20), samples(40))
    assert all(result.reward.status is RewardStatus.OK for result in results)
    assert len(service.calls) == 40
    assert 0 < len(other.calls) < 40


def test_an_address_that_answers_at_once_without_a_score_is_not_taken_for_a_fast_one(
    score: Score, samples: Samples, one_service: Settings
) -> None:
    with (
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.02)) as service,
        serving(lambda call: ServiceAnswer({"detail": "starting"})) as other,
    ):
        score(one_service(other.url, service.url, concurrency=4, eval_slots=4, deadline_s=20), samples(80))
    assert len(service.calls) > len(other.calls)
