"""Answers of services that were made to end a run: each fails its own sample, and no secret is in the error."""

import asyncio
import json
import math
from typing import Any, cast

import pytest
from rlcore_reward_loop.client.http import Client, NoAnswer, seconds
from rlcore_reward_loop.client.service import Service
from rlcore_reward_loop.rewards import ServiceSource, judgement

from rlcore import RewardStatus
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.scorer import MAX_DEPTH, Outcome
from rlcore.errors.redaction import remember_variable
from rlcore.reward.combine import combine
from rlcore.reward.outcome import outcome_of_one
from rlcore.testing.rewards import make_trajectory
from rlcore.types import Lane


def nested(depth: int) -> Any:
    """Lists and objects in one another."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 900, 10_000])
def test_what_is_nested_deeply_is_one_failed_sample(depth: int) -> None:
    with pytest.raises(NoAnswer, match="nested more than 32 levels"):
        judgement({"score": 1, "info": {"deep": nested(depth)}}, "")
    outcome = outcome_of_one({"score": 1, "deep": nested(depth)}, 3, may_skip=False)
    assert outcome.status is RewardStatus.FAILED
    assert "nested more than 32 levels" in outcome.error


def test_what_is_nested_as_people_do_is_kept() -> None:
    outcome = judgement({"score": 1, "info": {"deep": nested(MAX_DEPTH - 2)}}, "")
    assert outcome.info == {"deep": nested(MAX_DEPTH - 2)}


@pytest.mark.parametrize(
    "value",
    [
        "Mon, 01 Jan 2024 00:00:00 +99999999999999",
        "Mon, 999999999999999999999999 Jan 2024 00:00:00 GMT",
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "Mon, 01 Jan 0001 00:00:00 -2359",
        "-1e400",
        "nan",
        "\x00",
        "٣",
        "1_000",
        "",
    ],
)
def test_any_retry_after_is_a_pause_or_none(value: str) -> None:
    pause_s = seconds(value)
    assert pause_s is None or pause_s >= 0


def test_retry_after_as_services_write_it() -> None:
    assert seconds("2.5") == 2.5
    assert seconds("Mon, 01 Jan 2024 00:00:00 GMT") == 0.0
    assert (seconds("Fri, 01 Jan 2100 00:00:00 GMT") or 0) > 1e9


def test_a_score_that_its_weight_lifts_out_of_float32_fails_its_sample() -> None:
    good = Outcome(RewardStatus.OK, 1e38)
    reward = combine({"big": good, "small": Outcome(RewardStatus.OK, 1.0)}, {"big": 1e10, "small": 1.0}, 0.0)
    assert reward.status is RewardStatus.FAILED
    assert reward.score == 0.0
    assert list(reward.info["failed"]) == ["big"]
    assert "would leave what a float32 holds" in reward.info["failed"]["big"]


def test_a_sum_that_is_too_large_fails_its_sample_though_no_part_does() -> None:
    part = Outcome(RewardStatus.OK, 0.8e30)
    reward = combine({"a": part, "b": part}, {"a": 1.0, "b": 1.0}, 0.0)
    assert reward.status is RewardStatus.FAILED
    assert list(reward.info["failed"]) == ["b"]
    fine = combine({"a": part, "b": part}, {"a": 1.0, "b": -1.0}, 0.0)
    assert (fine.status, fine.score) == (RewardStatus.OK, 0.0)


def test_of_a_group_s_answers_one_that_is_wrong_fails_alone() -> None:
    answers: list[Any] = [{"score": 1.0}, {"score": math.nan}, {"score": "8"}, None, {"score": 0.5, "info": []}]

    class Answering:
        name = "odd"

        async def ask(self, *_: object) -> dict[str, Any]:
            return {"scores": answers}

    source = ServiceSource(cast(Service, Answering()), "group")
    samples = [make_trajectory(0, index) for index in range(len(answers))]
    outcomes = asyncio.run(source.ask("helpful", samples, Lane.TRAIN))
    failed = RewardStatus.FAILED
    assert [outcome.status for outcome in outcomes] == [RewardStatus.OK, failed, failed, failed, RewardStatus.OK]
    assert str(outcomes[3].error).startswith("service 'odd': answered with")


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """A value that the configuration read from the environment."""
    monkeypatch.setenv("RLCORE_TEST_ECHO_TOKEN", "tok-0123456789abcdef-0123456789abcdef")
    remember_variable("RLCORE_TEST_ECHO_TOKEN")
    return "tok-0123456789abcdef-0123456789abcdef"


@pytest.mark.parametrize("before", [0, 20, 43, 60, 76])
def test_an_echoed_secret_is_redacted_before_the_answer_is_cut(secret: str, before: int) -> None:
    with pytest.raises(NoAnswer) as caught:
        judgement(["x" * before + secret], "")
    assert secret[:5] not in str(caught.value)


@pytest.mark.parametrize("cut", [4, 10, 34])
@pytest.mark.parametrize("ends", [False, True], ids=["comes later", "never comes"])
def test_an_echoed_secret_whose_rest_comes_late_is_redacted(secret: str, cut: int, ends: bool) -> None:
    body = secret.encode() + b" is not known here"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(f"HTTP/1.1 500 X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:cut])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"" if ends else body[cut:])
        writer.close()

    async def refusal() -> str:
        client = Client()
        await client.start()
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            with pytest.raises(NoAnswer) as caught:
                await client.post(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", b"{}", 1000)
            await client.close()
        return str(caught.value)

    error = asyncio.run(refusal())
    assert error.startswith("answered 500")
    assert secret[:4] not in error
    assert ends or "${oc.env:RLCORE_TEST_ECHO_TOKEN} is not" in error


def test_the_log_of_calls_redacts_before_it_cuts(secret: str, tmp_path: Any) -> None:
    log = CallLog(tmp_path, "all", 100)
    log.record(
        reward="r", id="1", target="t", query=b"x" * 85 + secret.encode(), response=["y" * 80, secret], status="ok"
    )
    log.close()
    [line] = (tmp_path / "reward_calls.jsonl").read_text().splitlines()
    assert secret[:5] not in line
    assert json.loads(line)["status"] == "ok"
