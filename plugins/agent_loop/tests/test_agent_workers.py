"""Conversations in workers of the role `agent`: the same samples on every worker, and when one dies."""

import asyncio
import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from rlcore_agent_loop.settings import AgentLoopSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, talk

from rlcore.contracts.activity import TOOL, Activity, as_current
from rlcore.contracts.agents import RolloutTask
from rlcore.data import load_prompts
from rlcore.errors import WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.report.status import status_of
from rlcore.runtime.launch import Runtime, launch
from rlcore.testing.leaks import leaks
from rlcore.testing.rewards import make_prompt
from rlcore.types import Lane, Sampling, Trajectory

MINE = """
import os, signal
from pathlib import Path

from rlcore_agent_loop.tools.calls import ToolCall

HERE = Path(__file__).parent


class Tell:
    def create(self, columns):
        self.columns, self.num = columns, 0

    async def execute(self):
        self.num += 1
        dies = self.columns["dies"]
        if dies == "always" or (dies == "once" and not (HERE / "died").exists()):
            (HERE / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with (HERE / "pids").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        return f"{self.columns['question']} {self.num}"


def always(text):
    return [ToolCall("tell", {})]
"""
ALWAYS_SEARCH = """
def always(text):
    return [ToolCall("search", {})]
"""
# Half of all bytes end a turn of the null model.
SAMPLING = Sampling(max_tokens=1000, stop=tuple(chr(byte) for byte in range(128)))


def config(directory: Path, workers: int, dies: str = "", **more: Any) -> dict[str, Any]:
    (directory / "mine.py").write_text(MINE)
    rows = [{"question": f"q{index}", "dies": dies if index == 1 else ""} for index in range(4)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"path": "none", "tokenizer": "bytes"},
        "data": {"sources": {"rows": {"path": str(directory / "rows.jsonl")}}, "shuffle": False},
        "actor": {"backend": "null"},
        "rollout": {"backend": "null"},
        "reward": {"functions": {"letters": {"fn": "count_letter"}}},
        "plugins": {
            "agent_loop": {
                "tools": {"tell": {"fn": f"{directory / 'mine.py'}:Tell"}},
                "parser": f"{directory / 'mine.py'}:always",
                "describe_tools": "never",
                "max_turns": 4,
                "max_same_calls": 9,
                "max_conversations": 9,
                "children": 1,
                "workers": workers,
            }
        },
        **more,
    }


async def rolled(run: Runtime) -> list[Trajectory]:
    prompts = load_prompts(run.plan.config.data.sources, run.plan.config.data)["rows"]
    tasks = [RolloutTask(prompt, 0, 3, seed) for seed, prompt in enumerate(prompts)]
    return [trajectory async for trajectory in run.agent.rollout(tasks, SAMPLING, Lane.TRAIN)]


def samples(config: dict[str, Any], directory: Path, leaving: bool = False) -> list[Trajectory]:
    """The samples of a launched run, which leaves nothing behind unless that is allowed."""

    async def main() -> list[Trajectory]:
        async with launch(plan_run([config], [], ["null"]), directory) as run:
            return await rolled(run)

    with contextlib.nullcontext() if leaving else leaks():
        return asyncio.run(main())


def contents_of(trajectories: list[Trajectory]) -> list[tuple[Any, ...]]:
    """The contents of each sample, without times."""
    return [
        (
            str(trajectory.id),
            trajectory.token_ids.tolist(),
            trajectory.loss_mask.tolist(),
            trajectory.logprobs.tolist(),
            trajectory.completion,
            trajectory.versions,
            {key: value for key, value in trajectory.info.items() if key != "timing"},
        )
        for trajectory in sorted(trajectories, key=lambda trajectory: trajectory.id)
    ]


def test_workers_are_a_role_of_the_plan_and_none_by_default(tmp_path: Path) -> None:
    roles = {worker.request.role.name: worker for worker in plan_run([config(tmp_path, 3)], [], ["null"]).workers}
    request = roles["agent"].request
    assert (request.replicas, request.gpus, request.threads, request.isolated) == (3, 0.0, 1, True)
    assert "agent" not in {worker.request.role.name for worker in plan_run([config(tmp_path, 0)], [], ["null"]).workers}


@pytest.mark.slow
@pytest.mark.parametrize(("record", "is_kept"), [("all", True), ("steps", False)])
def test_tool_calls_of_workers_come_to_the_trace_of_the_run_with_its_times(
    record: Literal["all", "steps"], is_kept: bool, tmp_path: Path
) -> None:
    activity = Activity(record)
    with as_current(activity):
        found = samples(config(tmp_path, 2, train={"record_trace": record}), tmp_path)
    ended = time.monotonic()
    num_calls = sum(message["role"] == "tool" for trajectory in found for message in trajectory.completion)  # type: ignore[index]
    spans = [span for span in activity.take().spans() if span.work.kind == TOOL]
    assert num_calls
    assert len(spans) == (num_calls if is_kept else 0)
    assert {span.work.who for span in spans} == ({"tell"} if is_kept else set())
    assert all(activity.phase_began < span.work.began <= span.ended < ended + 0.1 for span in spans)


