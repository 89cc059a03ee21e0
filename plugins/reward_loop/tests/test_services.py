"""Rewards from a real HTTP service on loopback whose answers are scripted."""

import json
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop.client import http
from rlcore_reward_loop.client.http import seconds
from rlcore_reward_loop.client.service import pause_s
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.config import RewardFunctionConfig
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import NEVER, ServiceAnswer, ServiceCall, serving
from rlcore.train import train
from rlcore.types import FrozenDict, Lane, RewardStatus

Samples = Callable[[int], Any]
Score = Callable[..., Any]
Settings = Callable[..., RewardLoopSettings]
Script = Callable[[ServiceCall], ServiceAnswer]


def error_of(score: Score, settings: RewardLoopSettings) -> str:
    """The reason why the one sample FAILED."""
    [only], _ = score(settings, [make_trajectory(0)])
    assert only.reward.status is RewardStatus.FAILED
    assert only.reward.score == 0.0
    return str(only.reward.info["error"])


def test_the_service_gets_prompt_answer_completion_and_columns_and_the_token(
    score: Score, one_service: Settings
) -> None:
    answer = {"id": "test/3/0/2", "score": 2, "components": {"length": 3}, "info": {"answer": "x"}}
    messages = (FrozenDict({"role": "assistant", "content": "so"}),)
    with serving(lambda call: ServiceAnswer(answer)) as service:
        [only], _ = score(one_service(service.url, token="secret"), [make_trajectory(3, sample=2, completion=messages)])
    [request] = service.calls
    assert request.json() == {
        "id": "test/3/0/2",
        "source": "test",
        "messages": [{"role": "user", "content": "question 3"}],
        "completion": [{"role": "assistant", "content": "so"}],
        "answer": "3",
        "columns": {},
    }
    assert request.headers["authorization"] == "Bearer secret"
    assert dict(only.reward.components) == {"helpful": 2.0, "helpful/length": 3.0}
    assert dict(only.reward.info) == {"answer": "x"}


@pytest.mark.slow
def test_rewards_of_services_and_functions_are_weighed_and_summed(
    tmp_path: Path, score: Score, samples: Samples, echo: Script
) -> None:
    (tmp_path / "own.py").write_text("def half(trajectory):\n    return 0.5\n")
    with serving(echo) as one, serving(lambda call: ServiceAnswer({"score": 1})) as two:
        settings = RewardLoopSettings(
            rewards={
                "helpful": RewardSettings(served_by="one", weight=2.0),
                "safe": RewardSettings(served_by="two", weight=-3.0),
            },
            services={"one": ServiceSettings(urls=(one.url,)), "two": ServiceSettings(urls=(two.url,))},
        )
        own = RewardFunctionConfig(fn=f"{tmp_path / 'own.py'}:half", weight=4.0, children=1)
        results, _ = score(settings, samples(8), {"half": own})
    assert len(results) == 8
    for result in results:
        number = float(result.trajectory.text().split()[-1])
        assert dict(result.reward.components) == {"half": 0.5, "helpful": number, "safe": 1.0}
        assert result.reward.score == pytest.approx(4 * 0.5 + 2 * number - 3)


def test_a_group_is_one_request_and_answers_belong_to_their_samples(score: Score, samples: Samples) -> None:
    def script(call: ServiceCall) -> ServiceAnswer:
        texts = [sample["completion"] for sample in call.json()["samples"]]
        return ServiceAnswer({"scores": [{"score": float(text.split()[-1])} for text in texts]})

    with serving(script) as service:
        settings = RewardLoopSettings(
            rewards={"best": RewardSettings(served_by="scorer", scope="group")},
            services={"scorer": ServiceSettings(urls=(service.url,))},
        )
        results, _ = score(settings, samples(8)[::-1], lane=Lane.TRAIN)
    assert sorted(len(request.json()["samples"]) for request in service.calls) == [4, 4]
    assert all(result.reward.score == float(result.trajectory.text().split()[-1]) for result in results)


