"""Values, log-probs, metrics and ids of a batch are checked on arrival and refused by the name of who sent them."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from rlcore.data.batch import collate
from rlcore.errors import PluginError, WorkerError
from rlcore.errors.checks.arrays import check_tokens, checked_metrics, per_token
from rlcore.report.metrics import average
from rlcore.runtime.checked_components import CheckedCritic
from rlcore.testing.rewards import make_trajectory
from rlcore.types import Batch, Prompt, Reward, ScoredTrajectory, Trajectory, TrajectoryId

NAN, INF = float("nan"), float("inf")


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


def row(sample: int) -> Trajectory:
    return make_trajectory(
        Prompt("p", ({"role": "user", "content": "p"},), None, "test"),
        sample,
        "x",
        token_ids=np.array([1, 2, 3], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=floats(0, -1, -1),
        versions=((1, 0),),
    )


BATCH: Batch = collate([[ScoredTrajectory(row(0), Reward(0.0)), ScoredTrajectory(row(1), Reward(1.0))]], 0)


def values(*numbers: float) -> Any:
    return np.array(numbers, dtype=np.float32).reshape(2, 3)


class Critic:
    """Returns `found`."""

    def __init__(self, found: Any, sync: bool = False) -> None:
        self.found, self.sync = found, sync

    def _answer(self, *_: Any) -> Any:
        async def later() -> Any:
            return self.found

        return self.found if self.sync else later()

    values = update = expect = snapshot = _answer

    def actor_may_update(self) -> Any:
        return self.found if self.sync else self._answer()

    def metrics(self) -> Any:
        return self.found if self.sync else self._answer()


def critic(found: Any, sync: bool = False, needed: bool = True) -> CheckedCritic:
    return CheckedCritic(Critic(found, sync), "critic 'c' of plugin 'x'", needed=needed)


def test_values_of_every_sampled_token_pass_whatever_stands_elsewhere() -> None:
    found = asyncio.run(critic(values(NAN, 1, 2, INF, 4, 5)).values(BATCH))
    assert found is not None
    assert found.dtype == np.float32
    assert asyncio.run(critic(None, needed=False).values(BATCH)) is None


VALUES: dict[str, tuple[CheckedCritic, str]] = {
    "None where values are needed": (critic(None), r"returned None; needs a numpy array of \(2, 3\) floating-point"),
    "a list": (critic([0.0]), "returned list; needs a numpy array"),
    "another shape": (critic(floats(1, 2)), r"returned shape \(2,\) and dtype float32; needs .* array of \(2, 3\)"),
    "integers": (critic(np.zeros((2, 3), np.int64)), "returned shape .* dtype int64; needs"),
    "NaN": (critic(values(0, 1, NAN, 0, 1, 1)), "1 of 4 values are not finite, the first nan; needs a number"),
    "infinity": (critic(values(0, 1, INF, 0, -INF, 1)), "2 of 4 values are not finite, the first inf"),
    "beyond float32": (critic(np.full((2, 3), 1e300)), "4 of 4 values are not finite, the first inf"),
    "a masked array": (critic(np.ma.zeros((2, 3))), "returned MaskedArray; needs"),
    "no async def": (critic(values(0, 1, 1, 0, 1, 1), sync=True), "returned ndarray at once; needs an `async def`"),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_critic_without_a_value_for_every_token_is_named(case: str) -> None:
    engine, message = VALUES[case]
    with pytest.raises(PluginError, match=rf"^critic 'c' of plugin 'x': values\(\):? {message}"):
        asyncio.run(engine.values(BATCH))


def test_values_stay_what_they_were_when_they_arrived() -> None:
    own = values(0, 1, 2, 0, 1, 2)
    found = asyncio.run(critic(own).values(BATCH))
    own.fill(NAN)
    assert found is not None
    assert found.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("num", [-1, 4, True, 10**30])
def test_a_number_of_updates_that_cannot_be_is_named(num: Any) -> None:
    with pytest.raises(PluginError, match=rf"^critic 'c' of plugin 'x': expect\(\) returned {num}; needs .*, 0 to 3"):
        asyncio.run(critic(num).expect(3))
    assert [asyncio.run(critic(number).expect(3)) for number in (0, 3)] == [0, 3]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "returned None; needs a dict of str to float"),
        (1.0, "returned float; needs a dict"),
        ({"critic/loss": "1"}, "returned 'critic/loss': '1'; needs"),
        ({1: 1.0}, "returned 1: 1.0; needs"),
        ({"critic/on": True}, "returned 'critic/on': True; needs"),
    ],
)
def test_metrics_that_are_not_numbers_name_their_sender(found: Any, message: str) -> None:
    with pytest.raises(PluginError, match=rf"^critic 'c' of plugin 'x': update\(\) {message}"):
        asyncio.run(critic(found).update(BATCH))
    with pytest.raises(PluginError, match=rf"^critic 'c' of plugin 'x': metrics\(\) {message}"):
        critic(found, sync=True).metrics()
    with pytest.raises(WorkerError, match=rf"^actor\[0\].update\(\) {message}"):
        checked_metrics("actor[0].update()", found, WorkerError)


def test_metrics_may_be_nan_and_of_numpy_and_are_averaged() -> None:
    found = asyncio.run(critic({"critic/loss": NAN, "critic/x": np.float32(2), "n": 3}).update(BATCH))
    assert math.isnan(found["critic/loss"])
    assert {type(value) for value in found.values()} == {float}
    assert math.isnan(average([{"x": INF}, {"x": -INF}])["x"])


def test_async_where_sync_is_due_and_the_reverse_are_named() -> None:
    with pytest.raises(PluginError, match=r"critic 'c' .*actor_may_update\(\) returned coroutine; needs True or False"):
        critic(True).actor_may_update()


@pytest.mark.parametrize(("found", "sync"), [(None, False), (1, False), (True, True)])
def test_a_snapshot_that_is_not_a_promise_of_true_or_false_is_named(found: Any, sync: bool) -> None:
    words = "at once; needs an `async def`" if sync else "needs True or False"
    with pytest.raises(PluginError, match=rf"^critic 'c' of plugin 'x': snapshot\(\) returned .*{words}"):
        asyncio.run(critic(found, sync).snapshot())
    assert [asyncio.run(critic(value).snapshot()) for value in (True, np.False_)] == [True, False]
    with pytest.raises(PluginError, match=r"critic 'c' .*metrics\(\) returned coroutine; needs a dict"):
        critic({}).metrics()
    with pytest.raises(PluginError, match=r"critic 'c' .*update\(\) returned dict at once; needs an `async def`"):
        asyncio.run(critic({}, sync=True).update(BATCH))
    with pytest.raises(PluginError, match=r"critic 'c' .*expect\(\) returned int at once; needs an `async def`"):
        asyncio.run(critic(1, sync=True).expect(3))
    with pytest.raises(PluginError, match=r"critic 'c' .*expect\(\) returned None; needs the number of updates"):
        asyncio.run(critic(None).expect(3))


def test_log_probs_that_are_not_numbers_name_the_worker() -> None:
    for found, message in (
        (values(0, 1, NAN, 0, 1, 1), "1 of 4 log-probs are not finite"),
        (floats(1), r"returned shape \(1,\)"),
        (None, "returned None; needs a numpy array"),
    ):
        with pytest.raises(WorkerError, match=rf"^reference\[0\]\.logprobs\(\):? {message}"):
            per_token("reference[0].logprobs()", found, BATCH, WorkerError, "log-probs")


def test_ids_outside_the_vocabulary_of_a_batch_name_the_agent_and_its_trajectories() -> None:
    rows = [TrajectoryId("p", 0, sample) for sample in (0, 1)]
    check_tokens("agent 'a'", BATCH, rows, 4)
    with pytest.raises(
        PluginError, match=r"^agent 'a': a trajectory of .*sample=0.* to .*sample=1.* has token id 3; needs 0 to 2, the"
    ):
        check_tokens("agent 'a'", BATCH, rows, 3)
