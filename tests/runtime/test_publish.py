"""The version of new weights is known before an embedded rollout may sample with them."""

import asyncio
from types import SimpleNamespace
from typing import Any

from rlcore.contracts.actor import ActorWorker
from rlcore.runtime.sampling_workers import Sampler


def test_the_version_is_known_when_the_actor_publishes_it() -> None:
    sampler = SimpleNamespace(generator=SimpleNamespace(newest_version=2))
    events: list[Any] = []

    async def call(method: Any, version: int) -> None:
        events.append((method, version, sampler.generator.newest_version))

    async def sync_weights(version: int) -> None:
        events.append(version)

    sampler.actor = SimpleNamespace(replicas=[SimpleNamespace(call=call)])
    sampler.sync_weights = sync_weights
    asyncio.run(Sampler.publish(sampler, 3))  # type: ignore[arg-type]
    assert events == [(ActorWorker.publish, 3, 3), 3]
