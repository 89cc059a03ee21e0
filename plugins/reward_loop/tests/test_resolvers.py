"""Names of services that resolve no more, late, or to what is not there: samples fail in one line, nothing hangs."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlcore import RewardStatus
from rlcore.testing.rewards import make_trajectory
from rlcore.testing.service import ServiceAnswer, serving

Score = Callable[..., Any]
Settings = Callable[..., Any]
REALLY = socket.getaddrinfo


def resolver(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    """Ask `answer` for the address of `scorer.test`, and the system for those of all other names."""

    def ask(host: Any, *arguments: Any, **more: Any) -> Any:
        return answer(host, *arguments, **more) if host == "scorer.test" else REALLY(host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", ask)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), "Temporary failure"),
    ],
)
def test_a_name_that_does_not_resolve_fails_its_samples_after_all_tries(
    problem: Exception, words: str, score: Score, one_service: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise problem

    resolver(monkeypatch, fail)
    [only], _ = score(one_service("http://scorer.test:9/x", tries=2, deadline_s=20), [make_trajectory(0)])
    assert only.reward.status is RewardStatus.FAILED
    error = str(only.reward.info["error"])
    assert words in error
    assert "\n" not in error


@pytest.mark.parametrize("host", ["a" * 64 + ".test", "a..test", ".test", "a" * 5000], ids=["64", "gap", "dot", "5000"])
def test_a_host_that_no_name_can_have_fails_its_samples(host: str, score: Score, one_service: Settings) -> None:
    [only], _ = score(one_service(f"http://{host}:9/x", tries=1, deadline_s=20), [make_trajectory(0)])
    assert only.reward.status is RewardStatus.FAILED
    assert "could not be reached" in str(only.reward.info["error"])


@pytest.mark.slow
def test_a_name_that_resolves_again_is_asked_again(
    score: Score, one_service: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), OSError(24, "Too many open files")])

    def recover(host: str, *arguments: Any, **more: Any) -> Any:
        for failure in failures:
            raise failure
        return REALLY("127.0.0.1", *arguments, **more)

    resolver(monkeypatch, recover)
    with serving(lambda call: ServiceAnswer({"score": 1})) as service:
        url = service.url.replace("127.0.0.1", "scorer.test")
        [only], _ = score(one_service(url, tries=3, deadline_s=30), [make_trajectory(0)])
    assert only.reward.status is RewardStatus.OK


@pytest.mark.slow
def test_a_resolver_that_does_not_answer_is_a_timeout_and_other_threads_continue(
    score: Score, one_service: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the samples asks; were each to hold a thread, nothing else of the run would have one."""
    lookups, answers = list[float](), threading.Event()

    def wait(*arguments: Any, **more: Any) -> Any:
        lookups.append(time.monotonic())
        answers.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")

    resolver(monkeypatch, wait)
    timer = threading.Timer(3.0, answers.set)
    timer.start()
    samples = [make_trajectory(number // 4, number % 4) for number in range(64)]
    scored, _ = score(one_service("http://scorer.test:9/x", tries=1, deadline_s=0.5), samples)
    timer.join()
    assert {sample.reward.status for sample in scored} == {RewardStatus.FAILED}
    assert len(lookups) < 4, "one thread waits for a name, for all samples that ask for it"
