"""The core's reward manager, as a run uses it: signatures, scopes, values, what is refused."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config import (
    EvalConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import ConfigError, PluginError, RewardError
from rlcore.reward.canary import check_canary
from rlcore.reward.functions import FunctionRewards
from rlcore.testing.rewards import make_prompt, make_trajectory, score_rewards, use_rewards
from rlcore.types import FrozenDict, Lane, Reward, RewardStatus, Trajectory

pytestmark = pytest.mark.usefixtures("rewards_in_process")

function = partial(RewardFunctionConfig, children=1)
"""A reward function in one child, unless a test says more: each takes a fifth of a second to start."""
LOGS = ("log_extra", "log_metric")
"""Arguments of TRL's trainer for functions with **kwargs, in addition to the columns."""


@pytest.fixture
def rewards() -> str:
    """Path of a file with reward functions."""
    return str(Path(__file__).parent.parent / "scorers" / "scorers.py")


def one(rewards: str, name: str, trajectory: Trajectory | None = None, **settings: Any) -> Reward:
    """The reward that one function gives one trajectory."""
    [reward] = score_rewards(
        {"f": function(f"{rewards}:{name}", **settings)}, [trajectory or make_trajectory()]
    ).values()
    return reward


def test_functions_are_weighed_summed_and_reported_by_name(rewards: str) -> None:
    functions = {
        "length": function(f"{rewards}:length", weight=0.5),
        "bonus": function(f"{rewards}:by_kwargs", weight=2.0, kwargs={"bonus": 3.0, "factor": 2.0}),
    }
    [reward] = score_rewards(functions, [make_trajectory(text="four")]).values()
    assert reward.status is RewardStatus.OK
    assert dict(reward.components) == {"length": 4.0, "bonus": 6.0}
    assert reward.score == 0.5 * 4 + 2.0 * 6
    assert reward.latency_s > 0


