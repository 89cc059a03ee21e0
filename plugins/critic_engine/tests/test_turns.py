"""A critic frees its allocator's cache after each turn on a device that it shares with the actor."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rlcore_critic_engine.worker import HfCritic

from rlcore.engines import freed_memory
from rlcore.testing.tiny import random_batch


class Engine:
    """A training engine that computes nothing."""

    model = SimpleNamespace(context_length=None)

    def values(self, batch: Any) -> Any:
        return np.zeros(batch.tokens.token_ids_BT.shape, np.float32)

    def update(self, batch: Any) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("shares", [True, False])
def test_a_cache_is_freed_after_values_and_updates(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    freed: list[str] = []
    monkeypatch.setattr(freed_memory, "yield_device", freed.append)
    context: Any = SimpleNamespace(shares_device=shares, device="cuda:0")
    critic, batch = HfCritic(context), random_batch(seed=1)
    engine: Any = Engine()
    critic.engine = engine
    critic.values(batch)
    critic.update(batch)
    assert freed == (["cuda:0"] * 2 if shares else [])
