"""The fault scorecard for reward functions: cases 11 to 14, 17 to 19 and 21, against the core's own manager."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from rlcore.algo.advantage import AdvantageInputs, grpo
from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardConfig, RewardFunctionConfig, RolloutConfig, RunConfig, TrainConfig
from rlcore.data.batch import collate
from rlcore.errors import RewardError
from rlcore.reward.functions import FunctionRewards, build_function_rewards
from rlcore.reward.policy import Budget, apply_failures
from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.rewards import make_trajectory, reward_context, score_all
from rlcore.types import Metrics, RewardStatus, ScoredTrajectory, Trajectory

pytestmark = pytest.mark.fault

# What the function does is written in the completion, and what it is to score behind it.
REWARDS = """
import asyncio, os, re, signal, sys, time

def act(what):
    if what == "raise": raise ValueError("no")
    if what == "hang":
        while True: pass
    if what == "sleep": time.sleep(3600)
    if what == "regex": re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "exit": sys.exit(1)
    if what == "die": os._exit(9)
    if what == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "memory": return b"x" * (1 << 28)
    if what == "flood":
        for _ in range(200_000): print("flood " * 10)
    if what == "fork":
        if os.fork() == 0: time.sleep(3600)
    if what == "close":
        os.closerange(3, 100)
    if what == "none": return None
    if what == "nan": return float("nan")
    if what == "inf": return float("-inf")
    if what == "prose": return "I would give this response a 9 out of 10."
    if what == "empty": return ""
    if what == "generator": return (x for x in [1.0])
    if what == "complex": return 1j
    if what == "list": return [1.0]
    return "go on"

def faulty(trajectory):
    what, score = trajectory.text().split()
    value = act(what)
    return float(score) if value == "go on" else value

def blocking(trajectory):
    what, score = trajectory.text().split()
    time.sleep(1.2)
    act(what)
    return float(score)

async def polite(trajectory):
    what, score = trajectory.text().split()
    if what == "sleep":
        await asyncio.sleep(3600)
    return float(score)
"""
GOOD, FLOOD = "good", "flood"
FAILING = {
    "raise": "ValueError: no",
    "hang": "no result within",
    "sleep": "no result within",
    "regex": "no result within",
    "exit": "it called sys.exit(1)",
    "die": "exit code 9",
    "segfault": "killed by signal 11",
    "memory": "a bytes",
    "close": "ended",
    "none": "returned None",
    "nan": "returned nan",
    "inf": "returned -inf",
    "prose": "returned str 'I would give",
    "empty": "returned str ''",
    "generator": "returned a generator",
    "complex": "returned complex 1j",
    "list": "returned list [1.0]",
}
CONFIG = RunConfig(rollout=RolloutConfig(samples_per_prompt=8), train=TrainConfig(prompts_per_step=8))


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


def sample(index: int, what: str) -> Trajectory:
    """Sample `index` of a step of eight prompts with eight samples; its right score is its index."""
    return make_trajectory(index // 8, index % 8, f"{what} {index}")


def run(
    functions: dict[str, RewardFunctionConfig], *rounds: Sequence[Trajectory], budget: float = 1.0
) -> tuple[list[list[ScoredTrajectory]], Metrics]:
    """Each round scored by one manager, and the manager's metrics."""

    async def main() -> tuple[list[list[ScoredTrajectory]], Metrics]:
        children = ChildProcesses()
        reward = RewardConfig(error_budget_frac=budget)
        manager: FunctionRewards = build_function_rewards(
            reward_context(functions, Path("unused"), children, reward, CONFIG)
        )
        try:
            await manager.start()
            return [await score_all(manager, round_) for round_ in rounds], manager.metrics()
        finally:
            await manager.close()
            await children.close()

    return asyncio.run(main())


def check(scored: Sequence[ScoredTrajectory], trajectories: Sequence[Trajectory]) -> None:
    """Each trajectory once; its own score if its function could give one, else a failure with the right cause."""
    assert sorted(sample.trajectory.id for sample in scored) == sorted(trajectory.id for trajectory in trajectories)
    for sample in scored:
        what, score = sample.trajectory.text().split()
        if what in FAILING:
            assert sample.reward.status is RewardStatus.FAILED, what
            assert FAILING[what] in sample.reward.info["error"], what
            assert sample.reward.score == 0.0
        else:
            assert sample.reward.status is RewardStatus.OK, sample.reward.info
            assert sample.reward.score == float(score)


def test_11_a_function_that_raises_for_one_of_64_changes_no_other_advantage(rewards: str) -> None:
    step = [sample(index, "raise" if index == 13 else GOOD) for index in range(64)]
    functions = {"f": RewardFunctionConfig(f"{rewards}:faulty")}
    ([scored], _) = run(functions, step, budget=0.1)
    check(scored, step)
    groups = [sorted(value, key=lambda row: row.trajectory.id) for value in by_prompt(scored)]
    config = RewardConfig(functions=functions)
    kept, counts = apply_failures(groups, config, Budget(0, config))
    without = [[row for row in group if row.reward.status is RewardStatus.OK] for group in groups]
    assert counts["reward/dropped_samples"] == 1.0
    assert sum(map(len, kept)) == 63
    assert torch.equal(advantages(kept), advantages(without))


def by_prompt(scored: Sequence[ScoredTrajectory]) -> list[list[ScoredTrajectory]]:
    prompts = sorted({sample.trajectory.id.prompt for sample in scored})
    return [[sample for sample in scored if sample.trajectory.id.prompt == prompt] for prompt in prompts]


