"""The check after a hand-over that a rollout replica samples with the actor's weights."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.config import RolloutConfig
from rlcore.contracts.workers import ReplicaEvent
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import WorkerError
from rlcore.runtime import weight_check
from rlcore.runtime.weight_check import NUM_TOKENS, WeightsCheck
from rlcore.types import Batch, Completion, FinishReason, Float32s, GenerateRequest

ROUNDING, STEP = 0.04, 0.002
"""Nats per token: by which the formats of two engines differ, and by which a version moves the policy."""


def logprobs(version: float) -> Float32s:
    """Of the tokens behind the sentence."""
    return (np.linspace(-5.0, -1.0, NUM_TOKENS) - STEP * version).astype(np.float32)


class Actor:
    """Answers with the log-probs of its version."""

    def __init__(self) -> None:
        self.name, self.version, self.rows = "actor[0]", 0.0, list[int]()
        self.replicas = (self,)

    async def call(self, method: Callable[..., Any], batch: Batch) -> Float32s:
        self.rows.append(len(batch))
        found_BT = np.zeros(batch.tokens.token_ids_BT.shape, np.float32)
        found_BT[batch.tokens.loss_mask_BT] = logprobs(self.version)[: batch.num_sampled_B[0]]
        return found_BT


class Replica:
    """Samples the same tokens each time, with the log-probs of a version."""

    def __init__(self, name: str = "rollout[0]", rounding: float = 0.0) -> None:
        self.name, self.alive, self.rounding, self.version = name, True, rounding, 0.0
        self.requests: list[GenerateRequest] = []
        self.problem: Any = None
        self.window: int | None = None

    async def call(self, method: Callable[..., Any]) -> int | None:
        return self.window

    async def stream(self, method: Any, requests: list[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        self.requests += requests
        if self.problem is not None:
            await self.problem()
        request, num = requests[0], requests[0].sampling.max_tokens
        found_N = (logprobs(self.version) - self.rounding)[:num]
        ids_N = np.arange(num, dtype=np.int32)
        yield Completion(request.id, 0, ids_N, found_N, FinishReason.LENGTH, int(self.version))


class Hands:
    """Hands versions over to replicas that follow except for what a test says of them."""

    def __init__(self, *replicas: Replica, **rollout: Any) -> None:
        self.actor, self.replicas = Actor(), replicas
        self.listeners = list[Callable[[ReplicaEvent], None]]()
        group: Any = SimpleNamespace(replicas=replicas, on_event=self.listeners.append)
        actor: Any = self.actor
        self.rows = list[int]()
        self.check = WeightsCheck(actor, group, ByteTokens(), RolloutConfig(**rollout))

    def over(self, version: int, *stale: Replica, moved: float | None = None) -> None:
        """All but the `stale` replicas take the version."""
        self.actor.version = float(version) if moved is None else moved
        for replica in self.replicas:
            replica.version = replica.version if replica in stale else self.actor.version
        asyncio.run(self._checked(version))

    async def _checked(self, version: int) -> None:
        await self.check.sample(version)
        assert not self.actor.rows or self.actor.rows == self.rows, "the actor computes when the devices are its own"
        await self.check.confirm()
        self.rows = list(self.actor.rows)
        await self.check.confirm()
        assert self.actor.rows == self.rows, "once per version"


@pytest.mark.parametrize("rounding", [0.0, ROUNDING])
def test_all_replicas_sample_with_the_first_two_versions_and_every_few_and_one_in_turn_with_the_others(
    rounding: float,
) -> None:
    replicas = Replica(rounding=rounding), Replica("rollout[1]", rounding)
    hands = Hands(*replicas, check_weights_every=5, temperature=0.7)
    versions: tuple[list[int], list[int]] = [], []
    for version in range(3, 21):
        before = [len(replica.requests) for replica in replicas]
        hands.over(version)
        for own, replica, num in zip(versions, replicas, before, strict=True):
            own += [version] * (len(replica.requests) - num)
    assert versions[0] == [3, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20]
    assert versions[1] == [3, 4, 5, 7, 9, 10, 11, 13, 15, 17, 19, 20]
    assert set(hands.actor.rows) == {1}, "always one row: the same weights give the same numbers"
    request = replicas[0].requests[0]
    assert (request.sampling.temperature, request.sampling.top_p, request.n) == (0.7, 1.0, 1)


def test_one_that_was_restarted_is_asked_at_the_next_version_also_if_another_is_too_busy_to_be_asked() -> None:
    steady, restarted = Replica(), Replica("rollout[1]")
    hands = Hands(steady, restarted, check_weights_every=100)
    hands.over(1)
    hands.over(2)
    for kind in ("lost", "restored"):
        hands.listeners[0](ReplicaEvent(kind, 1, restarted.name))
    hands.check._one_is_busy = True
    before = len(steady.requests), len(restarted.requests)
    hands.over(4)
    assert (len(steady.requests), len(restarted.requests)) == (before[0], before[1] + 1)
    hands.over(5)
    assert len(restarted.requests) == before[1] + 1, "once"
    hands.listeners[0](ReplicaEvent("restored", 1, restarted.name))
    with pytest.raises(WorkerError, match=r"rollout\[1\]: log-probs of a fixed sentence"):
        hands.over(6, restarted, moved=6000.0)


def test_one_that_takes_no_weights_is_found_below_the_rounding_of_its_format() -> None:
    steady, stale = Replica(rounding=ROUNDING), Replica("rollout[1]", ROUNDING)
    hands = Hands(steady, stale)
    hands.over(1, stale)
    with pytest.raises(WorkerError) as caught:
        hands.over(2, stale)
    assert str(caught.value).startswith(
        "rollout[1]: log-probs of a fixed sentence are the same with version 2 of the weights as with version 1, while "
        f"the actor's moved by {STEP:.3g} per token; it does not follow the actor: "
    )
    assert (caught.value.role, caught.value.method) == ("rollout", "load_weights")


def test_replicas_that_all_stop_following_are_found_at_the_next_version() -> None:
    replicas = Replica(rounding=ROUNDING), Replica("rollout[1]", ROUNDING), Replica("rollout[2]", ROUNDING)
    hands = Hands(*replicas)
    for version in range(1, 7):
        hands.over(version)
    hands.over(7, replicas[0])
    hands.over(8, *replicas)
    with pytest.raises(WorkerError, match=r"^rollout\[0\]: log-probs of a fixed sentence are the same with version 9 "):
        hands.over(9, *replicas)


def test_after_one_that_is_busy_none_is_asked_in_turn_until_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_check, "ANSWER_S", 0.01)
    replica = Replica()
    hands = Hands(replica, check_weights_every=8)
    for version in (1, 2, 3):
        hands.over(version)
    replica.problem = lambda: asyncio.sleep(60)
    hands.over(4)
    replica.problem = None
    for version in (5, 6, 7):
        hands.over(version)
    assert len(replica.requests) == 4
    for version in (8, 9):
        hands.over(version)
    assert len(replica.requests) == 6


def test_an_actor_that_stands_still_asks_no_replica_to_move() -> None:
    replica = Replica(rounding=ROUNDING)
    hands = Hands(replica, check_weights_every=1)
    for version in range(1, 5):
        hands.over(version, moved=1.0)  # all updates were skipped
    assert len(replica.requests) == 4, "it was compared at every version"


@pytest.mark.parametrize(
    ("rounding", "first", "later", "bound"),
    [
        (0.0, 0.3, None, "0.25"),  # at once: no format of numbers differs by so much
        (0.0, 0.0, 0.02, "0.01"),  # both engines agree to the last digits, so a small difference is one of weights
        (ROUNDING, 0.0, 0.3, "0.25"),
    ],
)
def test_one_that_takes_other_weights_is_found_by_the_difference(
    rounding: float, first: float, later: float | None, bound: str
) -> None:
    replica = Replica(rounding=rounding + first)
    hands = Hands(replica)
    if later is not None:
        hands.over(1)
        replica.rounding = rounding + later
    with pytest.raises(WorkerError, match="differ from the actor's by ") as caught:
        hands.over(2)
    assert f"version 2 of the weights, where at most {bound} is expected; it samples with other weights" in str(
        caught.value
    )


def test_the_bound_follows_the_one_that_warns() -> None:
    Hands(Replica(rounding=0.3), warn_logprob_diff=0.1).over(1)
    with pytest.raises(WorkerError, match=r"at most 0\.05 is expected"):
        Hands(Replica(rounding=0.3), warn_logprob_diff=0.01).over(1)


def test_nothing_is_asked_where_the_check_is_off() -> None:
    replica = Replica(rounding=9.0)
    hands = Hands(replica, check_weights_every=0)
    for version in range(1, 40):
        hands.over(version, replica)
    assert replica.requests == []
    assert hands.actor.rows == []


def test_one_that_is_being_restarted_and_one_that_is_busy_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_check, "ANSWER_S", 0.01)
    dead, busy, third = Replica(), Replica("rollout[1]"), Replica("rollout[2]", rounding=0.3)

    async def die() -> None:
        dead.alive = False
        raise WorkerError("rollout[0]: it is gone")

    dead.problem, busy.problem = die, lambda: asyncio.sleep(60)
    with caplog.at_level(logging.WARNING), pytest.raises(WorkerError, match=r"^rollout\[2\]"):
        Hands(dead, busy, third).over(1)
    assert "rollout[0]: it is gone; version 1 of the weights is not checked there" in caplog.text
    assert "rollout[1]: version 1 of the weights is not checked: no token in 0.01 s" in caplog.text


def test_a_lost_replica_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    """A node may be away for hours: a line per step about it would hide all others."""
    lost, second = Replica(), Replica("rollout[1]")
    lost.alive = False
    hands = Hands(lost, second)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2, 3, 4):
            hands.over(version)
    assert lost.requests == []
    assert second.requests
    assert caplog.text == ""


def test_an_error_of_one_that_lives_is_raised() -> None:
    replica = Replica()

    async def fail() -> None:
        raise WorkerError("rollout[0]: out of order")

    replica.problem = fail
    with pytest.raises(WorkerError, match="out of order"):
        Hands(replica).over(1)


def test_an_answer_that_is_none_is_an_error_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica()

    async def nothing(method: Any, requests: Any) -> AsyncGenerator[Completion, None]:
        for _ in ():
            yield _

    monkeypatch.setattr(replica, "stream", nothing)
    with pytest.raises(WorkerError, match=r"rollout\[0\]\.generate\(\) yielded 0 completions") as caught:
        Hands(replica).over(1)
    assert caught.value.method == "generate"


def test_a_short_window_and_short_responses_are_kept_to() -> None:
    replica = Replica()
    replica.window = 12
    Hands(replica, max_tokens=4).over(1)
    request = replica.requests[0]
    assert (len(request.token_ids), request.sampling.max_tokens) == (8, 4)
