"""The core's reward manager runs functions: children, deadlines, the loop, threads, and its contract."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardFunctionConfig
from rlcore.errors import PluginError
from rlcore.reward.functions import FunctionRewards, build_function_rewards
from rlcore.testing.rewards import make_trajectory, reward_context, score_all, score_rewards, use_rewards
from rlcore.types import Lane, Reward, RewardStatus, ScoredTrajectory, Trajectory

function = partial(RewardFunctionConfig, children=1)
"""A reward function in one child, unless a test says more: each takes a fifth of a second to start."""


@pytest.fixture
def rewards() -> str:
    """Path of a file with reward functions."""
    return str(Path(__file__).parent.parent / "scorers" / "scorers.py")


def one(rewards: str, name: str, trajectory: Trajectory | None = None, **settings: Any) -> Reward:
    """The reward that one function gives one trajectory."""
    [reward] = score_rewards(
        {"f": function(f"{rewards}:{name}", **settings)}, [trajectory or make_trajectory()]
    ).values()
    return reward


@pytest.mark.fault
def test_in_any_order_of_completion_each_sample_gets_its_own_reward(rewards: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import asyncio, random\n"
        "async def own(trajectory):\n"
        "    await asyncio.sleep(random.random() / 100)\n"
        "    return int(trajectory.token_ids[-1]) + 1000 * trajectory.id.sample\n"
    )
    generator = random.Random(0)
    trajectories = [
        make_trajectory(prompt, sample, chr(97 + generator.randrange(26)) * generator.randrange(1, 9))
        for prompt in range(125)
        for sample in range(8)
    ]
    generator.shuffle(trajectories)
    functions = {
        "slow": function(f"{tmp_path / 'own.py'}:own", children=2),
        "fast": function(f"{rewards}:last_token", isolation="threads", threads=8, children=2),
    }
    found = score_rewards(functions, trajectories)
    assert len(found) == 1000
    for trajectory in trajectories:
        wanted = int(trajectory.token_ids[-1]) + 1000 * trajectory.id.sample
        reward = found[trajectory.id.prompt, trajectory.id.sample, 0]
        assert dict(reward.components) == {"slow": wanted, "fast": wanted}


@pytest.mark.fault
def test_a_sync_function_past_its_deadline_fails_alone_and_the_pool_is_whole_again(
    rewards: str, tmp_path: Path
) -> None:
    (tmp_path / "hang.py").write_text(
        "def hang(trajectory):\n    while 'hang' in trajectory.text():\n        pass\n    return 1.0\n"
    )
    trajectories = [make_trajectory(0, sample, "hang" if sample == 0 else "fine") for sample in range(8)]
    functions = {"f": function(f"{tmp_path / 'hang.py'}:hang", deadline_s=1.0, children=1)}

    async def use(manager: FunctionRewards) -> tuple[list[ScoredTrajectory], dict[str, float], list[ScoredTrajectory]]:
        return await score_all(manager, trajectories), manager.metrics(), await score_all(manager, trajectories[1:])

    first, metrics, second = use_rewards(functions, use)
    failures = {
        sample.trajectory.id.sample: sample.reward.info["error"] for sample in first if sample.reward.score != 1.0
    }
    assert failures == {0: "f: no result within 1 s"}
    assert metrics["reward/num_restarts"] == 1.0
    assert [sample.reward.score for sample in second] == [1.0] * 7


@pytest.mark.fault
def test_the_deadline_of_a_sample_does_not_run_while_it_waits_for_a_child(rewards: str) -> None:
    trajectories = [make_trajectory(0, sample) for sample in range(8)]
    functions = {"f": function(f"{rewards}:slow", deadline_s=0.9, children=1, kwargs={"seconds": 0.2})}
    found = score_rewards(functions, trajectories)
    assert {value.status for value in found.values()} == {RewardStatus.OK}


@pytest.mark.slow
def test_a_reward_child_imports_nothing_heavy_of_ours(rewards: str) -> None:
    assert one(rewards, "imported").info["heavy"] == []


@pytest.mark.fault
def test_a_start_that_fails_leaves_no_child_whichever_function_is_to_blame(rewards: str) -> None:
    functions = {
        "good": function(f"{rewards}:length", children=3),
        "bad": function(f"{rewards}:two_arguments"),
        "async": function(f"{rewards}:async_slow"),
    }
    with pytest.raises(PluginError, match="reward function 'bad'"):
        use_rewards(functions, lambda manager: score_all(manager, [make_trajectory()]))


@pytest.mark.slow
def test_a_manager_that_is_closed_has_ended_its_children(rewards: str, tmp_path: Path) -> None:
    async def main() -> tuple[int, int]:
        children = ChildProcesses()
        functions = {"f": function(f"{rewards}:length", children=1)}
        manager = build_function_rewards(reward_context(functions, tmp_path, children))
        try:
            await manager.start()
            before = len(children.pids)
            await manager.close()
            return before, len(children.pids)
        finally:
            await children.close()

    assert asyncio.run(main()) == (1, 0)


@pytest.mark.slow
def test_signal_alarm_works_in_a_sync_function(rewards: str) -> None:
    assert one(rewards, "with_alarm").score == 0.25


@pytest.mark.slow
def test_an_async_function_that_fails_or_never_ends_fails_its_sample(rewards: str) -> None:
    assert re.fullmatch(r"f: \S*scorers\.py:\d+: KeyError: 'gone' .*", one(rewards, "async_raises").info["error"])
    assert (
        one(rewards, "async_slow", kwargs={"seconds": 60}, deadline_s=0.2).info["error"] == "f: no result within 0.2 s"
    )
    assert one(rewards, "async_deaf", deadline_s=0.2).info["error"] == "f: no result within 0.2 s"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "error"), [("async_panics", "Panic: lost"), ("async_unsayable", "Unsayable: <exc")])
def test_an_async_function_fails_its_sample_whatever_it_raises(rewards: str, name: str, error: str) -> None:
    assert error in one(rewards, name).info["error"]


@pytest.mark.fault
def test_an_async_function_that_blocks_the_loop_is_warned_of_by_name_and_others_finish(
    rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    functions = {
        "stopper": function(f"{rewards}:blocks"),
        "good": function(f"{rewards}:async_slow", kwargs={"seconds": 0.01}),
    }

    async def use(manager: FunctionRewards) -> tuple[list[ScoredTrajectory], dict[str, float]]:
        return await score_all(manager, [make_trajectory()]), manager.metrics()

    [scored], metrics = use_rewards(functions, use)
    assert scored.reward.status is RewardStatus.OK
    warnings = [message for message in caplog.messages if "event loop" in message]
    assert len(warnings) == 1
    assert "async reward function 'stopper'" in warnings[0]
    assert "scorers.py:" in warnings[0], "says where it is"
    assert 0.7 < metrics["time/loop_blocked_s"] < 10


@pytest.mark.fault
def test_retry_asks_again_within_the_deadline(rewards: str, tmp_path: Path) -> None:
    settings = {"on_failure": "retry", "kwargs": {"marker": str(tmp_path / "marker")}}
    assert one(rewards, "flaky", **settings, tries=3).score == 1.0
    (tmp_path / "marker").unlink()
    error = one(rewards, "flaky", **settings, tries=2).info["error"]
    assert re.fullmatch(r"f: \S*scorers\.py:\d+: ConnectionError: come back later", error)
    (tmp_path / "marker").unlink()
    reward = one(rewards, "flaky", **settings, tries=100, deadline_s=0.01)
    assert reward.status is RewardStatus.FAILED
    assert int((tmp_path / "marker").read_text()) < 5


@pytest.mark.fault
def test_service_bound_says_when_calls_wait_for_children(rewards: str) -> None:
    async def use(manager: FunctionRewards) -> list[float]:
        found = []
        for num in (1, 10):
            await score_all(manager, [make_trajectory(0, sample) for sample in range(num)])
            found.append(manager.metrics()["time/service_bound"])
        return found

    functions = {"f": function(f"{rewards}:slow", children=1, kwargs={"seconds": 0.1})}
    assert use_rewards(functions, use) == [0.0, 1.0]


@pytest.mark.slow
def test_evaluation_goes_ahead_of_training(rewards: str) -> None:
    async def use(manager: FunctionRewards) -> list[str]:
        order: list[str] = []

        async def lane(name: Lane, num: int) -> None:
            async with aclosing(  # type: ignore[type-var]
                manager.score(stream(num), name)
            ) as results:
                async for _ in results:
                    order.append(name.value)

        async def stream(num: int) -> AsyncIterator[Trajectory]:
            for sample in range(num):
                yield make_trajectory(0, sample)

        training = asyncio.create_task(lane(Lane.TRAIN, 10))
        await asyncio.sleep(0.05)
        await lane(Lane.EVAL, 3)
        await training
        return order

    functions = {"f": function(f"{rewards}:slow", children=1, kwargs={"seconds": 0.05})}
    order = use_rewards(functions, use)
    assert len(order) == 13
    assert max(index for index, name in enumerate(order) if name == "eval") <= 6, order


@pytest.mark.fault
def test_blocking_calls_run_at_the_same_time_on_threads(rewards: str) -> None:
    functions = {"f": function(f"{rewards}:slow", isolation="threads", threads=256, kwargs={"seconds": 1.0})}

    async def use(manager: FunctionRewards) -> float:
        began = time.monotonic()
        scored = await score_all(
            manager, [make_trajectory(prompt, sample) for prompt in range(64) for sample in range(8)]
        )
        assert {sample.reward.status for sample in scored} == {RewardStatus.OK}
        assert len(scored) == 512
        return time.monotonic() - began

    took = use_rewards(functions, use)
    print(f"512 calls of one second on 2 x 256 threads: {took:.2f} s")
    assert took < 20, "one after the other they take 512 s"
