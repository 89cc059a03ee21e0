"""Data from plugins is checked on arrival and refused in one line that names them."""

import asyncio
import pickle
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rlcore.contracts.agents import RolloutTask
from rlcore.errors import PluginError
from rlcore.runtime.checked_components import CheckedAgent, CheckedRewards
from rlcore.types import (
    FinishReason,
    FrozenDict,
    Lane,
    Prompt,
    Reward,
    RewardStatus,
    Sampling,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

NAN, INF = float("nan"), float("inf")


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def prompt(name: str) -> Prompt:
    return Prompt(name, ({"role": "user", "content": name},), None, "test")


def row(name: str = "p", sample: int = 0, part: int = 0, **more: Any) -> Trajectory:
    made = Trajectory(
        id=TrajectoryId(name, 0, sample, part),
        prompt=prompt(name),
        token_ids=ids(1, 2, 3),
        loss_mask=np.array([False, True, True]),
        logprobs=floats(0, -1, -1),
        completion="x",
        finish=FinishReason.STOP,
        versions=((1, 0),),
    )
    made.__dict__.update(more)
    return made


TASKS = [RolloutTask(prompt("p"), 0, 2, 0), RolloutTask(prompt("q"), 0, 1, 0)]
ALL = [row("q"), row("p", 1), row("p", 0)]


ENDS = (KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), BaseExceptionGroup("x", [SystemExit(0)]))


