"""Completions and results of workers are checked when they arrive: what is wrong names worker and method."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rlcore.cluster.local import LocalCluster
from rlcore.cluster.worker_context import cluster_context
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.workers import Worker
from rlcore.errors import WorkerError
from rlcore.errors.checks.arrays import check_answer, check_completion
from rlcore.errors.checks.results import checked_result
from rlcore.plugins.planning import plan_run
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package
from rlcore.types import Completion, FinishReason, GenerateRequest, Sampling

NAN, INF = float("nan"), float("inf")


def ids(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


GOOD = Completion("a/0", 0, ids(1, 2, 256), floats(-1, 0, -0.5), FinishReason.STOP, 3, versions=((0, 3), (2, 4)))


def test_a_completion_that_can_be_trained_on_raises_nothing() -> None:
    for good in (
        GOOD,
        replace(GOOD, logprobs=floats(5e-5, -80, 0)),
        replace(GOOD, token_ids=ids(), logprobs=floats(), versions=()),
        replace(GOOD, token_ids=GOOD.token_ids.astype(np.int64), logprobs=GOOD.logprobs.astype(np.float64)),
        replace(GOOD, finish=FinishReason.LENGTH, versions=()),
    ):
        check_completion("rollout[0].generate()", good, 257)
    check_completion("rollout[0].generate()", replace(GOOD, token_ids=ids(1, 2, 2**31 - 1)), None)


COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "id beyond the vocabulary": ({"token_ids": ids(1, 257, 3)}, "token id 257; needs 0 to 256, the model's vocab"),
    "negative id": ({"token_ids": ids(1, -1, 3)}, "token id -1; needs 0 to 256"),
    "ids that are floats": ({"token_ids": floats(1, 2, 3)}, r"token_ids has shape \(3,\) and dtype float32; needs"),
    "ids in a list": ({"token_ids": [1, 2, 3]}, "token_ids is list; needs a numpy array"),
    "ids in two dimensions": ({"token_ids": ids(1, 2, 3)[None]}, r"token_ids has shape \(1, 3\)"),
    "NaN": ({"logprobs": floats(-1, NAN, -1)}, "log-prob nan; needs finite numbers of at most 0"),
    "minus infinity": ({"logprobs": floats(-1, -INF, -1)}, "log-prob -inf; needs"),
    "infinity": ({"logprobs": floats(-1, INF, -1)}, "log-prob inf; needs"),
    "positive": ({"logprobs": floats(-1, 0.001, -1)}, "log-prob 0.001; needs"),
    "log-probs that are integers": ({"logprobs": ids(0, 0, 0)}, "logprobs has .* dtype int32; needs"),
    "log-probs that are None": ({"logprobs": None}, "logprobs is None; needs a numpy array"),
    "other lengths": ({"logprobs": floats(-1, -1)}, "found 3 token_ids and 2 logprobs; needs one log-prob per token"),
    "finish as text": ({"finish": "stop"}, "finish is 'stop'; needs one of"),
    "version as text": ({"version": "3"}, "version is '3'; needs the number of the weights"),
    "version below 0": ({"version": -1}, "version is -1"),
    "versions as a list": ({"versions": [(0, 3)]}, "versions is list; needs pairs"),
    "versions that are not pairs": ({"versions": (3,)}, "versions holds 3; needs pairs"),
    "versions from the middle": ({"versions": ((1, 3),)}, "versions begins at position 1; needs 0"),
    "versions out of order": ({"versions": ((0, 3), (2, 4), (1, 5))}, r"versions holds \(1, 5\) of 3 tokens"),
    "versions beyond the end": ({"versions": ((0, 3), (3, 4))}, r"versions holds \(3, 4\) of 3 tokens"),
    "versions of three": ({"versions": ((0, 3, 1),)}, r"versions holds \(0, 3, 1\); needs pairs"),
    "positions as text": ({"versions": (("0", 3),)}, r"versions holds \('0', 3\); needs pairs"),
    "numbers of versions as text": ({"versions": ((0, "3"),)}, r"versions holds \(0, '3'\); needs pairs"),
    "versions below 0": ({"versions": ((0, -1),)}, r"versions holds \(0, -1\) of 3 tokens"),
    "a request as a number": ({"request_id": 3}, "request_id and sample are not those of the request"),
    "sample as text": ({"sample": "0"}, "request_id and sample are not those of the request"),
}


@pytest.mark.parametrize("case", COMPLETIONS)
def test_a_completion_that_cannot_be_trained_on_names_the_replica(case: str) -> None:
    change, message = COMPLETIONS[case]
    bad = object.__new__(Completion)
    bad.__dict__.update(GOOD.__dict__ | change)
    with pytest.raises(WorkerError, match=rf"^rollout\[1\]\.generate\(\): sample .* of request ('a/0'|3): {message}"):
        check_completion("rollout[1].generate()", bad, 257)


REQUEST = GenerateRequest("a/0", (1, 2), Sampling(max_tokens=3), 1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ids(), "logprobs": floats(), "versions": ()}, "0 tokens; needs 1 to max_tokens=3"),
        ({"token_ids": ids(1, 2, 3, 4)}, "4 tokens; needs 1 to max_tokens=3"),
        ({"versions": ((0, 3), (2, 5))}, "version 5 of the weights; the newest is 4"),
        ({"version": 6, "versions": ()}, "version 6 of the weights; the newest is 4"),
    ],
)
def test_a_completion_of_another_length_or_of_weights_to_come_names_the_replica(
    change: dict[str, Any], message: str
) -> None:
    check_answer("rollout[1].generate()", GOOD, REQUEST, 4)
    with pytest.raises(WorkerError, match=rf"^rollout\[1\]\.generate\(\): sample 0 of request 'a/0': {message}$"):
        check_answer("rollout[1].generate()", replace(GOOD, **change), REQUEST, 4)


@pytest.mark.parametrize("item", [None, "text", ids(1)])
def test_an_item_that_is_not_a_completion_names_the_replica(item: Any) -> None:
    with pytest.raises(WorkerError, match=r"^rollout\[0\]\.generate\(\) yielded (None|str|ndarray); needs Completion"):
        check_completion("rollout[0].generate()", item, 257)


class Interface(Worker):
    """Methods with every kind of declaration."""

    def numbers(self) -> dict[str, float]: ...  # type: ignore[empty-body]
    def version(self) -> int: ...  # type: ignore[empty-body]
    def length(self) -> int | None: ...
    def nothing(self) -> None: ...
    def anything(self) -> Any: ...
    def unsaid(self): ...  # type: ignore[no-untyped-def]
    async def later(self) -> list[str]: ...  # type: ignore[empty-body]


def _generated() -> Any:
    yield 1


async def _generated_async() -> Any:
    yield 1


def test_results_of_the_declared_types_pass() -> None:
    for method, found in (
        (Interface.numbers, {}),
        (Interface.version, np.int64(3)),
        (Interface.length, None),
        (Interface.nothing, None),
        (Interface.nothing, "ignored"),
        (Interface.anything, object()),
        (Interface.unsaid, 3),
        (Interface.later, ["a"]),
    ):
        assert checked_result("w[0].m()", method, found) is found


@pytest.mark.parametrize(
    ("method", "found", "message"),
    [
        (Interface.numbers, None, "returned None; needs dict, as Interface.numbers"),
        (Interface.version, "3", "returned str; needs int"),
        (Interface.length, 2.5, "returned float; needs int or None"),
        (Interface.later, ("a",), "returned tuple; needs list"),
        (Interface.nothing, _generated(), "returned generator; needs None"),
        (Interface.nothing, _generated_async(), "returned async generator; needs None"),
    ],
)
def test_results_of_another_type_name_worker_and_method(method: Any, found: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=rf"^w\[0\]\.m\(\) {message}"):
        checked_result("w[0].m()", method, found)


SOURCE = """
    from abc import abstractmethod
    from collections.abc import AsyncIterator

    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.components import Component
    from rlcore.contracts.requests import Role, WorkerRequest
    from rlcore.contracts.offers import WorkerClass
    from rlcore.contracts.workers import Worker

    class Odd(Worker):
        @abstractmethod
        def number(self) -> int: ...
        @abstractmethod
        def sizes(self) -> dict[str, float]: ...
        @abstractmethod
        def items(self) -> AsyncIterator[int]: ...
        @abstractmethod
        def others(self) -> AsyncIterator[int]: ...

    class OddWorker(Odd):
        def setup(self): ...
        def number(self): return "three"
        def sizes(self): return None
        def items(self): return self._late()
        def others(self): return [1, 2]
        async def _late(self): return [1, 2]

    THREAD, PROCESS = Role("odd_thread", Odd), Role("odd_process", Odd)

    @hookimpl
    def rlcore_agent_loops():
        asks = [WorkerRequest(THREAD, "odd"), WorkerRequest(PROCESS, "odd", isolated=True)]
        return [Component("odd", lambda context: None, lambda config, section: asks)]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Odd, "odd", OddWorker)]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """The module of the plugin with the odd workers."""
    with importable(tmp_path / "site") as site:
        write_package(site, "odd_workers", SOURCE)
        import odd_workers  # type: ignore[import-not-found]

        yield odd_workers


