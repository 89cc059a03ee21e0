"""Conversations and stop conditions on vLLM replicas: `vllm_conversations.py` has them, and this looks at what it saw.

With the Python of .venv-vllm (`make vllm`).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.testing.marks import needs

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(430),
    pytest.mark.xdist_group("conversations"),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

DEADLINE_S = 400.0
END_OF_TURN = 2
"""The model's own; a comma ends a response here, too."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The records of the embedded engine and of two engines of vLLM."""
    here = tmp_path_factory.mktemp("conversations")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "vllm_conversations.py"), str(here)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((here / "told.json").read_text())
    return found


def ended(free: dict[str, Any], texts: list[str], eos: list[int], most: int, stop: list[str]) -> dict[str, Any]:
    """The kept part of a free response: up to the token that ends it, or that completes a stop string."""
    for num, (token, text) in enumerate(zip(free["ids"], texts[1:], strict=True), start=1):
        if token in eos or any(string in text for string in stop):
            return {"ids": free["ids"][:num], "finish": "stop"}
        if num == most:
            return {"ids": free["ids"][:num], "finish": "length"}
    raise AssertionError("the free response is too short")


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_response_is_kept_to_the_token_that_completes_its_stop_string_or_is_one_that_ends_it(
    story: dict[str, Any], engine: str
) -> None:
    found = story[engine]
    assert len(found["eos"]) == 2
    for name, (prompt, most, stop) in found["cases"].items():
        free, texts = found["free"][str(prompt)], found["texts"][str(prompt)]
        assert found["found"][name] == ended(free, texts, found["eos"], most, stop), name
    by_case = {name: case["finish"] for name, case in found["found"].items()}
    assert {by_case[f"{prompt}: at the last token"] for prompt in range(4)} == {"stop"}
    assert {by_case[f"{prompt}: one token too late"] for prompt in range(4)} == {"length"}
    last = {completion["ids"][-1] for completion in found["free"].values() if completion["finish"] == "stop"}
    assert last == set(found["eos"]), "a free response of the four ended in each of the tokens that end one"


def test_stop_conditions_on_vllm_give_what_the_embedded_engine_gives(story: dict[str, Any]) -> None:
    embedded, replicas = story["hf"], story["vllm"]
    assert len(replicas["found"]) == 24
    for what in ("free", "cases", "found"):
        assert replicas[what] == embedded[what]


def test_conversations_on_vllm_are_those_on_the_embedded_engine(story: dict[str, Any]) -> None:
    """Greedy ones, ids, masks, finish reasons and words; turns end at stop strings and at commas."""
    embedded, replicas = story["hf"]["conversations"], story["vllm"]["conversations"]
    assert len(replicas) == 4
    assert replicas == embedded
    assert any(len(replica["turns"]) == 3 for replica in replicas)


def check_tokens(row: dict[str, Any]) -> None:
    """Exactly the turns are trained on; what lies between begins with the end of a turn that has none."""
    sampled = [index for turn in row["turns"] for index in range(turn["start"], turn["start"] + turn["num_tokens"])]
    assert [place for place, mask in enumerate(row["mask"]) if mask] == sampled
    for turn, following in zip(row["turns"], row["turns"][1:], strict=False):
        end = turn["start"] + turn["num_tokens"]
        assert following["start"] > end
        assert turn["finish"] == "stop"
        if row["ids"][end - 1] not in (END_OF_TURN, row["comma"]):
            assert row["ids"][end] == END_OF_TURN


def test_conversations_of_several_turns_stream_from_one_replica_and_only_its_tokens_are_trained_on(
    story: dict[str, Any],
) -> None:
    group = story["group"]
    rows = group["trajectories"]
    [comma] = set(story["vllm"]["eos"]) - {END_OF_TURN}
    assert len(rows) == 6
    assert sum(len(row["turns"]) == 3 for row in rows) >= 4
    for row, texts in zip(rows, group["texts"], strict=True):
        check_tokens({**row, "comma": comma})
        turns, between = texts[: len(row["turns"])], texts[len(row["turns"]) :]
        assert turns == [line["content"] for line in row["said"] if line["role"] == "assistant"]
        assert all("words; go on" in number for number in between)
    assert any(outstanding > 0 for outstanding in group["owed"]), "the first was there while others went on"
    outstanding = group["outstanding"]
    assert [0, 0] in outstanding
    assert sum(max(call) > 0 for call in outstanding) > 1
    assert {place for call in outstanding for place, num in enumerate(call) if num} == {0}, "all turns on one replica"


def test_log_probs_of_every_sampled_token_are_those_that_the_actor_computes(story: dict[str, Any]) -> None:
    for phase in ("group", "between"):
        apart = story[phase]["difference"]
        assert apart["num"] == sum(sum(trajectory["mask"]) for trajectory in story[phase]["trajectories"]) > 100
        assert apart["mean"] < 1e-4
        assert apart["max"] < 1e-2


def test_a_step_of_grpo_trains_on_them_and_hands_over_what_it_learned(story: dict[str, Any]) -> None:
    metrics = story["step"]["metrics"]
    assert metrics["policy/rollout_logprob_diff"] < 1e-4
    assert metrics["actor/grad_norm"] > 0.0
    assert metrics["agent/turns_mean"] > 2.0
    assert metrics["agent/num_tool_calls"] > 8.0
    assert {version for row in story["step"]["versions"] for _, version in row} == {0}


def test_every_turn_says_which_weights_sampled_it_also_when_they_changed_between_turns(story: dict[str, Any]) -> None:
    rows = story["between"]["trajectories"]
    assert len(rows) == 6
    later = 0
    for row in rows:
        first, *others = row["turns"]
        assert first["versions"] == [1]
        assert all(other["versions"] == [2] for other in others)
        expected = [[first["start"], 1], *([[others[0]["start"], 2]] if others else [])]
        assert row["versions"] == expected
        later += len(others)
    assert later > 6
    assert {place for number in story["between"]["outstanding"] for place, num in enumerate(number) if num} == {0, 1}