class Agent:
    """Yields its items; raises those that are exceptions."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.numbers: Any = {"agent/x": np.float32(1)}

    async def rollout(self, tasks: Any, sampling: Sampling, lane: Lane) -> Any:
        for value in self.items:
            if isinstance(value, BaseException):
                raise value
            yield value

    def metrics(self) -> Any:
        return self.numbers


async def _rolled(agent: Any) -> list[Trajectory]:
    checked = CheckedAgent(agent, "agent 'a' of plugin 'x'")
    async with aclosing(checked.rollout(TASKS, Sampling(), Lane.TRAIN)) as rows:
        return [row async for row in rows]


def test_trajectories_of_every_task_pass_in_any_order_with_parts_of_samples() -> None:
    two = [row("p", 1, 0, num_segments=2), row("p", 1, 1, num_segments=2)]
    assert asyncio.run(_rolled(Agent(*ALL))) == ALL
    assert len(asyncio.run(_rolled(Agent(*two, row("p", 0), row("q"))))) == 4


def _coroutine_agent() -> Any:
    class Late:
        async def rollout(self, tasks: Any, sampling: Sampling, lane: Lane) -> list[Trajectory]:
            return ALL

    return Late()


def _list_agent() -> Any:
    class Listed:
        def rollout(self, tasks: Any, sampling: Sampling, lane: Lane) -> list[Trajectory]:
            return ALL

    return Listed()


AGENTS: dict[str, tuple[Any, str]] = {
    "None": (Agent(None), "yielded None; needs Trajectory"),
    "another type": (Agent({"id": 1}), "yielded dict; needs Trajectory"),
    "an id that is text": (Agent(row(id="p/0/0")), "a Trajectory whose id is str; needs TrajectoryId"),
    "a prompt's number": (Agent(row(id=TrajectoryId(3, 0, 0))), "its prompt is int; needs the prompt's id"),  # type: ignore[arg-type]
    "an unknown prompt": (Agent(row("z")), ".*'z'.*which no task asked for"),
    "a prompt with another answer": (
        Agent(row(prompt=replace(prompt("p"), answer="7"))),
        "whose prompt has another `answer`, which rewards would read; needs the Prompt of its task",
    ),
    "a sample beyond n": (Agent(row("p", 2)), "yielded trajectory .*which no task asked for"),
    "a sample below 0": (Agent(row("p", -1)), "yielded trajectory .*which no task asked for"),
    "one twice": (Agent(*ALL, row("q")), "yielded trajectory .*twice; each must come exactly once"),
    "too few samples": (Agent(*ALL[:2]), r"ended without samples \[0\] of the 2 of prompt 'p'"),
    "nothing": (Agent(), r"ended without samples \[0, 1\] of the 2 of prompt 'p'"),
    "ids that are floats": (Agent(row(token_ids=floats(1, 2, 3))), "token_ids has shape .* dtype float32; needs"),
    "a mask of numbers": (Agent(row(loss_mask=ids(0, 1, 1))), "loss_mask has shape .* dtype int32; needs"),
    "log-probs in a list": (Agent(row(logprobs=[0.0, 0.0, 0.0])), "logprobs is list; needs a numpy array"),
    "another length": (Agent(row(logprobs=floats(0, 0))), r"have lengths \(3, 3, 2\); needs one length"),
    "two dimensions": (Agent(row(loss_mask=np.ones((1, 3), bool))), r"loss_mask has shape \(1, 3\)"),
    "a completion that is None": (Agent(row(completion=None)), "completion is None; needs text"),
    "an opening that is a list": (Agent(row(opening=[])), "opening is list; needs a tuple of messages, or None"),
    "a finish reason as text": (Agent(row(finish="stop")), "finish is 'stop'; needs one of"),
    "versions that are None": (Agent(row(versions=None)), "versions is None; needs pairs"),
    "no versions": (Agent(row(versions=())), "versions is empty; needs those of its completions"),
    "a segment too few": (
        Agent(*ALL[:2], row("p", 0, 0, num_segments=2)),
        "ended with 1 segments of sample 0 of prompt 'p', which state num_segments=2; every segment must come",
    ),
    "a segment too many": (
        Agent(row("p", 1, 0), row("p", 1, 1)),
        "yielded trajectory .*after its sample was complete, with num_segments=1; every segment must come once",
    ),
    "a segment too many, the first one last": (
        Agent(row("p", 1, 1), row("p", 1, 0)),
        "yielded trajectory .*after its sample was complete, with num_segments=1; every segment must come once",
    ),
    "a segment too many behind all": (
        Agent(row("q"), row("p", 1, 0, num_segments=2), row("p", 1, 1, num_segments=2), row("p", 1, 2, num_segments=2)),
        "yielded trajectory .*after its sample was complete, with num_segments=2; every segment must come once",
    ),
    "parts as text": (Agent(row(num_segments="1")), "num_segments is '1'; needs the number of segments"),
    "a sample as text": (Agent(row(id=TrajectoryId("p", 0, "0"))), "its sample is '0'; needs a whole number"),  # type: ignore[arg-type]
    "a sample that is True": (Agent(row(id=TrajectoryId("p", 0, True))), "its sample is True; needs a whole number"),
    "a segment below 0": (Agent(row("p", 0, -1)), "its segment is -1; needs an index"),
    "no prompt": (Agent(row("p", prompt=None)), "prompt is None; needs the Prompt of its task"),
    "the prompt of another": (Agent(row("p", prompt=prompt("q"))), "prompt is that of 'q'; needs the Prompt"),
    "info that is a number": (Agent(row("p", info=3)), "info is int; needs a mapping"),
    "ids that int32 cuts": (Agent(row("p", token_ids=np.array([1, 2**32 + 2, 3]))), "token id 4294967298; needs 0 to"),
    "ids that int32 wraps": (
        Agent(row("p", token_ids=np.array([1, 2**63, 3], np.uint64))),
        "token id 9223372036854775808; needs 0 to",
    ),
    "no tokens": (
        Agent(row("p", token_ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool), logprobs=np.zeros(0, np.float32))),
        "token_ids is empty; needs the prompt's tokens at least",
    ),
    "a loss at position 0": (Agent(row("p", loss_mask=np.ones(3, bool))), "loss_mask is True at position 0"),
    "an exception": (Agent(KeyError("which")), "KeyError: 'which'"),
    **{f"its own {type(end).__name__}": (Agent(end), type(end).__name__) for end in ENDS},
    "a coroutine": (_coroutine_agent(), "returned coroutine; needs an async generator"),
    "a list": (_list_agent(), "returned list; needs an async generator"),
}


@pytest.mark.parametrize("case", AGENTS)
def test_an_agent_loop_that_hands_over_what_it_must_not_is_named(case: str) -> None:
    agent, message = AGENTS[case]
    with pytest.raises(PluginError, match=rf"^agent 'a' of plugin 'x': rollout\(\):? ?.*{message}"):
        asyncio.run(_rolled(agent))


class Manager:
    """Scores trajectories with `judge`."""

    def __init__(self, judge: Callable[[list[Trajectory]], list[Any]], read: int = 99) -> None:
        self.judge, self.read = judge, read

    async def score(self, stream: Any, lane: Lane) -> Any:
        rows = []
        async for completion in stream:
            rows.append(completion)
            if len(rows) == self.read:
                break
        for scored in self.judge(rows):
            yield scored


async def _judged(manager: Any) -> list[ScoredTrajectory]:
    async def results() -> Any:
        for field in ALL:
            yield field

    checked = CheckedRewards(manager, "reward 'r' of plugin 'x'")
    async with aclosing(checked.score(results(), Lane.TRAIN)) as rows:
        return [row async for row in rows]


def scored(trajectory: Trajectory, score: Any = 1.0, **more: Any) -> ScoredTrajectory:
    made = ScoredTrajectory(trajectory, Reward(1.0))
    made.reward.__dict__.update({"score": score} | more)
    return made


def test_scored_trajectories_pass_in_any_order_and_the_score_of_a_failure_is_0() -> None:
    assert len(asyncio.run(_judged(Manager(lambda rows: [scored(value) for value in reversed(rows)])))) == 3
    failed = Manager(lambda rows: [scored(row, NAN, status=RewardStatus.FAILED) for row in rows])
    assert [row.reward.score for row in asyncio.run(_judged(failed))] == [0.0] * 3, "JSON has no NaN"
    sent = Manager(lambda rows: [scored(pickle.loads(pickle.dumps(row)), token_scores=floats(0, 1, 2)) for row in rows])
    assert len(asyncio.run(_judged(sent))) == 3


def test_the_numbers_of_a_reward_are_floats_of_python_whichever_they_were() -> None:
    numbers = {"components": {"length": np.int64(3)}, "latency_s": np.float64(2.0)}
    manager = Manager(lambda rows: [scored(row, np.float32(0.5), **numbers) for row in rows])
    for judged in asyncio.run(_judged(manager)):
        reward = judged.reward
        found = [reward.score, reward.components["length"], reward.latency_s]
        assert found == [0.5, 3.0, 2.0]
        assert set(map(type, found)) == {float}


def _late_manager() -> Any:
    class Late:
        async def score(self, stream: Any, lane: Lane) -> list[ScoredTrajectory]:
            return []

    return Late()


class Small(float):
    """Lies about its size."""

    __le__ = __ge__ = __lt__ = __gt__ = lambda self, other: True


def throw(cause: BaseException) -> list[Any]:
    raise cause


def failing(row: Trajectory, **info: Any) -> ScoredTrajectory:
    """The row with a failed reward."""
    return scored(row, 0.0, status=RewardStatus.FAILED, info=FrozenDict(info))


MANAGERS: dict[str, tuple[Any, str]] = {
    "None": (Manager(lambda rows: [None]), "yielded None; needs ScoredTrajectory"),
    "a number": (Manager(lambda rows: [1.0]), "yielded float; needs ScoredTrajectory"),
    "a score instead of a reward": (
        Manager(lambda rows: [ScoredTrajectory(rows[0], 1.0)]),  # type: ignore[arg-type]
        "yielded ScoredTrajectory of Trajectory and float; needs a Trajectory and its Reward",
    ),
    "a reward without its trajectory": (
        Manager(lambda rows: [ScoredTrajectory(None, Reward(1.0))]),  # type: ignore[arg-type]
        "yielded ScoredTrajectory of None and Reward; needs a Trajectory and its Reward",
    ),
    "a number of hundreds of digits": (Manager(lambda rows: [scored(rows[0], 10**400)]), "OverflowError"),
    "components by number": (Manager(lambda rows: [scored(rows[0], components={1: 1.0})]), "components has 1: 1.0"),
    "components of flags": (Manager(lambda rows: [scored(rows[0], components={"a": True})]), "has 'a': True; needs"),
    "token scores in a list": (
        Manager(lambda rows: [scored(rows[0], token_scores=[0.0, 1.0, 2.0])]),
        "token_scores is list; needs a numpy array",
    ),
    "one that it was not given": (Manager(lambda rows: [scored(row("z"))]), "'z'.*which it was not given"),
    "one twice": (Manager(lambda rows: [scored(rows[0]), scored(rows[0])]), "twice.*must come exactly once"),
    "one left out": (Manager(lambda rows: [scored(value) for value in rows[1:]]), "ended without 1 of the 3 .*'q'"),
    "the rest not read": (Manager(lambda rows: [scored(row) for row in rows], 1), "ended before the stream"),
    "NaN": (Manager(lambda rows: [scored(rows[0], NAN)]), "score is nan with status OK; needs a finite number"),
    "infinity": (Manager(lambda rows: [scored(rows[0], -INF)]), "score is -inf with status OK"),
    "beyond float32": (Manager(lambda rows: [scored(rows[0], 1e39)]), r"score is 1e\+39 with status OK"),
    "text": (Manager(lambda rows: [scored(rows[0], "1")]), "score is str; needs a number"),
    "True": (Manager(lambda rows: [scored(rows[0], True)]), "score is bool; needs a number"),
    "a status as text": (Manager(lambda rows: [scored(rows[0], status="fine")]), "status is 'fine'; needs one of"),
    "a number that says it is small": (Manager(lambda rows: [scored(rows[0], Small(NAN))]), "score is nan with status"),
    "a fraction": (Manager(lambda rows: [scored(rows[0], Fraction(1, 2))]), "score is Fraction; needs a number"),
    "components of text": (Manager(lambda rows: [scored(rows[0], components={"a": "b"})]), "components has 'a': 'b'"),
    "no components": (
        Manager(lambda rows: [scored(rows[0], components=3)]),
        "components is int and info .*; needs map",
    ),
    "a latency of text": (Manager(lambda rows: [scored(rows[0], latency_s="1")]), "latency_s is str; needs seconds"),
    "info that is a number": (Manager(lambda rows: [scored(rows[0], info=3)]), "info int; needs mappings"),
    "failures in a list": (
        Manager(lambda rows: [failing(rows[0], failed=["judge"])]),
        r"info\['failed'\] is list; needs a mapping by the part's name",
    ),
    "a misspelt failure policy": (
        Manager(lambda rows: [failing(rows[0], on_failure={"judge": "dropp"})]),
        r"info\['on_failure'\] has 'judge': 'dropp'; choose from: drop_sample, drop_group, abort",
    ),
    "a failure policy that needs settings": (
        Manager(lambda rows: [failing(rows[0], on_failure={"judge": "value"})]),
        "has 'judge': 'value'; choose from",
    ),
    "token scores of others": (
        Manager(lambda rows: [scored(rows[0], token_scores=floats(1, 2))]),
        "token_scores are 2 numbers for 3 tokens; needs a finite one per token",
    ),
    "token scores of NaN": (Manager(lambda rows: [scored(rows[0], token_scores=floats(0, NAN, 0))]), "needs a finite"),
    "other tokens": (
        Manager(lambda rows: [scored(replace(rows[0], token_ids=rows[0].token_ids + 1))]),
        "with other tokens, loss mask or log-probs than it was given; needs those that were sampled",
    ),
    "another mask": (
        Manager(lambda rows: [scored(replace(rows[0], loss_mask=np.zeros(3, bool)))]),
        "with other tokens, loss mask or log-probs",
    ),
    "an exception": (Manager(lambda rows: [1 / 0]), "ZeroDivisionError: division by zero"),
    **{f"its own {type(end).__name__}": (Manager(lambda _, e=end: throw(e)), type(end).__name__) for end in ENDS},
    "a coroutine": (_late_manager(), "returned coroutine; needs an async generator"),
}


@pytest.mark.parametrize("case", MANAGERS)
def test_a_reward_manager_that_hands_over_what_it_must_not_is_named(case: str) -> None:
    manager, message = MANAGERS[case]
    with pytest.raises(PluginError, match=rf"^reward 'r' of plugin 'x': score\(\):? ?.*{message}"):
        asyncio.run(_judged(manager))