async def refused(replica: Any, plugin: ModuleType) -> list[str]:
    """The error about each method."""
    messages = []
    for method in (plugin.Odd.number, plugin.Odd.sizes):
        with pytest.raises(WorkerError) as caught:
            await replica.call(method)
        messages.append(str(caught.value))
    for method in (plugin.Odd.items, plugin.Odd.others):
        with pytest.raises(WorkerError) as caught:
            await anext(replica.stream(method))
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_results_of_the_wrong_type_name_worker_and_method(plugin: ModuleType, tmp_path: Path) -> None:
    plan = plan_run([], [*SETTINGS, "rollout.agent=odd"], ["null", "odd_workers"])

    async def story() -> dict[str, list[str]]:
        cluster = LocalCluster(cluster_context(plan, tmp_path, Deadlines(setup_s=60.0, call_s=30.0, close_s=5.0)))
        try:
            ours = [worker for worker in plan.workers if worker.request.role.name.startswith("odd")]
            groups = {worker.request.role.name: await cluster.start(worker) for worker in ours}
            return {name: await refused(group.replicas[0], plugin) for name, group in groups.items()}
        finally:
            await cluster.close()

    for role, messages in asyncio.run(story()).items():
        assert messages == [
            f"{role}[0].number() returned str; needs int, as Odd.number() declares",
            f"{role}[0].sizes() returned None; needs dict, as Odd.sizes() declares",
            f"{role}[0].items(): returned coroutine; needs an async generator, an `async def` with `yield`",
            f"{role}[0].others(): returned list; needs an async generator, an `async def` with `yield`",
        ]
