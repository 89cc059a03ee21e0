"""Launching: exactly the plan is started, each component reaches its own workers only, and everything is closed."""

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.config import RunConfig
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.model_files import num_parameters
from rlcore.contracts.rollout import ROLLOUT
from rlcore.errors import PlanError, PluginError, RlcoreError, WorkerError
from rlcore.plan.time_limit import LIMIT
from rlcore.plugins.planning import plan_run
from rlcore.runtime.launch import launch
from rlcore.runtime.machine import gather_facts
from rlcore.testing.null import SETTINGS, NullActor
from rlcore.testing.packages import importable, write_package
from rlcore.types import Completion, FinishReason, GenerateRequest, Lane, Sampling

AGENT = """
    import threading

    from rlcore.contracts.actor import ACTOR
    from rlcore.contracts.agents import AgentLoop
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import *; from rlcore.contracts.components import *
    from rlcore.config.providers import *
    from rlcore.contracts.workers import Worker

    LOG = []

    class Tool(Worker):
        def setup(self):
            LOG.append("tool set up")
            {setup}

        def close(self):
            LOG.append("tool closed")

        def ask(self):
            return 42

    TOOL = Role("tool", Tool)

    class Agent(AgentLoop):
        def __init__(self, context):
            self.context = context
            {build}

        async def start(self):
            LOG.append("agent started")
            {start}

        async def close(self):
            LOG.append("agent closed")
            {close}

        def rollout(self, tasks, sampling, lane): ...

    @hookimpl
    def rlcore_agent_loops():
        return [Component("tooled", Agent, lambda config, section: [WorkerRequest(TOOL, "t")])]

    @hookimpl
    def rlcore_worker_classes():
        return [WorkerClass(Tool, "t", Tool)]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def write_agent(
    site: Path, *, setup: str = "pass", build: str = "pass", start: str = "pass", close: str = "pass"
) -> None:
    """A plugin whose agent asks for a worker, with something to do wrong in each phase."""
    text = AGENT.replace("{setup}", setup).replace("{build}", build).replace("{start}", start)
    text = text.replace("{close}", close)
    write_package(site, "launch_agent", text)


def test_a_null_run_is_launched_and_generates(tmp_path: Path) -> None:
    async def story() -> list[Completion]:
        async with launch(plan_run([], SETTINGS, ["null"]), tmp_path) as run:
            request = GenerateRequest(
                "a", run.tokens.encode_prompt([{"role": "user", "content": "x"}]), Sampling(), 3, 5
            )
            completions = [completion async for completion in run.generator.generate([request], Lane.TRAIN)]
            assert run.reference is None
            assert run.advantage.__name__ == "grpo"
            assert run.advantage_algorithm.name == "grpo"
            assert (await run.actor.replicas[0].call(ActorWorker.facts))["num_parameters"] == 257
            assert all(isinstance(value, float) for value in run.take_metrics().values())
            return completions

    completions = asyncio.run(story())
    assert sorted(completion.sample for completion in completions) == [0, 1, 2]
    assert all(
        completion.finish in FinishReason and len(completion.token_ids) == len(completion.logprobs)
        for completion in completions
    )
    assert not [thread for thread in threading.enumerate() if "[" in thread.name]


def test_the_same_requests_give_the_same_tokens_in_any_order(tmp_path: Path) -> None:
    requests = [GenerateRequest(f"r{index}", (1, 2), Sampling(max_tokens=9), 2, index) for index in range(4)]

    async def generate(order: list[GenerateRequest]) -> dict[tuple[str, int], list[int]]:
        async with launch(plan_run([], SETTINGS, ["null"]), tmp_path) as run:
            found = [completion async for completion in run.generator.generate(order, Lane.EVAL)]
            return {(completion.request_id, completion.sample): completion.token_ids.tolist() for completion in found}

    assert asyncio.run(generate(requests)) == asyncio.run(generate(requests[::-1]))


def test_generation_has_a_deadline_that_names_what_is_missing(tmp_path: Path) -> None:
    settings = [*SETTINGS, "rollout.deadline_s=0.05", "plugins.null.token_s=10"]

    async def story() -> None:
        async with launch(plan_run([], settings, []), tmp_path) as run:
            request = GenerateRequest("slow", (1,), Sampling(max_tokens=4), 2, 0)
            with pytest.raises(WorkerError, match=r"2 of 2 samples are missing \(slow#0, slow#1\).*deadline_s=0\.05"):
                async for _ in run.generator.generate([request], Lane.TRAIN):
                    pass

    asyncio.run(story())


def test_the_deadline_of_generation_does_not_count_time_in_which_the_actor_works(tmp_path: Path) -> None:
    settings = [*SETTINGS, "rollout.deadline_s=0.2", "plugins.null.token_s=10"]

    async def story() -> None:
        async with launch(plan_run([], settings, []), tmp_path) as run:
            updated, actor = asyncio.Event(), run.actor.replicas[0]
            actor.replica.call = lambda method: updated.wait()  # type: ignore[attr-defined]
            updating = asyncio.create_task(actor.call(ActorWorker.facts))
            await asyncio.sleep(0)
            generation = run.generator.generate([GenerateRequest("slow", (1,), Sampling(), 1, 0)], Lane.TRAIN)
            sample = asyncio.create_task(anext(generation))
            await asyncio.sleep(0.3)
            assert not sample.done()
            updated.set()
            await updating
            began = asyncio.get_running_loop().time()
            with pytest.raises(WorkerError, match="1 of 1 samples are missing"):
                await asyncio.wait_for(sample, 10)
            assert asyncio.get_running_loop().time() - began >= 0.2

    asyncio.run(story())


def test_a_rollout_that_fails_is_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with launch(plan_run([], [*SETTINGS, "plugins.null.fail_at_token=1"], []), tmp_path) as run:
            request = GenerateRequest("a", (1,), Sampling(max_tokens=4), 2, 0)
            with pytest.raises(WorkerError, match=r"rollout\[0\]\.generate\(\): RuntimeError: token"):
                async for _ in run.generator.generate([request], Lane.TRAIN):
                    pass

    asyncio.run(story())


def test_a_component_reaches_its_own_workers_and_no_others(site: Path, tmp_path: Path) -> None:
    write_agent(site)

    async def story() -> list[str]:
        async with launch(plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "launch_agent"]), tmp_path) as run:
            module = sys.modules["launch_agent"]
            workers = run.agent.context.workers  # type: ignore[attr-defined]
            assert await workers(module.TOOL).replicas[0].call(module.Tool.ask) == 42
            for role in (ACTOR, ROLLOUT):
                with pytest.raises(PlanError, match=f"agent 'tooled'.*role '{role.name}'; its own roles: tool"):
                    workers(role)
            return list(module.LOG)

    assert asyncio.run(story()) == ["tool set up", "agent started"]
    assert sys.modules["launch_agent"].LOG == ["tool set up", "agent started", "agent closed", "tool closed"]


@pytest.mark.parametrize(
    ("phase", "kind", "message", "log"),
    [
        ("setup", WorkerError, r"tool\[0\]\.setup\(\): ZeroDivisionError", ["tool set up", "tool closed"]),
        ("build", PluginError, r"agent 'tooled'.*build\(\): ZeroDivisionError", ["tool set up", "tool closed"]),
        (
            "start",
            PluginError,
            r"agent 'tooled'.*start\(\): ZeroDivisionError",
            ["tool set up", "agent started", "agent closed", "tool closed"],
        ),
    ],
)
def test_a_crash_during_the_start_closes_what_was_started(
    site: Path, tmp_path: Path, phase: str, kind: type[RlcoreError], message: str, log: list[str]
) -> None:
    write_agent(site, **{phase: "1 / 0"})
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "launch_agent"])

    async def story() -> None:
        async with launch(plan, tmp_path):
            pytest.fail("it was started")

    with pytest.raises(kind, match=message) as caught:
        asyncio.run(story())
    assert (caught.value.role, caught.value.method) == (("tool", "setup") if phase == "setup" else ("", ""))
    assert log == sys.modules["launch_agent"].LOG
    assert not [thread for thread in threading.enumerate() if "[" in thread.name]


@pytest.mark.fault
def test_a_start_that_hangs_is_ended_by_name(site: Path, tmp_path: Path) -> None:
    write_agent(site, start="import asyncio; await asyncio.sleep(3600)")
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "launch_agent"])

    async def story() -> None:
        async with launch(plan, tmp_path, Deadlines(setup_s=1.0)):
            pytest.fail("it was started")

    where = r"in start at .*launch_agent\.py:\d+$"
    with pytest.raises(
        WorkerError, match=rf"agent 'tooled' of plugin 'launch_agent' .*start\(\) took longer than 1 s, {where}"
    ):
        asyncio.run(story())


@pytest.mark.parametrize("cut_short", [False, True])
def test_a_component_may_close_slowly_unless_the_run_is_cut_short(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, cut_short: bool
) -> None:
    write_agent(site, close="import asyncio; await asyncio.sleep(0.05); LOG.append('whole')")
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "launch_agent"])

    async def story() -> None:
        async with launch(plan, tmp_path, Deadlines(close_s=0.01)):
            if cut_short:
                raise KeyError("mine")

    if cut_short:
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(story())
        [line] = caplog.messages
        assert re.fullmatch(
            r"agent 'tooled' of plugin 'launch_agent'.*: close\(\) took longer than 0\.01 s, in .*; its processes are "
            r"killed",
            line,
        )
    else:
        asyncio.run(story())
        assert caplog.messages == []
    assert ("whole" in sys.modules["launch_agent"].LOG) is not cut_short
    assert sys.modules["launch_agent"].LOG[-1] == "tool closed"


def test_an_error_within_close_ends_the_run_by_name(site: Path, tmp_path: Path) -> None:
    write_agent(site, close="raise TimeoutError('mine')")
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "launch_agent"])

    async def story() -> None:
        async with launch(plan, tmp_path):
            pass

    with pytest.raises(PluginError, match=r"agent 'tooled'.*: close\(\): TimeoutError: mine"):
        asyncio.run(story())


@pytest.mark.fault
def test_a_component_whose_build_hangs_is_ended_by_name_and_line(site: Path, tmp_path: Path) -> None:
    write_agent(site, build="import time; time.sleep(60)")
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled", "cluster.start_s=2"], ["null", "launch_agent"])

    async def story() -> None:
        async with launch(plan, tmp_path):
            pytest.fail("it was started")

    message = (
        r"^agent 'tooled' of plugin 'launch_agent' .*: build\(\): not done after 2 s, in __init__ at .*launch_agent"
    )
    with pytest.raises(PluginError, match=message) as caught:
        asyncio.run(story())
    assert str(caught.value).endswith("; if it is only slow, set cluster.start_s to more")


def test_an_estimator_that_hangs_when_it_is_probed_is_named_with_its_line(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "import threading\nfrom rlcore.contracts.hooks import hookimpl\nfrom rlcore.contracts.offers import *\n"
        "may_end = threading.Event()\ndef wait(inputs): may_end.wait(60)\n@hookimpl\ndef rlcore_algorithms():\n"
        "    return [Algorithm('waits', AlgorithmKind.ADVANTAGE, 'launch_waits:wait', Scope.BATCH)]\n"
    )
    write_package(site, "launch_waits", source)
    plan = plan_run([], [*SETTINGS, "algo.advantage=waits"], ["null", "launch_waits"])
    monkeypatch.setenv(LIMIT, "0.5")

    async def story() -> None:
        async with launch(plan, tmp_path):
            pytest.fail("it was started")

    who = r"^algo\.advantage=waits of plugin 'launch_waits' \(launch-waits 1\.0\): probing it: "
    with pytest.raises(
        PluginError, match=who + r"not done after 0\.5 s, in wait at \S+launch_waits\.py:5; if it is only"
    ):
        asyncio.run(story())
    sys.modules["launch_waits"].may_end.set()
    for thread in threading.enumerate():
        if "probing it" in thread.name:
            thread.join(10)


def test_an_error_inside_the_run_closes_everything_and_stays_itself(site: Path, tmp_path: Path) -> None:
    write_agent(site)
    plan = plan_run([], [*SETTINGS, "rollout.agent=tooled"], ["null", "launch_agent"])

    async def story() -> None:
        async with launch(plan, tmp_path):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(story())
    assert sys.modules["launch_agent"].LOG[-2:] == ["agent closed", "tool closed"]


def test_the_null_actor_restores_every_bit(tmp_path: Path) -> None:
    async def story() -> None:
        async with launch(plan_run([], SETTINGS, ["null"]), tmp_path) as run:
            actor = run.actor.replicas[0]
            worker: NullActor = actor.worker  # type: ignore[attr-defined]
            worker.logits_V = worker.logits_V + 0.1
            worker.num_adam_steps = 3
            await actor.call(ActorWorker.publish, 4)
            await actor.call(ActorWorker.save, tmp_path / "saved")
        async with launch(plan_run([], SETTINGS, ["null"]), tmp_path) as run:
            actor = run.actor.replicas[0]
            await actor.call(ActorWorker.restore, tmp_path / "saved")
            again: NullActor = actor.worker  # type: ignore[attr-defined]
            assert again.logits_V.tobytes() == worker.logits_V.tobytes()
            assert (again.num_adam_steps, again.version) == (3, 4)

    asyncio.run(story())


def test_parameters_are_counted_in_safetensors_headers_or_estimated_from_the_config(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    assert num_parameters(tmp_path) is None
    (tmp_path / "config.json").write_text(
        '{"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10, "num_attention_heads": 2, '
        '"num_key_value_heads": 1, "intermediate_size": 16, "tie_word_embeddings": true}'
    )
    # embeddings 10*8; a layer: q and o 8*8, k and v 8*4, three matrices of 8*16
    assert num_parameters(tmp_path) == 80 + 2 * (2 * 64 + 2 * 32 + 3 * 128)
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.zeros(7, np.float32)}, tmp_path / "model.safetensors")
    assert num_parameters(tmp_path) == 22


def test_the_facts_of_this_machine_are_plausible() -> None:
    facts = gather_facts(RunConfig())
    assert facts.cpus >= 1
    assert facts.gpus == 0
    assert facts.memory_bytes is None or facts.memory_bytes > 2**20
    assert facts.parameters is None
