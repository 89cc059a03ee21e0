"""Reward functions as TRL and verl have them: factories, names, tuples, dicts, and classes that judge."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.config import EvalConfig, RewardFunctionConfig, RunConfig, TrainConfig
from rlcore.errors import PluginError, RlcoreError
from rlcore.testing.rewards import make_prompt, make_trajectory, score_rewards
from rlcore.types import Lane, Reward, RewardStatus, Trajectory

pytestmark = pytest.mark.usefixtures("rewards_in_process")

FORMS = str(Path(__file__).parent.parent / "scorers" / "forms.py")
GROUP = RunConfig(eval=EvalConfig(samples_per_prompt=4), train=TrainConfig(max_steps=7))
function = partial(RewardFunctionConfig, children=1)


def one(name: str, trajectory: Trajectory | None = None, **settings: Any) -> Reward:
    """The reward that one function gives one trajectory."""
    functions = {"f": function(f"{FORMS}:{name}", **settings)}
    [reward] = score_rewards(functions, [trajectory or make_trajectory()], config=GROUP).values()
    return reward


def group(name: str, texts: list[str], **settings: Any) -> list[Reward]:
    """The rewards of a group of four samples, in their order."""
    functions = {"f": function(f"{FORMS}:{name}", **settings)}
    trajectories = [make_trajectory(0, sample, text) for sample, text in enumerate(texts)]
    found = score_rewards(functions, trajectories, Lane.EVAL, config=GROUP)  # which spends no error budget
    return [found["test/0", sample, 0] for sample in range(len(texts))]


@pytest.mark.parametrize(
    ("name", "kwargs", "score"),
    [
        ("overlong", {"max_len": 10, "cache": 5}, -1.0),
        ("overlong", {"max_len": 10, "cache": 4}, 0.0),
        ("closure", {}, 1.0),
        ("closure", {"bonus": 3.0}, 3.0),
        ("makes_async", {}, 0.5),
        ("makes_class", {}, 0.25),
    ],
)
def test_what_a_call_with_kwargs_returns_is_the_function(name: str, kwargs: dict[str, Any], score: float) -> None:
    assert one(name, make_trajectory(text="sixsix"), kwargs=kwargs).score == score


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("overlong", {"max_len": 10}, r"has the signature \(cache\); .*; or kwargs for cache, with which a call of it"),
        ("overlong", {"max_len": 10, "cahce": 5}, r"kwargs\.cahce: .* did you mean 'cache'"),
        ("makes_none", {"x": 1}, r"makes_none\(x=\.\.\.\) returned None; accepted are"),
        ("makes_number", {}, r"takes nothing of a sample, so it was called .* makes_number\(\) returned float 1\.0"),
        ("makes_wrong", {}, r"has the signature \(a, b\); accepted are"),
        ("makes_later", {}, "is async and takes nothing of a sample"),
        ("breaks", {}, r"the call breaks\(\): ValueError: no such tokenizer"),
        ("breaks", {"secret": "swordfish-123"}, r"the call breaks\(secret=\.\.\.\): ValueError"),
        pytest.param(
            "hangs",
            {"start_s": 2.5},
            r"not ready within 2\.5 s; now at .*forms\.py:\d+ in hangs; reward\.functions\.f\.start_s",
            marks=pytest.mark.fault,
        ),
    ],
)
def test_a_call_that_returns_no_function_stops_the_start(name: str, kwargs: dict[str, Any], message: str) -> None:
    limits = {"start_s": kwargs.pop("start_s")} if "start_s" in kwargs else {}
    with pytest.raises(RlcoreError, match=message) as caught:
        one(name, kwargs=kwargs, **limits)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("only_ids", 2.0),
        ("only_completions", 2.0),
        ("only_prompts", len("question 5")),
        ("only_state", 7.0),
        ("usual", 1.0),
        ("without_environments", 1.0),
    ],
)
def test_a_function_with_any_of_trls_names_is_trls(name: str, score: float) -> None:
    assert one(name, make_trajectory(5, text="=5")).score == score


def test_what_a_function_logs_in_trls_way_is_kept_with_its_sample() -> None:
    [first, second, *_] = group("notes", ["a", "bb"], scope="group")
    assert dict(first.info) == {"length": 1}
    assert dict(first.components) == {"f": 1.0, "f/share": 0.5}
    assert (second.status, second.info["length"]) == (RewardStatus.FAILED, 2), "the only function had no opinion"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes_too_few", r"log_extra\('length', \.\.\.\): 1 values for 4 samples; needs a list of as many"),
        ("notes_nan", r"log_metric\('share', \.\.\.\): found nan"),
    ],
)
def test_a_wrong_note_fails_the_call(name: str, message: str) -> None:
    for reward in group(name, ["a", "b", "c", "d"], scope="group"):
        assert reward.status is RewardStatus.FAILED
        assert re.search(message, reward.info["error"])


def test_a_function_that_needs_trls_environments_is_refused() -> None:
    with pytest.raises(PluginError, match="takes environments, which only TRL's trainer has"):
        one("with_environments")


def test_compute_score_may_return_a_tuple_that_begins_with_the_score() -> None:
    first = one("tupled", make_trajectory(make_prompt(answer="1"), text="hm"))
    assert (first.score, first.info["details"]) == (1.0, ["hm", "because"])
    second = one("tupled", make_trajectory(make_prompt(answer="2")))
    assert (second.score, second.components["f/acc"], second.info["answer"]) == (0.5, 1.0, "x")
    assert "returned an empty tuple" in one("tupled", make_trajectory(make_prompt(answer="0"))).info["error"]
    third = one("tupled", make_trajectory(make_prompt(answer="x")))
    assert "the first of the tuple: returned str '1'" in third.info["error"]


def test_numbers_next_to_verls_score_are_metrics_and_everything_is_in_info() -> None:
    reward = one("verl_dict")
    assert dict(reward.components) == {"f": -1.0, "f/acc": 0.0, "f/tokens": 7.0}
    assert math.isnan(reward.info["bad"])
    assert {key: reward.info[key] for key in ("acc", "pred", "answer", "note")} == {
        "acc": False,
        "pred": "4",
        "answer": "4",
        "note": "n",
    }


def test_a_tuple_is_no_score_where_none_is_due() -> None:
    assert "returned tuple" in one("tuple_of_a_trajectory").info["error"]


@pytest.mark.parametrize(
    ("name", "scores"), [("RewardAgent", [1.0, 0.0, 2.0, 4.0]), ("AsyncAgent", [6.0, 5.0, 7.0, 9.0])]
)
def test_an_agent_of_verl_judges_looks_at_its_group_and_logs(name: str, scores: list[float], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rewards = group(name, ["ab", "a", "abc", "abcde"], kwargs={"path": str(path)})
    assert [reward.score for reward in rewards] == scores
    assert [reward.info["raw_score"] for reward in rewards] == [2.0, 1.0, 3.0, 5.0]
    lines = sorted(
        (json.loads(line) for line in path.read_text().splitlines()), key=lambda sample: len(sample["response"])
    )
    assert [line["score"] for line in lines] == [1.0, 2.0, 3.0, 5.0], "as it was, before the group"
    assert lines[0].keys() == {"query", "response", "score", "latency", "details"}
    assert (lines[0]["query"], lines[0]["response"], lines[0]["details"]) == ("question 0", "a", ["a", "by length"])
    assert 0.0 <= lines[0]["latency"] < 10.0


def test_a_sample_that_failed_is_left_out_of_what_the_agent_does_to_its_group() -> None:
    rewards = group("RewardAgent", ["ab", "bad", "abc", "abcde"])
    assert [reward.status.value for reward in rewards] == ["ok", "failed", "ok", "ok"]
    assert [reward.score for reward in rewards] == [0.0, 0.0, 1.0, 3.0]
    assert re.fullmatch(r"f: \S*forms\.py:\d+: ValueError: judge is down", rewards[1].info["error"])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("length", "f: post_process: returned a list of 3 for 4 samples"),
        ("raises", r"f: post_process: \S*forms\.py:\d+: ValueError: cannot smooth"),
        ("none", "f: post_process: returned None; needs a list of 4 numbers"),
    ],
)
def test_post_processing_that_goes_wrong_fails_the_group(wrong: str, error: str) -> None:
    for reward in group("RewardAgent", ["ab", "a", "abc", "abcde"], kwargs={"wrong": wrong}):
        assert reward.status is RewardStatus.FAILED
        assert re.fullmatch(error, reward.info["error"])


def test_a_log_that_raises_takes_no_score_away() -> None:
    rewards = group("RewardAgent", ["ab", "a", "abc", "abcde"], kwargs={"wrong": "log"})
    assert [reward.score for reward in rewards] == [1.0, 0.0, 2.0, 4.0]
    assert rewards[0].info["log_error"] == "log: OSError: disk full"


def test_a_class_judged_by_score_may_have_a_log_of_another_kind() -> None:
    assert one("LogsOddly").score == 0.25


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("WantsMoreToLog", {}, "log needs 'wandb'; it is given data_source, solution_str"),
        ("HalfAsync", {}, "log is async and compute_score is not"),
        ("NoScores", {}, "post_process_scores takes no scores"),
        ("RewardAgent", {"scope": "group"}, "scope=group scores several samples in a call"),
        ("RewardAgent", {"post_process": f"{FORMS}:centred"}, "has post_process_scores, and .* needs one of them"),
    ],
)
def test_an_agent_that_cannot_be_asked_stops_the_start(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        one(name, **settings)


def test_settings_without_a_section_are_an_error_by_name() -> None:
    for name in ("with_settings", "ClassWithSettings"):
        with pytest.raises(
            PluginError, match="reward function 'f': takes settings, and there are none: needs a plugin"
        ):
            one(name)
    assert one("maybe_settings").score == 1.0
    assert one("with_settings", kwargs={"settings": 3}).score == 3.0, "kwargs are the user's word"


def test_completion_ids_are_those_after_the_prompt_tool_results_included() -> None:
    turn, result, answer = 3, 4, 2
    mask: Any = np.repeat([False, True, False, True], [5, turn, result, answer])
    numbers: Any = np.arange(len(mask), dtype=np.int32)
    row = make_trajectory(loss_mask=mask, token_ids=numbers, logprobs=np.zeros(len(mask), np.float32))
    assert one("only_ids", row).score == turn + result + answer