WAITING = """
import time
from pathlib import Path

from rlcore_agent_loop import Environment, Step

HERE = Path(__file__).parent


def wait():
    while not (HERE / "go").exists():
        time.sleep(0.01)


def search():
    wait()
    return "found"


class Game(Environment):
    def step(self, messages):
        wait()
        return Step(done=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tool search", "environment Game"])
def test_a_run_knows_what_its_workers_samples_wait_for(what: str, tmp_path: Path) -> None:
    settings, mine = config(tmp_path, 1), tmp_path / "waiting.py"
    mine.write_text(WAITING)
    (tmp_path / "always.py").write_text(MINE.partition("class Tell")[0] + ALWAYS_SEARCH)
    agent = settings["plugins"]["agent_loop"]
    agent |= {"tools": {"search": {"fn": f"{mine}:search"}}, "parser": f"{tmp_path / 'always.py'}:always"}
    if what == "environment Game":
        agent |= {"environment": {"fn": f"{mine}:Game"}, "parser": "hermes", "children": 9}
    activity, seen = Activity("all"), list[Any]()

    def look() -> None:
        end = time.monotonic() + 60
        while not seen and time.monotonic() < end:
            time.sleep(0.02)
            seen.extend(status_of(activity, 0.0).waiting)
        (tmp_path / "go").touch()

    began, looking = time.time(), threading.Thread(target=look)
    looking.start()
    try:
        with as_current(activity):
            found = samples(settings, tmp_path)
    finally:
        looking.join()
    [waiting] = seen
    assert f"{waiting.kind} {waiting.who}" == what
    assert 1 <= waiting.samples <= len(found)
    assert began - 0.1 < waiting.oldest < time.time()
    assert activity.open_work() == []
    spans = [span for span in activity.take().spans() if f"{span.work.kind} {span.work.who}" == what]
    assert {span.work.sample for span in spans} == {trajectory.id.unit() for trajectory in found}


SETTINGS = AgentLoopSettings(
    tools={"double": ToolSettings(f"{__file__}:double")}, describe_tools="never", max_conversations=5, children=1
)


def double(a: int) -> int:
    return 2 * a


def counting(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
    response = call("double", a=len(ids) + sample) if turn <= sample else f"It is {len(ids)}."
    return [*response.encode(), END]


def test_conversations_in_workers_are_those_on_the_loop_of_the_run() -> None:
    prompts = [make_prompt(index) for index in range(4)]
    here = talk(ScriptedPolicy(counting), SETTINGS, num_samples=3, prompts=prompts)
    there = talk(ScriptedPolicy(counting), replace(SETTINGS, workers=3), num_samples=3, prompts=prompts)
    assert sorted(trajectory.turns for trajectory in here.trajectories) == [1] * 4 + [2] * 4 + [3] * 4
    assert contents_of(there.trajectories) == contents_of(here.trajectories)
    assert there.metrics == here.metrics


def test_a_cancelled_rollout_withdraws_its_workers_requests() -> None:
    policy = ScriptedPolicy(counting, seconds=60.0)
    settings = replace(SETTINGS, workers=2, time_s=0.05)
    found = talk(policy, settings, num_samples=2, prompts=[make_prompt(0), make_prompt(1)])
    assert [trajectory.info["ended_by"] for trajectory in found.trajectories] == ["time_s"] * 4
    assert len(policy.cancelled) == 2


def test_what_the_policy_raises_ends_a_rollout_in_workers() -> None:
    def broken(sample: int, turn: int, ids: tuple[int, ...]) -> list[int]:
        raise WorkerError("rollout[0]: no more")

    with pytest.raises(WorkerError, match=r"rollout\[0\]: no more"):
        talk(ScriptedPolicy(broken), replace(SETTINGS, workers=2))


@pytest.mark.fault
def test_conversations_in_processes_are_those_on_the_loop_of_the_run(tmp_path: Path) -> None:
    here = samples(config(tmp_path, 0), tmp_path)
    (tmp_path / "pids").unlink()
    there = samples(config(tmp_path, 2), tmp_path)
    assert contents_of(there) == contents_of(here)
    assert len(set((tmp_path / "pids").read_text().split())) == 2, "both workers had some"


@pytest.mark.fault
def test_conversations_of_a_killed_worker_are_begun_again_and_each_sample_comes_once(tmp_path: Path) -> None:
    there = samples(config(tmp_path, 2, dies="once"), tmp_path)
    assert (tmp_path / "died").exists()
    (tmp_path / "pids").unlink()
    here = samples(config(tmp_path, 0, dies="once"), tmp_path)
    assert contents_of(there) == contents_of(here)


@pytest.mark.fault
def test_a_conversation_that_kills_every_worker_ends_the_run_by_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"agent\[\d\].*conversations \(rows/.*had lost a worker before"):
        samples(config(tmp_path, 2, dies="always"), tmp_path)


@pytest.mark.fault
def test_without_restarts_a_run_whose_last_worker_died_ends_by_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"agent\[0\]"):
        samples(config(tmp_path, 1, dies="once", cluster={"max_restarts": 0}), tmp_path)


@pytest.mark.real
def test_workers_on_ray_roll_out_what_the_loop_of_the_run_does(tmp_path: Path) -> None:
    program = (
        "import asyncio, json, pathlib, pickle, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_agent_workers import config, samples, contents_of\n"
        "directory = pathlib.Path(sys.argv[1])\n"
        "settings = config(directory, 1)\n"
        "settings['plugins']['ray'] = {'object_store_gib': 0.1}\n"
        "found = contents_of(samples(settings, directory, leaving=True))\n"
        "(directory / 'found').write_bytes(pickle.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    there = pickle.loads((tmp_path / "found").read_bytes())
    assert there == contents_of(samples(config(tmp_path, 0), tmp_path))
    assert set((tmp_path / "pids").read_text().split()) > {str(os.getpid())}, "one ran here, the other did not"
