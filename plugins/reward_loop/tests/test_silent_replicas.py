"""Replicas of a reward model that live and do not answer: they are restarted after the deadline of an answer."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlcore_reward_loop import settings as settings_module
from rlcore_reward_loop.client.http import NoAnswer
from rlcore_reward_loop.models.replicas import Replicas
from rlcore_reward_loop.settings import ModelSettings

from rlcore import WorkerError
from rlcore.aio import Stopwatch
from rlcore.contracts.call_log import CallLog
from rlcore.contracts.reward_replica import RewardReplica, ScoreRequest
from rlcore.types import FrozenDict, Lane

DEADLINE_S = 0.4
PATH = "plugins.reward_loop.models.judge.deadline_s=0.4"


@dataclass
class Silent:
    """A replica that answers no request, and health checks as `health` says."""

    health: Iterator[str]
    alive: bool = True
    ended: bool = False
    name: str = "judge[0]"
    restarts: list[tuple[float, str]] = field(default_factory=list)

    async def call(self, method: Any, *args: Any) -> Any:
        how = "silent"
        if method is RewardReplica.health:
            how = next(self.health)
        if how == "error":
            raise WorkerError("judge[0]: broke")
        if how == "silent":
            await asyncio.sleep(3600)

    def restart(self, reason: str) -> None:
        self.restarts.append((time.monotonic(), reason))
        if self.ended:
            self.health = repeat("fine")
            raise WorkerError("judge[0]: it has ended")


def watch(replica: Silent, seconds: float, directory: Path) -> tuple[float, int]:
    """Let a request miss its deadline, and check health for some seconds.

    Returns the end of the request, and the number of replicas that are out of use at the end.
    """
    log = CallLog(directory, "all", 1000)
    model = ModelSettings(path="p", deadline_s=DEADLINE_S, health_s=0.02)
    group: Any = SimpleNamespace(replicas=[replica])
    replicas = Replicas("judge", model, group, log, Stopwatch())
    request = ScoreRequest("1", (FrozenDict({"role": "user", "content": "?"}),))

    async def run() -> tuple[float, int]:
        with pytest.raises(NoAnswer, match="gave no answer within deadline_s"):
            await replicas.ask("liked", request, Lane.TRAIN)
        missed_at = time.monotonic()
        await asyncio.sleep(seconds)
        num_ejected = replicas.router.num_ejected
        await replicas.close()
        return missed_at, num_ejected

    try:
        return asyncio.run(run())
    finally:
        log.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "LEAST_HEALTH_S", 0.02)


@pytest.mark.parametrize("ended", [False, True])
def test_a_silent_replica_is_restarted_after_the_deadline(tmp_path: Path, ended: bool) -> None:
    replica = Silent(repeat("silent"), ended=ended)
    missed_at, num_ejected = watch(replica, 0.7, tmp_path)
    [(restarted_at, reason)] = replica.restarts
    assert restarted_at - missed_at >= DEADLINE_S
    assert num_ejected == (0 if ended else 1), "it is asked on"
    assert reason == f"no sign of life for 0 s, longer than {PATH}"


@pytest.mark.parametrize("answer", ["error", "fine"])
def test_a_replica_that_answers_some_health_checks_is_not_restarted(tmp_path: Path, answer: str) -> None:
    replica = Silent(cycle([*["silent"] * 3, answer]))
    watch(replica, 1.0, tmp_path)
    assert replica.restarts == []


def test_a_replica_that_has_ended_is_restarted_by_its_watcher_alone(tmp_path: Path) -> None:
    replica = Silent(repeat("silent"))

    async def call(method: Any, *args: Any) -> Any:
        replica.alive = False
        await asyncio.sleep(3600)

    replica.call = call  # type: ignore[method-assign]
    watch(replica, 1.0, tmp_path)
    assert replica.restarts == []
