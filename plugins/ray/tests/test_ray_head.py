"""A head of Ray that does not answer ends the run while it can still save."""

import asyncio
import signal
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def signals(answers: list[bool], monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of signals that the run gets from a head that answers so, and at last as before."""
    pytest.importorskip("ray")
    from rlcore_ray import head

    received: list[int] = []
    questions: list[bool] = []

    def answered() -> bool:
        questions.append(answers[min(len(questions), len(answers) - 1)])
        return questions[-1]

    async def watch() -> None:
        watched = head.HeadWatch()
        watched.start()
        async with asyncio.timeout(30):
            while not received and len(questions) < 60:
                await asyncio.sleep(0.01)
        watched.stop()

    monkeypatch.setattr(head, "ASK_S", 0.01)
    monkeypatch.setattr(head, "_answers", answered)
    monkeypatch.setenv(head.LIMIT, "0.4")

    def receive(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, receive)
    try:
        asyncio.run(watch())
    finally:
        signal.signal(signal.SIGTERM, before)
    return len(received)


def test_a_head_that_has_answered_and_stays_silent_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert signals([True, False], monkeypatch) == 1
    assert [record.levelname for record in caplog.records if "does not answer" in record.getMessage()] == ["WARNING"]
    assert [record.levelname for record in caplog.records if "has not answered" in record.getMessage()] == ["ERROR"]


def test_a_head_that_answers_again_or_can_never_be_asked_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signals([True, False, False, True], monkeypatch) == 0
    assert signals([False], monkeypatch) == 0
