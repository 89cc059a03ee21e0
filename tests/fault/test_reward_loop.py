"""A reward service that misbehaves, in whole runs (cases 1 to 10 and 20; 21 and 40 are with the plugin's tests)."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import RewardError
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.service import NEVER, ScriptedService, ServiceAnswer, ServiceCall, serving
from rlcore.train import TrainResult, train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

NUM_SAMPLES = 32


def train_with(tmp_path: Path, urls: list[str], *settings: str, steps: int = 1, **sections: Any) -> TrainResult:
    """A run whose one reward, 'helpful', is asked of these addresses."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8 * steps)
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts)}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "actor": {"backend": "null"},
        "train": {"prompts_per_step": 8, "max_steps": steps, "dir": str(tmp_path), "name": "run"},
        "plugins": {
            "reward_loop": {
                "rewards": {"helpful": {"served_by": "scorer"}},
                "services": {"scorer": {"urls": urls}},
            }
        },
        **sections,
    }
    return train(config, *(f"plugins.reward_loop.services.scorer.{setting}" for setting in settings), plugins=["null"])


def rows_of(result: TrainResult) -> list[dict[str, Any]]:
    rows = list(metrics.read_trajectories(result.run_dir, 1))
    assert len(rows) == NUM_SAMPLES
    return rows


def ids(service: ScriptedService) -> Counter[str]:
    return Counter(call.json()["id"] for call in service.calls)


def is_first(call: ServiceCall) -> bool:
    return bool(call.json()["id"].endswith("/3/0/0"))


def good(call: ServiceCall) -> ServiceAnswer:
    return ServiceAnswer({"score": len(call.json()["completion"])})


def test_a_sample_that_is_never_answered_fails_at_its_deadline_and_the_step_is_done(tmp_path: Path) -> None:
    """Scorecard case 1."""
    with serving(lambda call: NEVER if is_first(call) else good(call)) as service:
        rows = rows_of(train_with(tmp_path, [service.url], "deadline_s=1"))
    failed = [row for row in rows if row["status"] == "failed"]
    assert [(row["answer"], row["advantage"]) for row in failed] == [("3", None)]
    assert "no answer within plugins.reward_loop.services.scorer.deadline_s=1" in failed[0]["info"]["error"]


def test_an_answer_after_the_deadline_is_ignored_and_counted_nowhere(tmp_path: Path) -> None:
    """Scorecard case 2."""

    def script(call: ServiceCall) -> ServiceAnswer:
        late = is_first(call)
        return ServiceAnswer({"score": 1e6 if late else 1.0}, after_s=1.5 if late else 0.0)

    with serving(script) as service:
        result = train_with(tmp_path, [service.url], "deadline_s=0.7", steps=2)
    rows = [row for step in (1, 2) for row in metrics.read_trajectories(result.run_dir, step)]
    [failed] = [row for row in rows if row["status"] == "failed"]
    assert (len(rows), failed["score"], failed["advantage"]) == (2 * NUM_SAMPLES, 0.0, None)
    steps = metrics.read(result.run_dir)
    assert [row["reward/mean"] for row in steps if "reward/mean" in row] == [1.0, 1.0]
    assert all(times == 1 for times in ids(service).values())


def test_calls_turned_away_with_retry_after_are_all_scored(tmp_path: Path) -> None:
    """Scorecard case 3."""

    def script(call: ServiceCall) -> ServiceAnswer:
        turned_away = call.times == 1 and call.json()["id"][-1] in "02"
        return ServiceAnswer(status=429, headers={"Retry-After": "0.2"}) if turned_away else good(call)

    with serving(script) as service:
        result = train_with(tmp_path, [service.url])
    assert all(row["status"] == "ok" for row in rows_of(result))
    assert sorted(ids(service).values()) == [1] * 16 + [2] * 16
    assert sum(row.get("reward/num_retries", 0) for row in metrics.read(result.run_dir)) == 16


def test_two_refusals_and_an_answer_are_one_score(tmp_path: Path) -> None:
    """Scorecard case 4."""
    with serving(lambda call: good(call) if call.times == 3 else ServiceAnswer(status=503)) as service:
        result = train_with(tmp_path, [service.url], "eject_after=1000")
    assert all(row["status"] == "ok" and row["components"] == {"helpful": row["score"]} for row in rows_of(result))
    assert set(ids(service).values()) == {3}


