"""Rights of reward functions, and records of their calls: post-processing, the log, limits, settings."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.config import EvalConfig, RewardFunctionConfig, RunConfig
from rlcore.contracts.call_log import CallLog
from rlcore.errors import ConfigError, PluginError
from rlcore.errors.redaction import remember_variable
from rlcore.reward.functions import FunctionRewards, build_function_rewards
from rlcore.testing.here import HereChildren
from rlcore.testing.rewards import make_trajectory, reward_context, score_all, score_rewards, use_rewards
from rlcore.types import Lane, Reward, RewardStatus, ScoredTrajectory

FORMS = str(Path(__file__).parent.parent / "scorers" / "forms.py")
GROUP = RunConfig(eval=EvalConfig(samples_per_prompt=4))
TEXTS = ["ab", "a", "abc", "abcde"]
function = partial(RewardFunctionConfig, children=1)


def group(**settings: Any) -> list[Reward]:
    """The rewards of a group of four samples, scored by their length."""
    functions = {"f": function(f"{FORMS}:only_completions", **settings)}
    trajectories = [make_trajectory(0, sample, text) for sample, text in enumerate(TEXTS)]
    found = score_rewards(functions, trajectories, Lane.EVAL, config=GROUP)
    return [found["test/0", sample, 0] for sample in range(4)]


@pytest.mark.slow
def test_a_function_turns_the_scores_of_a_group_into_others() -> None:
    rewards = group(post_process=f"{FORMS}:centred")
    assert [reward.score for reward in rewards] == [-0.75, -1.75, 0.25, 2.25]
    assert [reward.info["raw_score"] for reward in rewards] == [2.0, 1.0, 3.0, 5.0]


@pytest.mark.slow
def test_a_function_that_returns_too_few_scores_fails_its_group() -> None:
    for reward in group(post_process=f"{FORMS}:too_few"):
        assert reward.status is RewardStatus.FAILED
        assert reward.info["error"] == "f: post_process: returned a list of 3 for 4 samples"


LATER_TRIES = {"raises": (1.0, 0.0), "scores all": (7.0, 7.0), "fails another": (7.0, 0.0)}


@pytest.mark.parametrize("later", LATER_TRIES)
def test_a_later_try_takes_no_score_of_a_group_away(tmp_path: Path, later: str) -> None:
    (tmp_path / "own.py").write_text(
        "calls = []\n"
        "async def own(trajectories, later):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 1:\n"
        "        return [1.0, float('nan'), 0.0, 0.0]\n"
        "    if later == 'raises':\n"
        "        raise ConnectionError('503')\n"
        "    return [7.0, 7.0, 7.0, 7.0 if later == 'scores all' else float('nan')]\n"
    )
    own = function(f"{tmp_path}/own.py:own", scope="group", on_failure="retry", tries=2, kwargs={"later": later})

    async def score() -> list[ScoredTrajectory]:
        manager = build_function_rewards(reward_context({"f": own}, tmp_path, HereChildren()))
        await manager.start()
        try:
            return await score_all(manager, [make_trajectory(0, sample) for sample in range(4)])
        finally:
            await manager.close()

    found = [scored.reward for scored in sorted(asyncio.run(score()), key=lambda scored: scored.trajectory.id)]
    assert (found[0].score, found[3].score) == LATER_TRIES[later]
    assert [reward.status is RewardStatus.FAILED for reward in found] == [False, later == "raises", False, False]


@pytest.mark.slow
def test_rewards_that_look_at_groups_say_so() -> None:
    async def scope(manager: FunctionRewards) -> str:
        return manager.scope

    functions = {"f": function(f"{FORMS}:only_completions")}
    assert use_rewards(functions, scope) == "sample"
    assert use_rewards({"f": function(f"{FORMS}:only_completions", post_process=f"{FORMS}:centred")}, scope) == "group"
    assert use_rewards({"f": function(f"{FORMS}:RewardAgent")}, scope) == "group"


async def logged(tmp_path: Path, name: str, **settings: Any) -> list[dict[str, Any]]:
    """The lines that four calls of a function leave."""
    children = ChildProcesses()
    functions = {"f": function(f"{FORMS}:{name}", log_calls=True, **settings), "g": function(f"{FORMS}:async_plain")}
    manager = build_function_rewards(reward_context(functions, tmp_path, children, config=GROUP))
    try:
        await manager.start()
        await score_all(manager, [make_trajectory(0, i, text) for i, text in enumerate(TEXTS)], Lane.EVAL)
    finally:
        await manager.close()
        await children.close()
    return [json.loads(line) for line in (tmp_path / "reward_calls.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_calls_are_kept_with_query_response_score_and_latency(tmp_path: Path) -> None:
    for name, scores in (("only_completions", [2.0, 1.0, 3.0, 5.0]), ("async_plain", [1.0] * 4)):
        directory = tmp_path / name
        lines = sorted(asyncio.run(logged(directory, name)), key=lambda record: record["id"])
        assert [line["score"] for line in lines] == scores
        assert [line["response"] for line in lines] == TEXTS
        assert {(line["reward"], line["query"], line["status"], line["lane"]) for line in lines} == {
            ("f", "question 0", "ok", "eval")
        }
        assert all(0.0 <= line["latency_s"] < 30.0 for line in lines)


@pytest.mark.slow
def test_a_failed_call_is_kept_with_its_error_and_no_score(tmp_path: Path) -> None:
    [first, *_] = asyncio.run(logged(tmp_path, "notes_nan"))
    assert (first["status"], first["score"]) == ("failed", None)
    assert "log_metric('share'" in first["error"]


def test_secrets_are_not_written_into_the_log_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_LOGGED_TOKEN", "swordfish-9876")
    remember_variable("SOME_LOGGED_TOKEN")
    log = CallLog(tmp_path, "all", 100)
    log.record(reward="f", id="0", target="t", query="swordfish-9876", response="x", status="ok")
    log.close()
    assert "swordfish" not in (tmp_path / "reward_calls.jsonl").read_text()


def test_two_logs_that_write_to_one_file_leave_whole_lines(tmp_path: Path) -> None:
    logs = [CallLog(tmp_path, "all", 10_000) for _ in range(2)]
    for index in range(400):
        logs[index % 2].record(reward=str(index), id="0", target="t", query="q" * 999, response="x", status="ok")
    for log in logs:
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "reward_calls.jsonl").read_text().splitlines()]
    assert sorted(int(line["reward"]) for line in lines) == list(range(400))


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["main", "threads"])
def test_a_function_that_eats_memory_is_one_failed_sample_in_a_new_child(isolation: Any) -> None:
    texts = ["fine", "eat", "fine", "fine"]
    settings = {"memory_gib": 1.0, "isolation": isolation, **({"threads": 2} if isolation == "threads" else {})}
    functions = {"f": function(f"{FORMS}:hungry", **settings)}

    async def use(manager: FunctionRewards) -> tuple[list[ScoredTrajectory], dict[str, float]]:
        scored = await score_all(manager, [make_trajectory(0, i, text) for i, text in enumerate(texts)], Lane.EVAL)
        again = await score_all(manager, [make_trajectory(1, i, "fine") for i in range(4)], Lane.EVAL)
        return [*scored, *again], manager.metrics()

    scored, metrics = use_rewards(functions, use, config=GROUP)
    failures = [sample for sample in scored if sample.reward.status is not RewardStatus.OK]
    assert [failure.trajectory.id.sample for failure in failures] == [1]
    error = failures[0].reward.info["error"]
    assert re.fullmatch(r"f: \S*forms\.py:\d+: MemoryError; it may hold reward\.functions\.f\.memory_gib=1", error)
    assert metrics["reward/num_restarts"] == 1.0


@pytest.mark.slow
def test_a_function_within_its_memory_is_not_disturbed() -> None:
    functions = {"f": function(f"{FORMS}:hungry", memory_gib=1.0, kwargs={"gib": 0.25})}
    [reward] = score_rewards(functions, [make_trajectory(text="eat")]).values()
    assert reward.score == 1.0


@pytest.mark.slow
def test_a_memory_limit_that_importing_needs_more_than_is_an_error_by_name(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("held = bytearray(2**30)\ndef f(trajectory):\n    return 1.0\n")
    with pytest.raises(
        PluginError,
        match=r"large\.py:f\): .*large\.py:1: MemoryError; .*memory_gib=0\.5 is less than importing it needs",
    ):
        score_rewards({"f": function(f"{tmp_path / 'large.py'}:f", memory_gib=0.5)}, [make_trajectory()])
    with pytest.raises(ConfigError, match=r"memory_gib=0\.001: its process holds 0\.\d+ GiB before"):
        score_rewards({"f": function(f"{tmp_path / 'large.py'}:f", memory_gib=0.001)}, [make_trajectory()])


@pytest.mark.slow
def test_a_memory_limit_of_an_async_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions\.f\.memory_gib: .* is async"):
        score_rewards({"f": function(f"{FORMS}:async_plain", memory_gib=1.0)}, [make_trajectory()])


HANGING_CLASS = """
import time
class C:
    def setup(self):
        time.sleep(60)
    def score(self, trajectory): ...
