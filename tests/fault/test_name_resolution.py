"""Names of services that stop resolving during a run: samples fail in one line, and later steps ask again."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.service import ServiceAnswer, ServiceCall, serving
from rlcore.train import train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

NAME = "scorer.test"
STEPS, SAMPLES_PER_STEP = 6, 8
BROKEN = (3, 4)
"""The steps in which the name does not resolve."""


class Resolver:
    """The system's resolver, except for one name: its lookups fail in the steps of BROKEN, else give 127.0.0.1."""

    def __init__(self, fail: Callable[["Resolver"], Any]) -> None:
        self.step, self.broken = 1, 0
        """The current step, and the number of failed lookups."""
        self.released = threading.Event()
        self._fail, self._really = fail, socket.getaddrinfo

    def getaddrinfo(self, host: Any, *arguments: Any, **more: Any) -> Any:
        if host not in (NAME, NAME.encode()):
            return self._really(host, *arguments, **more)
        if self.step in BROKEN:
            self.broken += 1
            return self._fail(self)
        return self._really("127.0.0.1", *arguments, **more)

    def on_step(self, step: int, _: Any) -> None:
        self.step = step + 1
        if self.step > max(BROKEN):
            self.released.set()


def servfail(resolver: Resolver) -> Any:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def unknown(resolver: Resolver) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def silence(resolver: Resolver) -> Any:
    resolver.released.wait(60)
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.fixture(autouse=True)
def _names_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection for each call, and a lookup for each connection: a kept one would hide what a resolver says."""
    really = aiohttp.TCPConnector

    def connector(**settings: Any) -> aiohttp.TCPConnector:
        return really(**{**settings, "ttl_dns_cache": 0, "force_close": True})

    monkeypatch.setattr(aiohttp, "TCPConnector", connector)


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (servfail, "could not be reached (ClientConnectorDNSError: Temporary failure in name resolution"),
        (unknown, "could not be reached (ClientConnectorDNSError: Name or service not known"),
        (silence, "no answer within plugins.reward_loop.services.scorer.deadline_s=1.5"),
    ],
)
def test_a_name_that_fails_for_two_steps_costs_their_samples_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[Resolver], Any], words: str
) -> None:
    resolver = Resolver(fail)
    monkeypatch.setattr(socket, "getaddrinfo", resolver.getaddrinfo)
    num_calls: dict[int, int] = dict.fromkeys(range(1, STEPS + 1), 0)

    def score(call: ServiceCall) -> ServiceAnswer:
        num_calls[resolver.step] += 1
        return ServiceAnswer({"score": len(call.json()["completion"])})

    with serving(score) as service:
        url = f"{service.url.replace('127.0.0.1', NAME)}/score"
        config = {
            "model": {"path": "", "tokenizer": "bytes"},
            "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 2 * STEPS))}}},
            "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
            "reward": {"error_budget_frac": 1.0},
            "actor": {"backend": "null"},
            "train": {"prompts_per_step": 2, "max_steps": STEPS, "dir": str(tmp_path), "name": "run"},
            "plugins": {
                "reward_loop": {
                    "rewards": {"helpful": {"served_by": "scorer"}},
                    "services": {"scorer": {"urls": [url], "tries": 2, "deadline_s": 1.5}},
                }
            },
        }
        result = train(config, plugins=["null"], on_step=resolver.on_step)

    assert result.steps == STEPS
    assert resolver.broken, "a lookup that hangs is one, which both steps wait for"
    assert num_calls == {step: 0 if step in BROKEN else SAMPLES_PER_STEP for step in num_calls}
    for step in range(1, STEPS + 1):
        rows = metrics.read_trajectories(result.run_dir, step)
        assert len({str(row["id"]) for row in rows}) == len(rows) == SAMPLES_PER_STEP
        assert {row["status"] for row in rows} == {"failed" if step in BROKEN else "ok"}
        errors = [str(row["info"].get("error", "")) for row in rows]
        assert all("\n" not in error and (words in error) == (step in BROKEN) for error in errors), errors
    failed = {entry["step"]: entry["reward/failed"] for entry in metrics.read(result.run_dir)}
    assert failed == {step: SAMPLES_PER_STEP if step in BROKEN else 0 for step in num_calls}
    assert "Traceback" not in (result.run_dir / "log.txt").read_text()