def test_a_service_that_is_down_stops_the_run_at_the_error_budget_and_is_named(tmp_path: Path) -> None:
    """Scorecard case 5."""
    with serving(lambda call: ServiceAnswer(status=503)) as service:
        began = time.monotonic()
        with pytest.raises(RewardError, match=r"error_budget_frac") as raised:
            train_with(tmp_path, [service.url], "deadline_s=3")
    assert service.url in str(raised.value)
    assert "answered 503" in str(raised.value)
    assert len(service.calls) <= 3 * NUM_SAMPLES
    assert time.monotonic() - began < 60  # bounded; a deadline of 3 s is what bounds it


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ServiceAnswer({"score": 1.0}, cut_at=5), "broke off"),
        (ServiceAnswer(b'{"score": 1'), "needs JSON"),
        (ServiceAnswer(b"<html>", content_type="text/html"), "text/html"),
        (ServiceAnswer(b" " * 10_000_000), "more than max_response_bytes"),
    ],
    ids=["reset", "truncated", "content type", "10 MB"],
)
def test_half_an_answer_or_a_wrong_one_costs_its_own_sample(
    tmp_path: Path, answer: ServiceAnswer, message: str
) -> None:
    """Scorecard case 6."""
    with serving(lambda call: answer if is_first(call) else good(call)) as service:
        rows = rows_of(train_with(tmp_path, [service.url]))
    [failed] = [row for row in rows if row["status"] == "failed"]
    assert message in failed["info"]["error"]
    assert len(service.calls) == NUM_SAMPLES


def test_an_address_that_dies_mid_batch_is_ejected_and_comes_back_when_it_answers(tmp_path: Path) -> None:
    """Scorecard case 7, for the addresses of a service."""
    dead = {"since": 0, "until": 12}

    def dying(call: ServiceCall) -> ServiceAnswer:
        dead["since"] += 1
        return ServiceAnswer(cut_at=-1) if dead["since"] <= dead["until"] else good(call)

    with serving(dying) as one, serving(good) as two, serving(good) as three:
        urls = [service.url for service in (one, two, three)]
        result = train_with(tmp_path, urls, "eject_after=2", "eject_s=0.05", "concurrency=8", steps=6)
    assert all(row["status"] == "ok" for step in range(1, 7) for row in metrics.read_trajectories(result.run_dir, step))
    steps = [row for row in metrics.read(result.run_dir) if "reward/num_ejections" in row]
    assert sum(row["reward/num_ejections"] for row in steps) >= 1
    scored = sum(service.num_answered for service in (one, two, three))
    assert scored == 6 * NUM_SAMPLES
    assert {service.num_open for service in (one, two, three)} == {0}


def test_a_slow_replica_gets_so_few_calls_that_the_99th_percentile_does_not_see_it(tmp_path: Path) -> None:
    """Scorecard case 8."""
    with (
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.02)) as one,
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.02)) as two,
        serving(lambda call: ServiceAnswer({"score": 1}, after_s=0.4)) as slow,
    ):
        urls = [service.url for service in (one, two, slow)]
        train_with(
            tmp_path,
            urls,
            "concurrency=12",
            rollout={"backend": "null", "samples_per_prompt": 128, "max_tokens": 2},
        )
    assert len(slow.calls) <= 0.01 * (len(one.calls) + len(two.calls) + len(slow.calls))


def test_four_rewards_that_share_a_service_share_its_pace(tmp_path: Path) -> None:
    """Scorecard case 9."""
    plugin = {
        "rewards": {name: {"served_by": "scorer"} for name in "abcd"},
        "services": {"scorer": {"urls": [], "requests_per_minute": 2400}},
    }
    with serving(good) as service:
        plugin["services"]["scorer"]["urls"] = [service.url]  # type: ignore[index]
        began = time.monotonic()
        train_with(tmp_path, [service.url], plugins={"reward_loop": plugin})
        took = time.monotonic() - began
    assert len(service.calls) == 4 * NUM_SAMPLES
    assert took >= (4 * NUM_SAMPLES - 1) / 40  # 40 per second, evenly spread, is what 2400 per minute means


def test_an_answer_that_is_delivered_twice_counts_once(tmp_path: Path) -> None:
    """Scorecard case 10."""

    def twice(call: ServiceCall) -> ServiceAnswer:
        question = call.json()
        return ServiceAnswer({"id": question["id"], "score": len(question["completion"])}, copies=2)

    with serving(twice) as service:
        rows = rows_of(train_with(tmp_path, [service.url], "concurrency=2"))
    assert all(row["status"] == "ok" for row in rows)
    assert all(row["score"] == len(row["completion"]) for row in rows)
    assert set(ids(service).values()) == {1}


def test_equal_rewards_for_many_steps_are_a_loud_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Scorecard case 20."""
    with serving(lambda call: ServiceAnswer({"score": 1})) as service:
        result = train_with(tmp_path, [service.url], steps=4)
    steps = [row for row in metrics.read(result.run_dir) if "reward/equal_steps" in row]
    assert [row["reward/equal_steps"] for row in steps] == [1.0, 2.0, 3.0, 4.0]
    captured = capsys.readouterr()
    output = captured.out + captured.err + caplog.text + (result.run_dir / "log.txt").read_text()
    assert "all rewards of every group were equal" in " ".join(output.split())