"""
ASYNC_CLASS = """
import asyncio
class C:
    async def setup(self):
        await asyncio.sleep(60)
    async def score(self, trajectory): ...
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("source", "where"), [("import time; time.sleep(60)", "1 in <module>"), (HANGING_CLASS, "5 in setup")]
)
def test_a_start_that_hangs_names_the_function_and_the_line(tmp_path: Path, source: str, where: str) -> None:
    (tmp_path / "slow.py").write_text(source)
    message = rf"reward function 'f' \(.*slow\.py:C\): .*not ready within 2\.5 s; now at .*slow\.py:{where}; .*start_s"
    with pytest.raises(PluginError, match=message):
        score_rewards({"f": function(f"{tmp_path / 'slow.py'}:C", start_s=2.5)}, [make_trajectory()])


@pytest.mark.fault
def test_a_setup_of_an_async_class_that_never_ends_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(ASYNC_CLASS)
    with pytest.raises(PluginError, match=r"slow\.py:C\): setup has not ended within 2\.5 s; .*start_s"):
        score_rewards({"f": function(f"{tmp_path / 'slow.py'}:C", start_s=2.5)}, [make_trajectory()])


REPORTS_ITS_ENVIRONMENT = """
import os

def unnamed(completions, **columns):
    assert os.environ["HOME"] and os.environ["PATH"]
    return [float("RLCORE_TEST_API_KEY" in os.environ)] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("env", "score"), [((), 0.0), (("OTHER",), 0.0), (("RLCORE_TEST_API_KEY",), 1.0)])
def test_children_get_the_keys_that_are_named_for_them_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: tuple[str, ...], score: float
) -> None:
    monkeypatch.setenv("RLCORE_TEST_API_KEY", "a-key-0123456789")
    (tmp_path / "mine.py").write_text(REPORTS_ITS_ENVIRONMENT)
    functions = {"f": function(f"{tmp_path}/mine.py:unnamed", env=env)}
    found = score_rewards(functions, [make_trajectory(0, 0, "ab")], Lane.EVAL)
    [reward] = found.values()
    assert (reward.status, reward.score) == (RewardStatus.OK, score)
