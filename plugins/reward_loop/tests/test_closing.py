"""The end of a reward manager: its parts close at once, and one that fails keeps no other from it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop import build
from rlcore_reward_loop.client.service import Service
from rlcore_reward_loop.expose import Exposure
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardFunctionConfig
from rlcore.reward.functions import FunctionRewards
from rlcore.testing.rewards import reward_context

ASYNC_REWARD = """
async def fair(completions, **columns):
    return [1.0] * len(completions)
"""
Closing = Callable[..., Any]


def close_all(tmp_path: Path) -> None:
    """Start and close a manager with a function, two services and the endpoint for functions."""
    (tmp_path / "fair.py").write_text(ASYNC_REWARD)
    settings = RewardLoopSettings(
        rewards={name: RewardSettings(served_by=name) for name in ("first", "second")},
        services={name: ServiceSettings(urls=("http://127.0.0.1:9/x",)) for name in ("first", "second")},
        expose=True,
    )
    functions = {"fair": RewardFunctionConfig(f"{tmp_path / 'fair.py'}:fair")}

    async def story() -> None:
        children = ChildProcesses()
        manager = build(reward_context(functions, tmp_path, children, section=settings))
        await manager.start()
        try:
            async with asyncio.timeout(30):
                await manager.close()
        finally:
            await children.close()

    asyncio.run(story())


def wrapped(monkeypatch: pytest.MonkeyPatch, before: Closing) -> list[str]:
    """Await `before` in each part's close(); the list gets the class of each that was closed."""
    closed = list[str]()
    for kind in (FunctionRewards, Service, Exposure):

        def wrap(really: Closing = kind.close) -> Closing:
            async def close(self: Any) -> None:
                try:
                    await before(self)
                finally:
                    await really(self)
                    closed.append(type(self).__name__)

            return close

        monkeypatch.setattr(kind, "close", wrap())
    return closed


@pytest.mark.slow
def test_parts_close_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits here until all four are at it."""
    waiting, all_of_them = list[Any](), asyncio.Event()

    async def meet(part: Any) -> None:
        waiting.append(part)
        if len(waiting) == 4:
            all_of_them.set()
        await all_of_them.wait()

    closed = wrapped(monkeypatch, meet)
    close_all(tmp_path)
    assert sorted(closed) == ["Exposure", "FunctionRewards", "Service", "Service"]


@pytest.mark.slow
def test_a_part_that_fails_keeps_no_other_from_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(part: Any) -> None:
        await asyncio.sleep(0)
        if isinstance(part, FunctionRewards):
            raise ValueError("no")
        await asyncio.sleep(0.01)

    closed = wrapped(monkeypatch, fail)
    with pytest.raises(ValueError, match="no"):
        close_all(tmp_path)
    assert sorted(closed) == ["Exposure", "FunctionRewards", "Service", "Service"]