def test_list_style_functions_get_columns_ids_and_state_by_name(rewards: str) -> None:
    trajectory = make_trajectory(make_prompt(3, level=7, other="o"), text="hi", versions=((0, 5),))
    seen = one(rewards, "trl_seen", trajectory).info["seen"]
    assert seen == repr(
        [["question 3"], ["hi"], [[104, 105]], 5, [7], ["answer", "ground_truth", *LOGS, "other", "solution", "source"]]
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
    config = RunConfig(eval=EvalConfig(sources={"test": SourceConfig(answer_column="target")}))
    functions = {"f": function(f"{tmp_path / 'target.py'}:f")}
    [reward] = score_rewards(functions, [make_trajectory(make_prompt(0, answer="2.5"))], config=config).values()
    assert reward.score == 2.5
    [reward] = score_rewards(functions, [make_trajectory()]).values()
    assert "needs the columns target" in reward.info["error"]


def test_a_class_is_made_set_up_and_asked(rewards: str) -> None:
    assert one(rewards, "Counted", kwargs={"start": 5}).score == 5.0


def test_an_async_class_runs_on_the_loop_with_its_whole_life_cycle(rewards: str) -> None:
    assert one(rewards, "AsyncJudge", make_trajectory(text="abc"), kwargs={"base": 10}).score == 13.0


def test_group_scope_sees_whole_groups_and_batch_scope_everything(rewards: str) -> None:
    functions = {
        "rank": function(f"{rewards}:rank", scope="group"),
        "size": function(f"{rewards}:batch_size", scope="batch"),
    }
    texts = {0: ["a", "ab", "abc", "abcd"], 1: ["abcdefgh", "ab"]}
    trajectories = [make_trajectory(p, s, text) for p, value in texts.items() for s, text in enumerate(value)]
    random.Random(0).shuffle(trajectories)
    found = score_rewards(functions, trajectories)
    assert [found["test/0", sample, 0].components["rank"] for sample in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [found["test/1", sample, 0].components["rank"] for sample in range(2)] == [1.0, 0.25]
    assert {outcome.components["size"] for outcome in found.values()} == {6.0}


@pytest.mark.fault
def test_all_parts_of_a_sample_get_the_reward_of_its_last_part(rewards: str) -> None:
    whole = make_trajectory(0, 0)
    parts = [
        replace(make_trajectory(0, 0, text), id=replace(whole.id, segment=part), num_segments=num_segments)
        for part, text in enumerate(["first", "second", "the third"])
        for num_segments in (3,)
    ]
    found = score_rewards({"f": function(f"{rewards}:length")}, [parts[2], parts[0], parts[1]])
    assert [found["test/0", 0, part].score for part in range(3)] == [9.0, 9.0, 9.0]
    unknown = [replace(part, num_segments=0) for part in parts]
    found = score_rewards({"f": function(f"{rewards}:length")}, [unknown[2], unknown[0], unknown[1]])
    assert [found["test/0", 0, part].score for part in range(3)] == [9.0, 9.0, 9.0]
    with pytest.raises(PluginError, match="every part must come once"):
        score_rewards({"f": function(f"{rewards}:length")}, [whole, whole])
    with pytest.raises(PluginError, match="num_segments=3; 2 came"):
        score_rewards({"f": function(f"{rewards}:length")}, parts[:2])


def test_scores_per_token_and_parts_within_a_function_are_kept(rewards: str) -> None:
    reward = one(rewards, "tokens", make_trajectory(text="abc"), weight=0.5)
    assert reward.score == 1.0
    assert dict(reward.components) == {"f": 2.0, "f/format": 0.5}
    assert reward.token_scores is not None
    expected = make_trajectory(text="abc").loss_mask * 0.5
    np.testing.assert_array_equal(reward.token_scores, expected.astype(np.float32))


@pytest.mark.parametrize(("scope", "together"), [("sample", 1), ("group", 4)])
def test_a_sample_is_scored_when_it_or_its_group_is_finished_and_not_when_the_stream_ends(
    scope: Any, together: int, rewards: str
) -> None:
    async def use(manager: FunctionRewards) -> float:
        first_scored = asyncio.Event()

        async def stream() -> AsyncIterator[Trajectory]:
            for sample in range(together):
                yield make_trajectory(0, sample)
            await asyncio.wait_for(first_scored.wait(), 10)
            for sample in range(together):
                yield make_trajectory(1, sample)

        num = 0
        async with aclosing(manager.score(stream(), Lane.TRAIN)) as results:  # type: ignore[type-var]
            async for _ in results:
                num += 1
                first_scored.set()
        return num

    assert use_rewards({"f": function(f"{rewards}:batch_size", scope=scope)}, use) == 2 * together


@pytest.mark.parametrize(
    ("settings", "num_failures", "lane", "ends"),
    [({}, 4, Lane.TRAIN, True), ({}, 3, Lane.TRAIN, False), ({}, 4, Lane.EVAL, False)]
    + [({"on_failure": "abort"}, 1, lane, True) for lane in Lane],
)
def test_a_spent_budget_or_abort_ends_a_step_while_others_are_still_sampled(
    settings: dict[str, Any], num_failures: int, lane: Lane, ends: bool, rewards: str
) -> None:
    """A tenth of the 32 samples of a step may fail in training."""

    async def use(manager: FunctionRewards) -> int:
        last_seen = asyncio.Event()

        async def stream() -> AsyncIterator[Trajectory]:
            for prompt in range(num_failures):
                yield make_trajectory(prompt, 0, "bad")
            await asyncio.wait_for(last_seen.wait(), 10)

        num = 0
        async with aclosing(manager.score(stream(), lane)) as results:  # type: ignore[type-var]
            async for _ in results:
                num += 1
                if num == num_failures:
                    last_seen.set()
        return num

    functions = {"acc": function(f"{rewards}:raises_on_bad", **settings)}
    if not ends:
        assert use_rewards(functions, use) == num_failures
        return
    with pytest.raises(RewardError, match="on_failure=abort" if settings else "error_budget_frac"):
        use_rewards(functions, use)


def test_one_exception_fails_one_sample_and_names_its_cause(rewards: str) -> None:
    trajectories = [make_trajectory(0, sample, "bad" if sample == 2 else "good") for sample in range(4)]
    found = score_rewards({"acc": function(f"{rewards}:raises_on_bad")}, trajectories)
    assert [found["test/0", sample, 0].status.value for sample in range(4)] == ["ok", "ok", "failed", "ok"]
    failed = found["test/0", 2, 0]
    assert failed.score == 0.0
    assert re.fullmatch(r"acc: \S*scorers\.py:\d+: ValueError: this one is bad", failed.info["error"])
    assert failed.info["failed"] == {"acc": failed.info["error"].removeprefix("acc: ")}


@pytest.mark.fault
def test_a_skipping_function_leaves_the_sum_and_all_skipping_is_a_failure(rewards: str) -> None:
    functions = {
        "a": function(f"{rewards}:skips", weight=0.5),
        "b": function(f"{rewards}:length"),
    }
    [reward] = score_rewards(functions, [make_trajectory(text="skip")]).values()
    assert (reward.status, reward.score, dict(reward.components)) == (RewardStatus.OK, 4.0, {"b": 4.0})
    assert reward.info["skipped"] == ["a"]
    [reward] = score_rewards({"a": functions["a"]}, [make_trajectory(text="skip")]).values()
    assert (reward.status, reward.info["error"]) == (RewardStatus.FAILED, "every function skipped it")


@pytest.mark.parametrize("name", ["mutates", "mutates_async"])
def test_changes_of_a_function_to_its_inputs_reach_no_other(rewards: str, name: str) -> None:
    tags: list[str] = []
    prompt = make_prompt(0, tags=tags)
    functions = {letter: RewardFunctionConfig(f"{rewards}:{name}") for letter in "ab"}
    found = score_rewards(functions, [make_trajectory(prompt, sample) for sample in range(4)])
    assert [dict(outcome.components) for outcome in found.values()] == [{"a": 1.0, "b": 1.0}] * 4
    assert tags == []


@pytest.mark.fault
def test_abort_stops_at_the_first_failure_and_a_spent_budget_names_functions_and_causes(rewards: str) -> None:
    config = RunConfig(rollout=RolloutConfig(samples_per_prompt=4), train=TrainConfig(prompts_per_step=4))
    trajectories = [make_trajectory(0, sample, "bad" if sample < 3 else "good") for sample in range(16)]
    with pytest.raises(
        RewardError,
        match=r"acc: \S*scorers\.py:\d+: ValueError: this one is bad; the function that failed has on_failure=abort",
    ):
        score_rewards({"acc": function(f"{rewards}:raises_on_bad", on_failure="abort")}, trajectories, config=config)
    functions = {"acc": function(f"{rewards}:raises_on_bad")}
    with pytest.raises(RewardError, match=r"2 of 16 samples failed, more than .* \(x2\)"):
        score_rewards(functions, trajectories, config=config)
    found = score_rewards(functions, trajectories, Lane.EVAL, config=config)
    assert sum(value.status is RewardStatus.FAILED for value in found.values()) == 3, "evaluation spends no budget"


@pytest.mark.parametrize(
    ("name", "settings", "kind", "message"),
    [
        ("anonymous", {}, PluginError, "is a lambda"),
        ("nested", {}, PluginError, "is a lambda"),
        ("two_arguments", {}, PluginError, r"has the signature \(a, b\); accepted are f\(prompts, completions"),
        ("star", {}, PluginError, "accepted are"),
        ("misspelt", {}, PluginError, r"\(did you mean 'completions' instead of 'completion'\?\); accepted are"),
        ("NoScore", {}, PluginError, "has no method score"),
        ("not_callable", {}, PluginError, "is neither a function nor a class, found int"),
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
        PluginError,
        match=r"reward function 'f' \(.*broken.py:x\): importing it failed: .*broken.py:1: ModuleNotFoundError",
    ):
        one(str(tmp_path / "broken.py"), "x")


def test_the_canary_lets_a_right_reward_pass_and_refuses_a_wrong_one(rewards: str) -> None:
    prompts = [make_prompt(index, answer=str(index)) for index in range(3)]

    def check(name: str, template: str, least: float = 0.5) -> None:
        functions = {"acc": function(f"{rewards}:{name}")}
        config = RewardConfig(canary=template, canary_min=least)
        use_rewards(functions, lambda manager: check_canary(manager, prompts, config, ByteTokens()), config)

    check("trl", "the answer is \\boxed{{answer}}")
    with pytest.raises(RewardError, match=r"known-good response 'is .' .* scored 0 \(acc=0\); needs at least"):
        check("never", "is {answer}")
    with pytest.raises(
        RewardError,
        match=r"did not get a score: acc: .*ValueError: this one is bad.*; needs a score of at least reward.canary_min",
    ):
        check("raises_on_bad", "bad {answer}")
