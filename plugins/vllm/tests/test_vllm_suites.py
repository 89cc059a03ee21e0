"""The suites of rlcore on the plugin's workers, each on one engine that all checks of a class and its mutants share.

Runs with the Python of .venv-vllm (`make vllm`).
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rlcore_vllm.replica import VllmReplica
from rlcore_vllm.rollout import VllmRollout

from rlcore.cluster.thread_workers import ThreadReplica
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.reward_models import RewardModel
from rlcore.contracts.reward_replica import RawScore, ScoreRequest
from rlcore.contracts.templates import template_child
from rlcore.engines.hf.worker import HfActor
from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.marks import needs
from rlcore.testing.suites.bench import Bench
from rlcore.testing.suites.harness import failures, run, scratch
from rlcore.testing.suites.reward_replica import RewardReplicaSuite
from rlcore.testing.suites.rollout import RolloutWorkerSuite, generate, requests
from rlcore.testing.suites.workers import Work, WorkerSuite
from rlcore.testing.tiny import write_tiny_classifier, write_tiny_model
from rlcore.types import FrozenDict

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("suites"),  # one engine per class, not one per worker of xdist
    pytest.mark.filterwarnings("default"),  # vLLM and what it imports warn of themselves
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

MODEL = Path(__file__).parents[3] / ".models" / "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {"grade": {"type": "number"}},
    "required": ["grade"],
    "additionalProperties": False,
}
SLOW = Deadlines(setup_s=360.0, call_s=120.0, close_s=30.0)
PATIENCE_S = 30.0
"""Seconds that the processes of an engine may take to be gone."""


class SharedWork(Work):
    """The worker that its class shares, whenever one is started."""

    async def start(self) -> Any:
        return self.suite.replica  # type: ignore[attr-defined]


class OnOneEngine(WorkerSuite):
    """Checks that use one worker after another instead of a fresh one each; `another worker` is the same one."""

    replica: ClassVar[Any]
    mutants: ClassVar[tuple[tuple[type, str, str], ...]]
    """Classes that break a promise, the check of it, and words of its error."""
    limit_s = 240.0
    asleep_s = 1.0
    test_it_starts_and_ends_without_leaving_anything = None  # it would start nothing: the end of `engine` looks

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """Has served a request: what vLLM starts at first use is not left behind by a check."""
        cls.prepare(tmp_path_factory.mktemp("model"))
        suite = cls()
        config = suite.config()
        bench = Bench(config, tmp_path_factory.mktemp("run"), suite.references, suite.specs, SLOW)
        resource_tracker.ensure_running()  # which outlives engines
        before = descendants(os.getpid())

        async def start() -> None:
            cls.replica = await bench.start(suite.load(), suite.role, suite.section(config))
            await suite.serve()

        try:
            asyncio.run(start())
            templates = template_child()  # one per process, which outlives engines
            seen = descendants(os.getpid()) - before - ({templates.pid} if templates else set())
            yield
        finally:
            asyncio.run(bench.close())
        assert seen, "an engine is a process"
        patience = time.monotonic() + PATIENCE_S
        while left := [process for process in seen if is_running(process)]:
            assert time.monotonic() < patience, f"the engine ends with the worker: {left}"
            time.sleep(0.1)

    async def serve(self) -> None:
        """Have one request answered."""
        raise NotImplementedError

    def test_a_worker_that_breaks_a_promise_is_red(self) -> None:
        for mutant, check, words in self.mutants:
            worker = mutant(self.replica.worker.context)
            vars(worker).update(vars(self.replica.worker))  # its engine, too
            thread, name = self.replica.thread, self.replica.name
            broken = ThreadReplica(worker, mutant, thread, name, SLOW)
            patient = {"asleep_s": 60.0}  # a mutant that sleeps badly answers earlier, which ends the wait
            tested = type("Tested", (type(self),), {"target": mutant, "replica": broken, **patient})
            assert words in failures(tested, [check]).get(check, ""), mutant

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write what the settings need."""

    def use(self, work: Callable[[Work], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            config = self.config()
            with scratch() as run_dir:
                bench = Bench(config, run_dir, self.references, self.specs, SLOW)
                try:
                    return await work(SharedWork(self, bench, self.section(config)))
                finally:
                    await bench.close()

        return run(main(), self.limit_s)


class NeverSleeps(VllmRollout):
    async def sleep(self):
        pass


class NeverGreedy(VllmRollout):
    async def generate(self, requests):
        warm = [replace(request, sampling=replace(request.sampling, temperature=1.0)) for request in requests]
        async for completion in super().generate(warm):
            yield completion


class TestRollout(OnOneEngine, RolloutWorkerSuite):
    target = VllmRollout
    plugins = ("vllm",)
    actor = HfActor
    sleeps = True
    settings: ClassVar[dict[str, Any]] = {
        "rollout.backend": "vllm",
        "plugins.vllm.max_model_len": 128,
        "plugins.vllm.kv_cache_gib": 0.1,
        "plugins.vllm.enforce_eager": True,
        "cluster.in_process": True,
    }
    mutants = (
        (NeverSleeps, "test_it_serves_no_request_while_it_sleeps", "it answered while it slept"),
        (NeverGreedy, "test_greedy_samples_are_equal", "greedy samples of"),
    )

    @classmethod
    def prepare(cls, directory: Path) -> None:
        path = write_tiny_model(directory / "tiny", num_attention_heads=1)
        cls.settings = {**cls.settings, "model.path": str(path)}

    async def serve(self) -> None:
        await generate(self.replica, requests()[:1])


class NeverSleepsReplica(VllmReplica):
    async def sleep(self):
        pass


class Backwards(VllmReplica):
    async def score(self, requests):
        return (await super().score(requests))[::-1]


class FailsAll(VllmReplica):
    async def score(self, requests):
        found = await super().score(requests)
        failed = any(answer.error for answer in found)
        return [replace(answer, score=None, text="", error="bad") if failed else answer for answer in found]


class OnReplica(OnOneEngine, RewardReplicaSuite):
    """A reward model on vLLM."""

    target = VllmReplica
    plugins = ("vllm",)
    sleeps = True
    unreadable = (FrozenDict({"role": "user", "content": "x y" * 1000}),)
    settings: ClassVar[dict[str, Any]] = {"cluster.in_process": True}
    options: ClassVar[dict[str, Any]] = {"kv_cache_memory_bytes": 2**27, "enforce_eager": True}

    async def serve(self) -> None:
        await self.ask(self.replica, self.requests()[:1])


class TestJudge(OnReplica):
    conversations = tuple(
        (FrozenDict({"role": "user", "content": f"Repeat this word: {word}"}),)
        for word in ("banana", "window", "purple", "seven", "music")
    )
    asleep_s = 3.0
    specs: ClassVar[dict[str, Any]] = {
        "reward": RewardModel(path=str(MODEL), max_tokens=256, dtype="float32", options=FrozenDict(OnReplica.options))
    }
    mutants = (
        (NeverSleepsReplica, "test_it_answers_nothing_while_it_sleeps", "it answered while it slept"),
        (Backwards, "test_each_request_is_answered_in_order", "needs the requests' order"),
    )

    def requests(self) -> list[ScoreRequest]:
        """Greedy answers of eight letters."""
        constrained = FrozenDict({"temperature": 0.0, "max_tokens": 16, "regex": "[a-z]{8}"})
        return [ScoreRequest(request.id, request.messages, constrained) for request in super().requests()]

    def test_it_is_bound_to_its_json_and_refuses_bad_requests_one_by_one(self) -> None:
        async def main(work: Work) -> None:
            replica = await work.start()
            check_judged(await replica.call(VllmReplica.score, questions()))
            assert "on vLLM" in await replica.call(VllmReplica.health)

        self.use(main)


def questions() -> list[ScoreRequest]:
    """A few good ones, and one for each thing that may be wrong."""
    message = {"role": "user", "content": "How good is the answer '4' to 'What is 2 + 2?', from 0 to 10?"}

    def question(content: Any = message, **options: Any) -> ScoreRequest:
        return ScoreRequest("p/0/0", (FrozenDict(content),), FrozenDict(options))

    return [
        question(max_tokens=64, temperature=0.0, json=SCHEMA),
        question(temperature=-1.0),
        question(max_tokens="many"),
        question(json={"type": "no such type"}),
        question({"role": "user", "content": ["no", "text"]}),
        question(max_tokens=4),
        question(response_format={}),
        question(temperature=0.0, choice=["7"]),
    ]


def check_judged(answers: Sequence[RawScore]) -> None:
    bound, negative, word, schema, unreadable, cut, unknown, chosen = answers
    assert bound.error == ""
    assert list(json.loads(bound.text)) == ["grade"]
    assert isinstance(json.loads(bound.text)["grade"], (int, float))
    assert "temperature" in negative.error
    assert "max_tokens=many" in word.error
    assert schema.error
    assert "the conversation cannot be read" in unreadable.error
    assert cut.error == "the answer was cut off; raise judge.max_tokens"
    assert "option 'response_format' is not known" in unknown.error
    assert (chosen.text, chosen.error) == ("7", "")


class TestClassifier(OnReplica):
    mutants = (
        (NeverSleepsReplica, "test_it_answers_nothing_while_it_sleeps", "it answered while it slept"),
        (FailsAll, "test_what_is_wrong_with_a_request_is_its_own_error", "has the error 'bad'"),
    )

    @classmethod
    def prepare(cls, directory: Path) -> None:
        path = write_tiny_classifier(directory / "tiny", architecture="Llama", num_heads=1)
        model = {"path": str(path), "tokenizer": "bytes", "max_tokens": 200, "dtype": "float32"}
        cls.specs = {"reward": RewardModel(**model, options=FrozenDict(cls.options))}