def test_a_list_of_the_wrong_length_fails_the_whole_group(score: Score, samples: Samples) -> None:
    with serving(lambda call: ServiceAnswer({"scores": [{"score": 1.0}]})) as service:
        settings = RewardLoopSettings(
            rewards={"best": RewardSettings(served_by="scorer", scope="batch")},
            services={"scorer": ServiceSettings(urls=(service.url,))},
        )
        results, _ = score(settings, samples(4))
    assert [result.reward.status for result in results] == [RewardStatus.FAILED] * 4
    assert "needs 'scores' with 4 objects" in results[0].reward.info["error"]


def test_identical_requests_are_asked_once_when_answers_are_kept(score: Score, one_service: Settings) -> None:
    twice = [make_trajectory(0, sample, text="the same 5") for sample in range(4)]
    with serving(lambda call: ServiceAnswer({"score": 5})) as service:
        results, numbers = score(one_service(service.url, cache=10), [*twice, make_trajectory(1)], lane=Lane.TRAIN)
    assert len(service.calls) == 2
    assert [result.reward.score for result in results] == [5.0] * 5
    assert numbers["reward/num_cache_hits"] == 3.0


def test_every_call_is_in_the_audit_log_and_no_secret_is(
    tmp_path: Path, score: Score, one_service: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scorecard case 40: no secret in a log."""
    from rlcore.errors.redaction import remember_variable

    monkeypatch.setenv("SCORER_TOKEN", "sk-verysecret")
    remember_variable("SCORER_TOKEN")
    with serving(lambda call: ServiceAnswer({"score": 5, "info": {"echo": call.headers["authorization"]}})) as service:
        score(one_service(service.url, token="sk-verysecret"), [make_trajectory(3)])
    [line] = (tmp_path / "reward_calls.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["reward"], record["id"], record["target"]) == ("helpful", "test/3/0/0", service.url)
    assert (record["status"], record["tries"], record["lane"]) == ("ok", 1, "eval")
    assert json.loads(record["query"])["completion"] == "test/3 sample 0"
    assert json.loads(record["response"]) == {"score": 5, "info": {"echo": "Bearer ${oc.env:SCORER_TOKEN}"}}
    assert 0 < record["latency_s"] < 30
    assert "verysecret" not in line


BAD_ANSWERS = {
    "prose": (ServiceAnswer(b"I would give it a ten."), "needs JSON"),
    "html": (ServiceAnswer(b"<html>", content_type="text/html"), "answered with text/html"),
    "no kind": (
        ServiceAnswer({"score": 1}, content_type=""),
        """answered without Content-Type, '{"score": 1}'; needs Content-Type: application/json""",
    ),
    "truncated": (ServiceAnswer(b'{"score": 1.0'), "needs JSON"),
    "empty": (ServiceAnswer(b""), "needs JSON"),
    "nested too deeply": (ServiceAnswer(b"[" * 100_000), "needs JSON"),
    "a list": (ServiceAnswer([1.0]), "needs an object with 'score'"),
    "no score": (
        ServiceAnswer({"reward": 1.0}),
        "service 'scorer': answered with \"{'reward': 1.0}\"; needs an object with 'score'",
    ),
    "null": (ServiceAnswer({"score": None}), "'score' returned None"),
    "text": (ServiceAnswer({"score": "10"}), "'score' returned str '10'"),
    "not a number": (ServiceAnswer(b'{"score": NaN}'), "needs a finite number"),
    "infinite": (ServiceAnswer(b'{"score": -Infinity}'), "needs a finite number"),
    "a component that is none": (ServiceAnswer({"score": 1, "components": {"style": []}}), "'style' returned list []"),
    "components that are none": (
        ServiceAnswer({"score": 1, "components": [1]}),
        "'components' or 'info' that is not an object",
    ),
    "another sample's": (ServiceAnswer({"score": 1, "id": "test/9/0/0"}), "answered about 'test/9/0/0'"),
    "10 MB": (ServiceAnswer(b" " * 10_000_000), "more than max_response_bytes=1000000"),
    "half of it": (ServiceAnswer({"score": 1.0}, cut_at=5), "broke off (ClientPayloadError"),
    "no HTTP": (ServiceAnswer(headers={"Content-Length": "x"}), "answered with something other than HTTP"),
    "a redirect": (
        ServiceAnswer(status=307, headers={"Location": "http://127.0.0.1:9/"}),
        "answered 307, a redirect to 'http://127.0.0.1:9/', which is not followed; name that address in urls",
    ),
    "no such page": (ServiceAnswer(status=404), "answered 404; needs 200: correct the path in urls"),
    "no key": (
        ServiceAnswer(b"no such key", status=401),
        "answered 401, 'no such key'; needs 200: set the token of the service",
    ),
}


@pytest.mark.slow
def test_an_answer_of_very_many_values_is_a_failure_before_it_is_parsed(score: Score, one_service: Settings) -> None:
    content = b'{"score": 1.0, "info": [' + b"[]," * 500_000 + b"[]]}"
    with serving(lambda call: ServiceAnswer(content)) as service:
        error = error_of(score, one_service(service.url, max_response_bytes=len(content)))
    assert "[],[]" in error
    assert error.endswith(", more than 1000000 lists, objects and entries; needs fewer")


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_without_a_usable_score_is_a_failure_that_is_not_tried_again(
    name: str, score: Score, one_service: Settings
) -> None:
    answer, expected = BAD_ANSWERS[name]
    with serving(lambda call: answer) as service:
        error = error_of(score, one_service(service.url))
    assert expected in error
    assert len(service.calls) == 1


def test_a_service_that_stays_unavailable_is_asked_as_often_as_tries_says(score: Score, one_service: Settings) -> None:
    with serving(lambda call: ServiceAnswer(status=503)) as service:
        error = error_of(score, one_service(service.url, tries=2))
    assert len(service.calls) == 2
    assert error == f"helpful: service 'scorer' ({service.url}): answered 503 in the last of 2 tries"


def test_the_words_of_a_refusal_are_quoted(score: Score, one_service: Settings) -> None:
    with serving(lambda call: ServiceAnswer(b"CUDA out of memory", status=500)) as service:
        error = error_of(score, one_service(service.url, tries=1))
    assert error.endswith("answered 500, 'CUDA out of memory' in the last of 1 tries")


def test_no_listener_and_a_connection_closed_at_once_are_named_failures(score: Score, one_service: Settings) -> None:
    with serving(lambda call: ServiceAnswer(cut_at=-1)) as service:
        assert "could not be reached (ServerDisconnectedError" in error_of(score, one_service(service.url, tries=2))
        assert len(service.calls) == 2
    error = error_of(score, one_service(service.url, tries=2))
    assert error.endswith(
        ": could not be reached (ClientConnectorError: Connection refused; does it run there?) in the last of 2 tries"
    )


def test_a_retry_after_beyond_the_deadline_fails_at_once(score: Score, one_service: Settings) -> None:
    with serving(lambda call: ServiceAnswer(status=429, headers={"Retry-After": "600"})) as service:
        error = error_of(score, one_service(service.url))
    assert "no answer within plugins.reward_loop.services.scorer.deadline_s=60: the next try is 6" in error
    assert error.endswith("before which it answered 429")


@pytest.mark.slow
def test_no_more_calls_are_open_than_slots_and_waiting_does_not_fail(
    score: Score, samples: Samples, one_service: Settings
) -> None:
    # Six rounds of two take longer than one call's deadline.
    with serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.15)) as service:
        results, numbers = score(one_service(service.url, concurrency=1, eval_slots=1, deadline_s=0.85), samples(12))
    assert service.most_open == 2
    assert numbers["reward/in_flight_max"] == 2.0
    assert all(result.reward.status is RewardStatus.OK for result in results)


@pytest.mark.fault
def test_a_call_that_is_never_answered_fails_at_its_deadline_and_the_others_are_scored(
    score: Score, samples: Samples, echo: Script, one_service: Settings
) -> None:
    def script(call: ServiceCall) -> ServiceAnswer:
        return NEVER if call.json()["completion"] == "response 1" else echo(call)

    with serving(script) as service:
        results, _ = score(one_service(service.url, deadline_s=1), samples(8))
    failed = [result for result in results if result.reward.status is RewardStatus.FAILED]
    assert [sample.trajectory.text() for sample in failed] == ["response 1"]
    assert failed[0].reward.info["error"].endswith("no answer within plugins.reward_loop.services.scorer.deadline_s=1")


def test_retry_after_may_be_a_number_or_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds("3") == 3.0
    assert seconds("-3") == 0.0
    assert seconds(formatdate(0, usegmt=True)) == 0.0
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert seconds(formatdate(time.time() + 5)) == pytest.approx(5, abs=2)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert seconds("soon") is None
    assert seconds("") is None


def test_pauses_double_with_jitter_unless_the_service_says_how_long() -> None:
    assert 2.5 <= pause_s(5, retry_after_s=2.5) <= 2.75
    for tried, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (30, 10.0)):
        pauses = [pause_s(tried, None) for _ in range(50)]
        assert all(longest / 2 <= pause <= longest for pause in pauses)
        assert len(set(pauses)) > 1


@pytest.mark.slow
def test_a_run_takes_its_rewards_from_the_service(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
    }

    def script(call: ServiceCall) -> ServiceAnswer:
        return ServiceAnswer({"score": len(call.json()["completion"]), "components": {"length": 2}})

    with serving(script) as service:
        settings = [
            f"plugins.reward_loop.services.scorer.urls=[{service.url}/score]",
            "plugins.reward_loop.rewards.helpful.served_by=scorer",
        ]
        result = train(config, *settings, plugins=["null", "reward_loop"])
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    texts = [request.json()["completion"] for request in service.calls]
    assert len(texts) == 2 * 8
    assert sum(row["reward/mean"] for row in steps) * 8 == pytest.approx(sum(map(len, texts)))
    assert steps[0]["reward/helpful/length/mean"] == 2.0
    assert steps[0]["time/reward/helpful/latency_p95_s"] > 0
    assert len((result.run_dir / "reward_calls.jsonl").read_text().splitlines()) == 16


@pytest.mark.slow
def test_answers_that_are_read_at_once_have_a_budget_and_leave_none_of_it_taken(
    score: Score, samples: Samples, one_service: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_READING", 1_000_000)
    body = b" " * 600_000 + b'{"score": 1}'
    with serving(lambda call: ServiceAnswer(body, after_s=0.1)) as service:
        settings = one_service(service.url, max_response_bytes=2_000_000)
        [one], _ = score(settings, samples(1))
        results, _ = score(settings, samples(8))
    assert one.reward.score == 1.0
    errors = [str(scored.reward.info.get("error", "")) for scored in results]
    assert any("answered while answers of 0 MiB were being read; choose a lower" in error for error in errors)
    assert http._READING.num_bytes == 0
    with serving(lambda call: ServiceAnswer(b" " * 1_100_000 + b'{"score": 1}')) as service:
        assert "were being read" in error_of(score, one_service(service.url, max_response_bytes=2_000_000))
    assert http._READING.num_bytes == 0


def test_most_calls_at_a_time_are_those_to_the_service_with_the_most(score: Score, samples: Samples) -> None:
    """A sum would be of different moments."""
    with (
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.02)) as one,
        serving(lambda call: ServiceAnswer({"score": 1})) as other,
    ):
        services = {
            name: ServiceSettings(urls=(service.url,), concurrency=4, eval_slots=1)
            for name, service in (("one", one), ("other", other))
        }
        rewards = {f"by_{name}": RewardSettings(served_by=name) for name in services}
        _, numbers = score(RewardLoopSettings(rewards=rewards, services=services), samples(12))
    most = [numbers[f"reward/{name}/in_flight_max"] for name in services]
    assert min(most) >= 1.0
    assert numbers["reward/in_flight_max"] == max(most)
