"""Addresses and replicas that failed and get no calls for a while are named in the log."""

import asyncio
import time

import pytest
from rlcore_reward_loop.client.router import Router


def test_a_target_that_is_left_alone_is_named_in_the_log_with_the_reason_at_most_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        router = Router(["a", "b"], eject_after=2, pause_s=600)
        for _ in range(3):  # it returns in between
            for voice in ("one", "another"):
                router.failed(*(await router.take(time.monotonic() + 1, avoid=router.targets[1])), "died", voice)
            router.targets[0].ejected_until = time.monotonic()
            router.succeeded(*(await router.take(time.monotonic() + 1, avoid=router.targets[1])))
        assert router.num_ejections == 3

    with caplog.at_level("WARNING"):
        asyncio.run(run())
    assert caplog.messages == ["a is left alone (died); 1 of 2 in use"]
