"""Fixtures of this plugin's tests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rlcore_reward_loop import build
from rlcore_reward_loop.settings import RewardLoopSettings, RewardSettings, ServiceSettings

from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardFunctionConfig
from rlcore.testing import write_prompts
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.testing.service import ServiceAnswer, ServiceCall
from rlcore.types import Lane, Metrics, ScoredTrajectory, Trajectory

Score = Callable[..., tuple[list[ScoredTrajectory], Metrics]]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with leaks():
        yield


@pytest.fixture
def samples() -> Callable[[int], list[Trajectory]]:
    """So many samples, four of each prompt, each with a different text."""
    return lambda number: [make_trajectory(index // 4, index % 4, text=f"response {index}") for index in range(number)]


@pytest.fixture
def echo() -> Callable[[ServiceCall], ServiceAnswer]:
    """A script that scores the number at the end of the completion."""

    def script(call: ServiceCall) -> ServiceAnswer:
        return ServiceAnswer({"score": float(call.json()["completion"].split()[-1])})

    return script


@pytest.fixture
def one_service() -> Callable[..., RewardLoopSettings]:
    """Settings of one reward, 'helpful', by one service at these addresses."""

    def settings(*urls: str, **service: object) -> RewardLoopSettings:
        return RewardLoopSettings(
            rewards={"helpful": RewardSettings(served_by="scorer")},
            services={"scorer": ServiceSettings(urls=urls, **service)},  # type: ignore[arg-type]
        )

    return settings


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The configuration of two steps of the null model below `tmp_path`, with these settings of the plugin."""

    def config(**plugin: Any) -> dict[str, Any]:
        prompts = write_prompts(tmp_path / "prompts.jsonl", 8)
        return {
            "model": {"path": "", "tokenizer": "bytes"},
            "data": {"sources": {"train": {"path": str(prompts)}}},
            "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
            "actor": {"backend": "null"},
            "train": {"prompts_per_step": 2, "max_steps": 2, "dir": str(tmp_path), "name": "run"},
            "plugins": {"null": {}, "reward_loop": plugin},
        }

    return config


@pytest.fixture
def score(tmp_path: Path) -> Score:
    """Run samples through a manager with these settings; (what came back, the manager's metrics)."""

    def run(
        settings: RewardLoopSettings,
        trajectories: Sequence[Trajectory],
        functions: dict[str, RewardFunctionConfig] | None = None,
        lane: Lane = Lane.EVAL,
    ) -> tuple[list[ScoredTrajectory], Metrics]:
        async def all_of_it() -> tuple[list[ScoredTrajectory], Metrics]:
            children = ChildProcesses()
            manager = build(reward_context(functions or {}, tmp_path, children, section=settings))
            try:
                await manager.start()
                # An evaluation spends no error budget.
                return await score_all(manager, trajectories, lane), manager.metrics()
            finally:
                await manager.close()
                await children.close()

        return asyncio.run(all_of_it())

    return run
