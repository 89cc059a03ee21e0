"""Replicas of a reward model that live and whose health checks fail are restarted after the deadline of an answer."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop import settings as settings_module
from rlcore_reward_loop.models import replicas as replicas_module
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.settings import ModelSettings

from rlcore import WorkerError
from rlcore.aio import Stopwatch
from rlcore.contracts.call_log import CallLog

PROBLEMS = {"silent": "no sign of life", "error": "judge[0]: broke"}


@dataclass
class Sick:
    """A replica with the health of the moment."""

    health: str = "fine"
    alive: bool = True
    ended: bool = False
    name: str = "judge[0]"
    restarts: list[str] = field(default_factory=list)

    async def call(self, method: Any, *args: Any) -> Any:
        if self.health == "error":
            raise WorkerError("judge[0]: broke")
        if self.health == "silent":
            await asyncio.sleep(3600)

    def restart(self, reason: str) -> None:
        self.restarts.append(reason)
        if self.ended:
            raise WorkerError("judge[0]: it has ended")


def check(
    replica: Sick, monkeypatch: pytest.MonkeyPatch, directory: Path, checks: Sequence[tuple[int, str]]
) -> list[int]:
    """Check its health at these seconds, when it has that health. Returns the seconds at which it was restarted."""
    now, restarted_at = 0, list[int]()
    monkeypatch.setattr(settings_module, "LEAST_HEALTH_S", 0.02)
    monkeypatch.setattr(replicas_module, "time", SimpleNamespace(monotonic=lambda: float(now)))
    log = CallLog(directory, "all", 1000)
    model = ModelSettings(path="p", deadline_s=60.0, health_s=0.02)
    group: Any = SimpleNamespace(replicas=[replica])
    replicas = Replicas("judge", model, group, log, Stopwatch())

    async def run() -> None:
        nonlocal now
        [target] = replicas.router.targets
        for now, replica.health in checks:
            before = len(replica.restarts)
            assert await replicas._healthy(target) is (replica.health == "fine")
            restarted_at.extend([now] * (len(replica.restarts) - before))
        await replicas.close()

    asyncio.run(run())
    log.close()
    return restarted_at


@pytest.mark.parametrize("how", PROBLEMS)
@pytest.mark.parametrize("ended", [False, True])
def test_a_replica_whose_checks_fail_is_restarted_after_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, ended: bool
) -> None:
    replica = Sick(ended=ended)
    seconds = (100, 130, 159, 160, 170, 229, 231, 500)
    assert check(replica, monkeypatch, tmp_path, [(at, how) for at in seconds]) == [160, 231]
    reason = f"health checks fail for 60 s, longer than plugins.reward_loop.models.judge.deadline_s=60: {PROBLEMS[how]}"
    assert replica.restarts[0] == reason


def test_a_replica_that_is_fine_now_and_then_is_not_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [(100, "silent"), (150, "error"), (155, "fine"), (160, "error"), (215, "silent"), (221, "error")]
    assert check(Sick(), monkeypatch, tmp_path, checks) == [221]


def test_a_replica_that_has_ended_is_restarted_by_its_watcher_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Sick(alive=False)
    assert check(replica, monkeypatch, tmp_path, [(100, "error"), (200, "error"), (300, "error")]) == []