def advantages(groups: list[list[ScoredTrajectory]]) -> torch.Tensor:
    batch = collate(groups, 0)
    arrays = (batch.rewards_B, batch.group_B, batch.sample_B, batch.num_sampled_B)
    return grpo(AdvantageInputs(*(torch.from_numpy(array.copy()) for array in arrays)))


@pytest.mark.parametrize("what", sorted(FAILING))
def test_12_13_14_21_whatever_a_function_does_fails_its_own_sample_and_the_pool_is_restored(
    rewards: str, what: str
) -> None:
    first = [sample(index, what if index in (3, 4) else GOOD) for index in range(16)]
    second = [sample(index, GOOD) for index in range(16, 32)]
    deadline_s = 1.0 if what in ("hang", "sleep", "regex") else 20.0
    functions = {"f": RewardFunctionConfig(f"{rewards}:faulty", deadline_s=deadline_s)}
    (rounds, metrics) = run(functions, first, second)
    check(rounds[0], first)
    check(rounds[1], second)
    killed = what in ("hang", "sleep", "regex", "die", "segfault", "close")
    assert (metrics["reward/num_restarts"] > 0) == killed


@pytest.mark.parametrize("what", ["hang", "sleep", "regex"])
def test_on_threads_a_hanging_call_fails_and_the_innocent_ones_are_made_again(rewards: str, what: str) -> None:
    step = [sample(index, what if index == 7 else GOOD) for index in range(64)]
    functions = {
        "f": RewardFunctionConfig(f"{rewards}:blocking", isolation="threads", threads=16, children=2, deadline_s=2.0)
    }
    ([scored], metrics) = run(functions, step)
    assert sorted(sample.trajectory.id for sample in scored) == sorted(trajectory.id for trajectory in step)
    if what == "regex":
        # It keeps the interpreter lock, so concurrent calls in its child also time out; the other child's do not.
        failed = [sample for sample in scored if sample.reward.status is RewardStatus.FAILED]
        assert 1 <= len(failed) <= 16
    else:
        check(scored, step)
    assert metrics["reward/num_restarts"] >= 1.0, "the second half of the step was in flight when the child was killed"


def test_a_process_that_a_function_forked_ends_with_its_child(rewards: str) -> None:
    step, before = [sample(0, "fork"), sample(1, GOOD)], descendants(os.getpid())
    ([scored], _) = run({"f": RewardFunctionConfig(f"{rewards}:faulty")}, step)
    check(scored, step)
    assert descendants(os.getpid()) <= before


def test_a_function_that_prints_without_end_neither_blocks_nor_fills_the_log(
    rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = [sample(index, FLOOD) for index in range(2)]
    with caplog.at_level("INFO", logger="rlcore"):
        ([scored], _) = run({"f": RewardFunctionConfig(f"{rewards}:faulty", children=1)}, step)
    check(scored, step)
    assert len(caplog.messages) < 11_000
    assert any("the rest is dropped" in message for message in caplog.messages)


def test_300_samples_with_random_faults_are_each_accounted_for_once(rewards: str) -> None:
    generator = random.Random(7)
    quick = sorted(FAILING.keys() - {"hang", "sleep", "regex", "memory"})
    step = [
        make_trajectory(index // 8, index % 8, f"{generator.choice([GOOD] * 30 + quick)} {index}")
        for index in range(300)
    ]
    functions = {"f": RewardFunctionConfig(f"{rewards}:faulty", deadline_s=20.0)}
    ([scored], _) = run(functions, step)
    check(scored, step)


def test_a_dead_service_stops_the_run_at_the_budget_and_not_after_every_deadline(rewards: str) -> None:
    step = [sample(index, "sleep") for index in range(64)]
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"7 of 64 samples failed.*f: no result within 1 s \(x7\)"):
        run({"f": RewardFunctionConfig(f"{rewards}:polite", deadline_s=1.0)}, step, budget=0.1)
    assert time.monotonic() - began < 20.0
    with pytest.raises(RewardError, match=r"7 of 64 samples failed.*f: no result within 1 s"):
        run({"f": RewardFunctionConfig(f"{rewards}:faulty", deadline_s=1.0)}, step, budget=0.1)
    assert time.monotonic() - began < 60.0, "64 deadlines on two children take 32 s for each function"


DRIVER = """
import asyncio, sys
from pathlib import Path
from rlcore.cluster.child import ChildProcesses
from rlcore.config import RewardFunctionConfig
from rlcore.reward.functions import build_function_rewards
from rlcore.testing.rewards import make_trajectory, reward_context, score_all

async def main():
    children = ChildProcesses()
    functions = {"f": RewardFunctionConfig(sys.argv[1] + ":faulty", deadline_s=60.0)}
    manager = build_function_rewards(reward_context(functions, Path("unused"), children))
    await manager.start()
    print(*children.pids, flush=True)
    await score_all(manager, [make_trajectory(0, index, f"{sys.argv[2]} {index}") for index in range(4)])

asyncio.run(main())
"""


@pytest.mark.parametrize("what", ["hang", "sleep", "regex"])
def test_35_no_reward_child_survives_a_driver_that_was_killed(rewards: str, what: str) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, rewards, what], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver.stdout:
        pids = [int(word) for word in driver.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    patience = time.monotonic() + 3.0
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < patience:
        time.sleep(0.02)
    assert left == []
