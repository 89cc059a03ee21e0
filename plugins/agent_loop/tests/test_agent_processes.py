"""Agents that share a process: what one of them does is its own end, and not that of the others."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rlcore_agent_loop.agents.agent import Agents
from rlcore_agent_loop.conversation.turn_sampler import TurnSampler
from rlcore_agent_loop.settings import AgentLoopSettings, AgentSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, kit_of, talk
from rlcore_agent_loop.tools.in_child import CallLost, in_child

from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.agents import RolloutTask
from rlcore.contracts.children import Child, ChildPool
from rlcore.errors import ChildError
from rlcore.testing.rewards import make_prompt
from rlcore.types import Lane, Sampling, Trajectory

AGENTS = """
import asyncio, json, os, time, urllib.error, urllib.request
from pathlib import Path

HERE = Path(__file__).parent

def ask(base_url, api_key, messages):
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)["choices"][0]["message"]

async def cancels(base_url, api_key, messages):
    ask(base_url, api_key, messages)
    raise asyncio.CancelledError

def ignores_401(base_url, api_key, messages):
    while True:
        try:
            ask(base_url, api_key, messages)
        except urllib.error.HTTPError:
            (HERE / "refused").touch()
        time.sleep(0.02)

def one_is_stubborn(base_url, api_key, messages):
    ask(base_url, api_key, messages)
    with (HERE / "begun").open("a") as file:
        file.write("x")
    if len((HERE / "begun").read_text()) == 3:
        return 1.0
    time.sleep(3600)

class AgentHost:
    def waits(self, seconds):
        time.sleep(seconds)
        return seconds

    def dies(self):
        time.sleep(0.2)
        os._exit(1)
"""


def settings_of(directory: Path, name: str, **settings: Any) -> AgentLoopSettings:
    (directory / "agents.py").write_text(AGENTS)
    return AgentLoopSettings(
        agent=AgentSettings(f"{directory / 'agents.py'}:{name}", children=1, threads=4), **settings
    )


def one(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
    return [*b"one", END]


@pytest.mark.fault
def test_an_agent_that_raises_a_cancellation_is_answered_at_once(tmp_path: Path) -> None:
    found = talk(ScriptedPolicy(one), settings_of(tmp_path, "cancels", time_s=30.0), processes=True).only
    assert (found.info["ended_by"], found.num_sampled) == ("agent_failed", 4)
    assert found.info["error"] == "CancelledError"


@pytest.mark.fault
def test_an_agent_that_does_not_care_for_401_gets_no_further_turn(tmp_path: Path) -> None:
    settings = replace(settings_of(tmp_path, "ignores_401", max_turns=1000), time_s=0.4)
    policy = ScriptedPolicy(one, seconds=0.01)
    parts = talk(policy, settings, processes=True).trajectories
    assert {part.info["ended_by"] for part in parts} == {"time_s"}
    assert 0 < len(parts) <= len(policy.requests) <= len(parts) + 1, "nothing is generated for a token that has ended"
    # The time may end between a request and its turn of the loop; requests that were refused do not count.
    assert parts[-1].info["num_requests"] - len(policy.requests) in (0, 1)


def hosted(directory: Path, *calls: tuple[str, tuple[Any, ...], float]) -> list[Any]:
    """The results of concurrent calls to one process."""
    (directory / "agents.py").write_text(AGENTS)

    async def run() -> list[Any]:
        children = ChildProcesses()

        async def start(index: int) -> Child:
            return await children.start(f"{directory / 'agents.py'}:AgentHost", name="host", threads=4)

        pool = ChildPool(start, 1, calls=4)
        await pool.start()
        try:
            made = [
                in_child(pool, "agent", deadline_s, method, *args, shared_by=4) for method, args, deadline_s in calls
            ]
            return await asyncio.gather(*made, return_exceptions=True)
        finally:
            await pool.close()
            await children.close()

    return asyncio.run(run())


@pytest.mark.fault
def test_the_error_of_an_agent_names_the_other_call_that_killed_its_process(tmp_path: Path) -> None:
    slow, innocent = hosted(tmp_path, ("waits", (60,), 0.4), ("waits", (60,), 60.0))
    assert (type(slow), str(slow)) == (ChildError, "agent took longer than 0.4 s")
    assert isinstance(innocent, CallLost)
    assert str(innocent) == "the process it ran in was killed: agent took longer than 0.4 s, in another call"
    [_, other] = hosted(tmp_path, ("dies", (), 60.0), ("waits", (60,), 60.0))
    assert type(other) is ChildError
    assert str(other).startswith("the process of agent has ended, which up to 4 share: child 'host' ended: exit code 1")


@pytest.mark.fault
def test_an_agent_whose_process_was_killed_because_of_another_is_restarted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path, "one_is_stubborn", time_s=1.2)
    sampling = Sampling(max_tokens=200)

    async def run() -> list[list[Trajectory]]:
        children = ChildProcesses()
        agents = Agents(children, settings.agent, grace_s=0.4)
        await agents.start()
        kit, turns = kit_of(settings), TurnSampler(ScriptedPolicy(one), sampling, Lane.TRAIN)
        task = RolloutTask(make_prompt(0), 0, 2, 7)
        try:
            stubborn = asyncio.create_task(agents.run(kit, turns, task, 0, sampling))
            await asyncio.sleep(0.8)  # the second one's time must not be up when the first one is killed
            innocent = await agents.run(kit, turns, task, 1, sampling)
            return [await stubborn, innocent]
        finally:
            await agents.close()
            await children.close()

    [stubborn], [innocent] = asyncio.run(run())
    assert stubborn.info["ended_by"] == "time_s"
    assert (innocent.info["ended_by"], innocent.info["environment_reward"]) == ("agent", 1.0)
    assert (innocent.num_sampled, innocent.info["num_requests"]) == (4, 1), "what was recorded before is gone"
    assert "sample test/0/0/1 is begun again: the process it ran in was killed: agent took longer" in caplog.text
