"""The core's reward manager, as a run uses it: real children, real files."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.config import (
    EvalConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from rlcore.errors import ConfigError, PluginError, RewardError
from rlcore.reward import FunctionRewards, build_function_rewards
from rlcore.reward.canary import check_canary
from rlcore.testing.rewards import (
    check_reward_manager,
    make_prompt,
    make_trajectory,
    reward_context,
    score_all,
)
from rlcore.tokens import ByteTokens
from rlcore.types import FrozenDict, Lane, Reward, RewardStatus, Scored, Trajectory

REWARDS = """
import asyncio, os, re, time
from rlcore.types import FrozenDict, Reward

def length(trajectory):
    return len(trajectory.text())

def last_token(trajectory):
    return int(trajectory.token_ids[-1]) + 1000 * trajectory.id.sample

def trl(prompts, completions, answer, **columns):
    return [float(a in c) for a, c in zip(answer, completions)]

def trl_seen(prompts, completions, completion_ids, trainer_state, level, **kwargs):
    assert isinstance(prompts, list) and isinstance(completions, list)
    seen[:] = [prompts, completions, completion_ids, trainer_state.global_step, level, sorted(kwargs)]
    return [Reward(1.0, info=FrozenDict({"seen": repr(seen)}))]
seen = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(ground_truth in solution_str)
    return {"score": score, "pred": solution_str[-1:], "extra": repr(extra_info), "from": data_source}

def by_kwargs(trajectory, bonus, factor=1.0):
    return bonus * factor

class Counted:
    def __init__(self, start=0):
        self.count = start
    def setup(self):
        self.ready = True
    def score(self, trajectory):
        assert self.ready
        return self.count

def rank(completions, **columns):
    longest = max(map(len, completions))
    return [len(c) / longest for c in completions]

def batch_size(trajectories):
    return [len(trajectories)] * len(trajectories)

def raises_on_bad(trajectory):
    if "bad" in trajectory.text():
        raise ValueError("this one is bad\\nsecond line")
    return 1.0

def skips(completions, **columns):
    return [None if "skip" in each else 1.0 for each in completions]

def mutates(completions, tags, **columns):
    tags[0].append("seen")
    return [float(len(tags[0]))]

async def mutates_async(completions, tags, **columns):
    tags[0].append("seen")
    return [float(len(tags[0]))]

def tokens(trajectory):
    return Reward(2.0, parts=FrozenDict({"format": 0.5}), token_scores=trajectory.loss_mask.astype("float32"))

def slow(trajectory, seconds=0.2):
    time.sleep(seconds)
    return 1.0

async def async_slow(trajectory, seconds=0.2):
    await asyncio.sleep(seconds)
    return float(trajectory.id.sample)

async def async_raises(trajectory):
    raise KeyError("gone")

async def async_deaf(trajectory):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if "deaf" not in trajectory.text():
                raise

async def blocks(trajectory):
    await asyncio.sleep(0)
    time.sleep(0.8)
    return 1.0

class AsyncJudge:
    def __init__(self, base):
        self.base = base
    async def setup(self):
        self.open = True
    async def score(self, prompts, completions, **columns):
        assert self.open
        await asyncio.sleep(0)
        return [self.base + len(c) for c in completions]
    async def close(self):
        self.open = False

def flaky(trajectory, marker):
    count = int(open(marker).read() or 0) if os.path.exists(marker) else 0
    open(marker, "w").write(str(count + 1))
    if count < 2:
        raise ConnectionError("come back later")
    return 1.0

def with_alarm(trajectory):
    import signal
    def ring(*_):
        raise TimeoutError("rang")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError:
        return 0.25

def never(trajectory):
    return 0

def imported(trajectory):
    import sys
    heavy = {"torch", "transformers", "omegaconf", "pluggy", "rlcore.plan", "rlcore.config"}
    return Reward(1.0, info=FrozenDict({"heavy": sorted(heavy & set(sys.modules))}))

nested = (lambda: lambda trajectory: 1.0)()
anonymous = lambda trajectory: 1.0
def two_arguments(a, b): return 1.0
def star(*args, **kwargs): return 1.0
class NoScore: pass
not_callable = 3
"""


@pytest.fixture
def rewards(tmp_path: Path) -> str:
    """Path of a file with reward functions."""
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


CONFIG = RunConfig(rollout=RolloutConfig(samples_per_prompt=4), train=TrainConfig(prompts_per_step=4))


def with_rewards(
    functions: Mapping[str, RewardFunctionConfig],
    use: Callable[[FunctionRewards], Awaitable[Any]],
    reward: RewardConfig | None = None,
    config: RunConfig = CONFIG,
) -> Any:
    """What `use` makes of a started manager."""

    async def main() -> Any:
        children = ChildProcesses()
        manager = build_function_rewards(reward_context(functions, Path("unused"), children, reward, config))
        try:
            await manager.start()
            return await use(manager)
        finally:
            await manager.close()
            assert children.pids == [], "the manager ends its own children"
            await children.close()

    return asyncio.run(main())


def score(
    functions: Mapping[str, RewardFunctionConfig],
    trajectories: Sequence[Trajectory],
    lane: Lane = Lane.TRAIN,
    reward: RewardConfig | None = None,
    config: RunConfig = CONFIG,
) -> dict[tuple[str, int, int], Reward]:
    """The reward of each trajectory, by prompt, sample and part, from one child a function."""

    async def use(manager: FunctionRewards) -> list[Scored]:
        return await score_all(manager, trajectories, lane)

    scored = with_rewards(functions, use, reward, config)
    return {
        (each.trajectory.id.prompt, each.trajectory.id.sample, each.trajectory.id.part): each.reward for each in scored
    }


def one(rewards: str, name: str, trajectory: Trajectory | None = None, **settings: Any) -> Reward:
    """The reward that one function gives one trajectory."""
    [reward] = score(
        {"f": RewardFunctionConfig(f"{rewards}:{name}", **settings)}, [trajectory or make_trajectory()]
    ).values()
    return reward


def test_functions_are_weighed_summed_and_reported_by_name(rewards: str) -> None:
    functions = {
        "length": RewardFunctionConfig(f"{rewards}:length", weight=0.5),
        "bonus": RewardFunctionConfig(f"{rewards}:by_kwargs", weight=2.0, kwargs={"bonus": 3.0, "factor": 2.0}),
    }
    [reward] = score(functions, [make_trajectory(text="four")]).values()
    assert reward.status is RewardStatus.OK
    assert dict(reward.parts) == {"length": 4.0, "bonus": 6.0}
    assert reward.score == 0.5 * 4 + 2.0 * 6
    assert reward.latency_s > 0


def test_list_style_functions_get_columns_ids_and_state_by_name(rewards: str) -> None:
    trajectory = make_trajectory(make_prompt(3, level=7, other="o"), text="hi", versions=((0, 5),))
    seen = one(rewards, "trl_seen", trajectory).info["seen"]
    assert seen == repr(
        [["question 3"], ["hi"], [[104, 105]], 5, [7], ["answer", "ground_truth", "other", "solution", "source"]]
    )


def test_message_lists_stay_lists_where_the_data_has_messages(rewards: str) -> None:
    prompt = replace(make_prompt(0, level=1), conversational=True)
    seen = one(rewards, "trl_seen", make_trajectory(prompt, text="hi")).info["seen"]
    assert "[[{'role': 'user', 'content': 'question 0'}]], [[{'role': 'assistant', 'content': 'hi'}]]" in seen
    messages = (FrozenDict({"role": "assistant", "content": "a"}), FrozenDict({"role": "tool", "content": "b"}))
    trajectory = replace(make_trajectory(make_prompt(0, level=1)), completion=messages)
    seen = one(rewards, "trl_seen", trajectory).info["seen"]
    assert "['question 0'], [[{'role': 'assistant', 'content': 'a'}, {'role': 'tool', 'content': 'b'}]]" in seen


def test_compute_score_is_called_with_source_text_truth_and_extra(rewards: str) -> None:
    prompt = make_prompt(0, answer="42", source="maths", extra_info={"index": 9})
    reward = one(rewards, "compute_score", make_trajectory(prompt, text="it is 42"))
    assert reward.score == 1.0
    assert dict(reward.info) == {"pred": "2", "answer": "2", "extra": "{'index': 9}", "from": "maths"}


def test_the_answer_also_goes_by_the_name_of_the_users_column(rewards: str, tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text("def f(completions, target, **_):\n    return [float(t) for t in target]\n")
    config = replace(CONFIG, eval=EvalConfig(sources={"test": SourceConfig(answer_column="target")}))
    functions = {"f": RewardFunctionConfig(f"{tmp_path / 'target.py'}:f")}
    [reward] = score(functions, [make_trajectory(make_prompt(0, answer="2.5"))], config=config).values()
    assert reward.score == 2.5
    [reward] = score(functions, [make_trajectory()]).values()
    assert "needs the columns target" in reward.info["error"]


def test_a_class_is_made_set_up_and_asked(rewards: str) -> None:
    assert one(rewards, "Counted", kwargs={"start": 5}).score == 5.0


def test_an_async_class_runs_on_the_loop_with_its_whole_life_cycle(rewards: str) -> None:
    assert one(rewards, "AsyncJudge", make_trajectory(text="abc"), kwargs={"base": 10}).score == 13.0


def test_group_scope_sees_whole_groups_and_batch_scope_everything(rewards: str) -> None:
    functions = {
        "rank": RewardFunctionConfig(f"{rewards}:rank", scope="group"),
        "size": RewardFunctionConfig(f"{rewards}:batch_size", scope="batch"),
    }
    texts = {0: ["a", "ab", "abc", "abcd"], 1: ["abcdefgh", "ab"]}
    trajectories = [make_trajectory(p, s, text) for p, each in texts.items() for s, text in enumerate(each)]
    random.Random(0).shuffle(trajectories)
    found = score(functions, trajectories)
    assert [found["test/0", sample, 0].parts["rank"] for sample in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [found["test/1", sample, 0].parts["rank"] for sample in range(2)] == [1.0, 0.25]
    assert {each.parts["size"] for each in found.values()} == {6.0}


def test_all_parts_of_a_sample_get_the_reward_of_its_last_part(rewards: str) -> None:
    whole = make_trajectory(0, 0)
    parts = [
        replace(make_trajectory(0, 0, text), id=replace(whole.id, part=part), num_parts=num_parts)
        for part, text in enumerate(["first", "second", "the third"])
        for num_parts in (3,)
    ]
    found = score({"f": RewardFunctionConfig(f"{rewards}:length")}, [parts[2], parts[0], parts[1]])
    assert [found["test/0", 0, part].score for part in range(3)] == [9.0, 9.0, 9.0]
    unknown = [replace(each, num_parts=0) for each in parts]
    found = score({"f": RewardFunctionConfig(f"{rewards}:length")}, [unknown[2], unknown[0], unknown[1]])
    assert [found["test/0", 0, part].score for part in range(3)] == [9.0, 9.0, 9.0]
    with pytest.raises(PluginError, match="every part must come once"):
        score({"f": RewardFunctionConfig(f"{rewards}:length")}, [whole, whole])
    with pytest.raises(PluginError, match="num_parts=3; 2 came"):
        score({"f": RewardFunctionConfig(f"{rewards}:length")}, parts[:2])


def test_scores_per_token_and_parts_within_a_function_are_kept(rewards: str) -> None:
    reward = one(rewards, "tokens", make_trajectory(text="abc"), weight=0.5)
    assert reward.score == 1.0
    assert dict(reward.parts) == {"f": 2.0, "f/format": 0.5}
    assert reward.token_scores is not None
    expected = make_trajectory(text="abc").loss_mask * 0.5
    np.testing.assert_array_equal(reward.token_scores, expected.astype(np.float32))


def test_a_sample_is_scored_when_it_finishes_and_not_when_the_stream_ends(rewards: str) -> None:
    async def use(manager: FunctionRewards) -> float:
        first_scored = asyncio.Event()

        async def stream() -> AsyncIterator[Trajectory]:
            yield make_trajectory(0, 0)
            await asyncio.wait_for(first_scored.wait(), 10)
            yield make_trajectory(0, 1)

        num = 0
        async with aclosing(manager.score(stream(), Lane.TRAIN)) as results:  # type: ignore[type-var]
            async for _ in results:
                num += 1
                first_scored.set()
        return num

    assert with_rewards({"f": RewardFunctionConfig(f"{rewards}:length")}, use) == 2


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
        "slow": RewardFunctionConfig(f"{tmp_path / 'own.py'}:own"),
        "fast": RewardFunctionConfig(f"{rewards}:last_token", isolation="threads", threads=8),
    }
    found = score(functions, trajectories)
    assert len(found) == 1000
    for each in trajectories:
        wanted = int(each.token_ids[-1]) + 1000 * each.id.sample
        reward = found[each.id.prompt, each.id.sample, 0]
        assert dict(reward.parts) == {"slow": wanted, "fast": wanted}


def test_one_exception_fails_one_sample_and_names_its_cause(rewards: str) -> None:
    trajectories = [make_trajectory(0, sample, "bad" if sample == 2 else "good") for sample in range(4)]
    found = score({"acc": RewardFunctionConfig(f"{rewards}:raises_on_bad")}, trajectories)
    assert [found["test/0", sample, 0].status.value for sample in range(4)] == ["ok", "ok", "failed", "ok"]
    failed = found["test/0", 2, 0]
    assert failed.score == 0.0
    assert failed.info["error"] == "acc: ValueError: this one is bad"
    assert failed.info["failed"] == {"acc": "ValueError: this one is bad"}


def test_a_skipping_function_leaves_the_sum_and_all_skipping_is_a_failure(rewards: str) -> None:
    functions = {
        "a": RewardFunctionConfig(f"{rewards}:skips", weight=0.5),
        "b": RewardFunctionConfig(f"{rewards}:length"),
    }
    [reward] = score(functions, [make_trajectory(text="skip")]).values()
    assert (reward.status, reward.score, dict(reward.parts)) == (RewardStatus.OK, 4.0, {"b": 4.0})
    assert reward.info["skipped"] == ["a"]
    [reward] = score({"a": functions["a"]}, [make_trajectory(text="skip")]).values()
    assert (reward.status, reward.info["error"]) == (RewardStatus.FAILED, "every function skipped it")


@pytest.mark.parametrize("name", ["mutates", "mutates_async"])
def test_what_a_function_does_to_its_inputs_reaches_nobody(rewards: str, name: str) -> None:
    tags: list[str] = []
    prompt = make_prompt(0, tags=tags)
    functions = {"a": RewardFunctionConfig(f"{rewards}:{name}"), "b": RewardFunctionConfig(f"{rewards}:{name}")}
    found = score(functions, [make_trajectory(prompt, sample) for sample in range(4)])
    assert [dict(each.parts) for each in found.values()] == [{"a": 1.0, "b": 1.0}] * 4
    assert tags == []


def test_a_sync_function_past_its_deadline_fails_alone_and_the_pool_is_whole_again(
    rewards: str, tmp_path: Path
) -> None:
    (tmp_path / "hang.py").write_text(
        "def hang(trajectory):\n    while 'hang' in trajectory.text():\n        pass\n    return 1.0\n"
    )
    trajectories = [make_trajectory(0, sample, "hang" if sample == 0 else "fine") for sample in range(8)]
    functions = {"f": RewardFunctionConfig(f"{tmp_path / 'hang.py'}:hang", deadline_s=1.0, children=1)}

    async def use(manager: FunctionRewards) -> tuple[list[Scored], dict[str, float], list[Scored]]:
        return await score_all(manager, trajectories), manager.metrics(), await score_all(manager, trajectories[1:])

    first, metrics, second = with_rewards(functions, use)
    failures = {each.trajectory.id.sample: each.reward.info["error"] for each in first if each.reward.score != 1.0}
    assert failures == {0: "f: no result within 1 s"}
    assert metrics["reward/num_restarts"] == 1.0
    assert [each.reward.score for each in second] == [1.0] * 7


def test_the_deadline_of_a_sample_does_not_run_while_it_waits_for_a_child(rewards: str) -> None:
    trajectories = [make_trajectory(0, sample) for sample in range(8)]
    functions = {"f": RewardFunctionConfig(f"{rewards}:slow", deadline_s=0.9, children=1, kwargs={"seconds": 0.2})}
    found = score(functions, trajectories)
    assert {each.status for each in found.values()} == {RewardStatus.OK}


def test_a_reward_child_imports_nothing_heavy_of_ours(rewards: str) -> None:
    assert one(rewards, "imported").info["heavy"] == []


def test_a_start_that_fails_leaves_no_child_whichever_function_is_to_blame(rewards: str) -> None:
    functions = {
        "good": RewardFunctionConfig(f"{rewards}:length", children=3),
        "bad": RewardFunctionConfig(f"{rewards}:two_arguments"),
        "async": RewardFunctionConfig(f"{rewards}:async_slow"),
    }
    with pytest.raises(PluginError, match="reward function 'bad'"):
        with_rewards(functions, lambda manager: score_all(manager, [make_trajectory()]))


def test_signal_alarm_works_in_a_sync_function(rewards: str) -> None:
    assert one(rewards, "with_alarm").score == 0.25


def test_an_async_function_that_fails_or_never_ends_fails_its_sample(rewards: str) -> None:
    assert one(rewards, "async_raises").info["error"] == "f: KeyError: 'gone'"
    assert (
        one(rewards, "async_slow", kwargs={"seconds": 60}, deadline_s=0.2).info["error"] == "f: no result within 0.2 s"
    )
    assert one(rewards, "async_deaf", deadline_s=0.2).info["error"] == "f: no result within 0.2 s"


def test_an_async_function_that_blocks_the_loop_is_warned_of_by_name_and_others_finish(
    rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    functions = {
        "stopper": RewardFunctionConfig(f"{rewards}:blocks"),
        "good": RewardFunctionConfig(f"{rewards}:async_slow", kwargs={"seconds": 0.01}),
    }

    async def use(manager: FunctionRewards) -> tuple[list[Scored], dict[str, float]]:
        return await score_all(manager, [make_trajectory()]), manager.metrics()

    [scored], metrics = with_rewards(functions, use)
    assert scored.reward.status is RewardStatus.OK
    warnings = [each for each in caplog.messages if "event loop" in each]
    assert len(warnings) == 1
    assert "async reward function 'stopper'" in warnings[0]
    assert "rewards.py:" in warnings[0], "says where it is"
    assert 0.7 < metrics["perf/loop_blocked_s"] < 10


def test_retry_asks_again_within_the_deadline(rewards: str, tmp_path: Path) -> None:
    settings = {"on_failure": "retry", "kwargs": {"marker": str(tmp_path / "marker")}}
    assert one(rewards, "flaky", **settings, tries=3).score == 1.0
    (tmp_path / "marker").unlink()
    assert one(rewards, "flaky", **settings, tries=2).info["error"] == "f: ConnectionError: come back later"
    (tmp_path / "marker").unlink()
    reward = one(rewards, "flaky", **settings, tries=100, deadline_s=0.01)
    assert reward.status is RewardStatus.FAILED
    assert int((tmp_path / "marker").read_text()) < 5


def test_abort_stops_at_the_first_failure_and_a_spent_budget_names_functions_and_causes(rewards: str) -> None:
    trajectories = [make_trajectory(0, sample, "bad" if sample < 3 else "good") for sample in range(16)]
    with pytest.raises(
        RewardError, match="acc: ValueError: this one is bad; the function that failed has on_failure=abort"
    ):
        score({"acc": RewardFunctionConfig(f"{rewards}:raises_on_bad", on_failure="abort")}, trajectories)
    functions = {"acc": RewardFunctionConfig(f"{rewards}:raises_on_bad")}
    with pytest.raises(RewardError, match=r"2 of 16 samples failed, more than .* \(x2\)"):
        score(functions, trajectories)
    found = score(functions, trajectories, Lane.EVAL)
    assert sum(each.status is RewardStatus.FAILED for each in found.values()) == 3, "evaluation spends no budget"


@pytest.mark.parametrize(
    ("name", "settings", "kind", "message"),
    [
        ("anonymous", {}, PluginError, "is a lambda"),
        ("nested", {}, PluginError, "is a lambda"),
        ("two_arguments", {}, PluginError, r"has the signature \(a, b\); accepted are f\(prompts, completions"),
        ("star", {}, PluginError, "accepted are"),
        ("NoScore", {}, PluginError, "has no method score"),
        ("not_callable", {}, PluginError, "is no function and no class, found int"),
        ("lenght", {}, PluginError, "did you mean 'length'"),
        ("by_kwargs", {}, PluginError, "has the signature"),
        ("by_kwargs", {"kwargs": {"bonus": 1, "fctor": 2}}, ConfigError, r"kwargs\.fctor.*did you mean 'factor'"),
        ("Counted", {"kwargs": {"begin": 1}}, ConfigError, r"reward\.functions\.f\.kwargs: Counted"),
        ("length", {"scope": "group"}, PluginError, "scope=group scores several samples in a call"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_at_start(
    rewards: str, name: str, settings: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        one(rewards, name, **settings)


def test_what_a_file_raises_when_it_is_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    with pytest.raises(
        PluginError, match=r"reward function 'f' \(.*broken.py:x\): ModuleNotFoundError: No module named"
    ):
        one(str(tmp_path / "broken.py"), "x")


def test_the_canary_lets_a_right_reward_pass_and_refuses_a_wrong_one(rewards: str) -> None:
    prompts = [make_prompt(index, answer=str(index)) for index in range(3)]

    def check(name: str, template: str, least: float = 0.5) -> None:
        functions = {"acc": RewardFunctionConfig(f"{rewards}:{name}")}
        config = RewardConfig(canary=template, canary_min=least)
        with_rewards(functions, lambda manager: check_canary(manager, prompts, config, ByteTokens()), config)

    check("trl", "the answer is \\boxed{{answer}}")
    with pytest.raises(RewardError, match=r"known-good response 'is .' .* scored 0 \(acc=0\); needs at least"):
        check("never", "is {answer}")
    with pytest.raises(RewardError, match="ValueError: this one is bad"):
        check("raises_on_bad", "bad {answer}")


def test_service_bound_says_when_calls_wait_for_children(rewards: str) -> None:
    async def use(manager: FunctionRewards) -> list[float]:
        found = []
        for num in (1, 10):
            await score_all(manager, [make_trajectory(0, sample) for sample in range(num)])
            found.append(manager.metrics()["reward/service_bound"])
        return found

    functions = {"f": RewardFunctionConfig(f"{rewards}:slow", children=1, kwargs={"seconds": 0.1})}
    assert with_rewards(functions, use) == [0.0, 1.0]


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

    functions = {"f": RewardFunctionConfig(f"{rewards}:slow", children=1, kwargs={"seconds": 0.05})}
    order = with_rewards(functions, use)
    assert len(order) == 13
    assert max(index for index, name in enumerate(order) if name == "eval") <= 6, order


def test_blocking_calls_run_at_the_same_time_on_threads(rewards: str) -> None:
    functions = {
        "f": RewardFunctionConfig(f"{rewards}:slow", isolation="threads", threads=256, kwargs={"seconds": 1.0})
    }

    async def use(manager: FunctionRewards) -> float:
        began = time.monotonic()
        scored = await score_all(
            manager, [make_trajectory(prompt, sample) for prompt in range(64) for sample in range(8)]
        )
        assert {each.reward.status for each in scored} == {RewardStatus.OK}
        assert len(scored) == 512
        return time.monotonic() - began

    took = with_rewards(functions, use)
    print(f"512 calls of one second on 2 x 256 threads: {took:.2f} s")
    assert took < 20, "one after the other they take 512 s"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("length", lambda each: len(each.text())),
        ("async_slow", lambda each: each.id.sample),
        ("trl", lambda each: float(each.prompt.answer in each.text())),
    ],
)
def test_the_manager_keeps_the_contract_of_reward_managers(
    rewards: str, name: str, expected: Callable[[Trajectory], float], tmp_path: Path
) -> None:
    functions = {"f": RewardFunctionConfig(f"{rewards}:{name}")}
    report = check_reward_manager(build_function_rewards, reward_context(functions, tmp_path), expected=expected)
    assert report.problems == ()


def test_the_conformance_check_knows_failing_samples(rewards: str, tmp_path: Path) -> None:
    functions = {"f": RewardFunctionConfig(f"{rewards}:raises_on_bad")}
    report = check_reward_manager(
        build_function_rewards, reward_context(functions, tmp_path), failing=[make_trajectory(9, 0, "bad")]
    )
    assert report.problems == ()


class Careless(FunctionRewards):
    """A manager that breaks the contract in several ways."""

    async def score(self, stream: AsyncIterator[Trajectory], lane: Lane) -> AsyncIterator[Scored]:
        given = [each async for each in stream]
        for each, other in zip(given, given[1:] + given[:1], strict=True):
            yield Scored(each, Reward(float(len(other.text()))))

    def metrics(self) -> dict[str, float]:
        return {"reward/x": float("nan")}

    def state(self) -> dict[str, Any]:
        return {"when": time.monotonic()}


def test_the_conformance_check_finds_what_is_wrong(rewards: str, tmp_path: Path) -> None:
    functions = {"f": RewardFunctionConfig(f"{rewards}:length")}
    trajectories = [make_trajectory(0, sample, "x" * (1 + sample)) for sample in range(4)]
    report = check_reward_manager(
        Careless, reward_context(functions, tmp_path), trajectories, [make_trajectory(5)], lambda t: len(t.text())
    )
    text = " | ".join(report.problems)
    for problem in ("another one's reward", "must be FAILED", "a finite float is needed", "not what restore()"):
        assert problem in text
