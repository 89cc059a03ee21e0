"""Data rows and YAML that say anything: prompts or a plan come of them, or an error of one line."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import DataConfig, SourceConfig
from rlcore.data import filter_long, load_prompts
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import RlcoreError
from rlcore.errors.redaction import displayable
from rlcore.plan import plan_to_json
from rlcore.plugins.planning import plan_run
from rlcore.testing.hostile import changed, damaged, encoded, json_values, settings_of_fuzz, texts
from rlcore.testing.prompts import seeded_prompts

ROWS: list[Any] = [
    {"prompt": "What is 1 + 1?", "answer": "2", "level": 3},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "answer": None},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "reward_model": {"ground_truth": 1}},
]
CONFIG: dict[str, Any] = {
    "model": {"path": "none", "tokenizer": "bytes"},
    "data": {"sources": {"all": {"path": "prompts.jsonl", "weight": 1.0}}, "shuffle": True},
    "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8, "stop": ["x"]},
    "reward": {"functions": {"letters": {"fn": "count_letter", "children": 1, "kwargs": {"letters": "ab"}}}},
    "actor": {"backend": "null", "lr": 0.1, "lora": {"enabled": False}},
    "algo": {"preset": "grpo", "kl": {"placement": "none"}},
    "train": {"prompts_per_step": 4, "max_steps": 4, "dir": "runs", "name": "run"},
    "plugins": {"null": {"nan_updates": [1]}},
}


KEYS = ("train.seed", "rollout.top_p", "train", "plugins.null", "data.sources.all.keep", "algo.preset", "actor.lr")


def one_line(error: RlcoreError) -> None:
    """Assert that the command line prints the error as one line."""
    assert len(displayable(str(error)).splitlines()) == 1, f"{type(error).__name__}: {error}"


def rows_of(data: bytes) -> None:
    """Read them as a run would, up to the order of the prompts and their tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        path.write_bytes(data)
        config = DataConfig(sources={"all": SourceConfig(path=str(path))})
        try:
            prompts = load_prompts(config.sources, config)
            fit = filter_long(prompts["all"], ByteTokens(), 1000, lambda prompt, length: None)
            order = seeded_prompts({"all": fit or prompts["all"]}, {}, 0, True)
        except RlcoreError as error:
            one_line(error)
            return
        taken = order.next_prompts(2 * order.num_prompts)
        assert len({(prompt.id, epoch) for prompt, epoch in taken}) == 2 * order.num_prompts
        json.dumps(order.state())


@pytest.mark.slow
@settings_of_fuzz(60)
@given(st.one_of(changed(ROWS), st.lists(json_values(), min_size=1, max_size=3)))
def test_rows_that_say_anything_become_prompts_or_an_error_of_one_line(rows: Any) -> None:
    rows_of(b"\n".join(encoded(row) for row in (rows if isinstance(rows, list) else [rows])))


@settings_of_fuzz(40)
@given(damaged(b"\n".join(encoded(row) for row in ROWS)))
def test_damaged_files_of_rows_become_prompts_or_an_error_of_one_line(data: bytes) -> None:
    rows_of(data)


def planned(files: list[Any], overrides: list[str]) -> None:
    try:
        plan = plan_run(files, overrides, ["null"])
    except RlcoreError as error:
        one_line(error)
        return
    json.dumps(plan_to_json(plan))
    assert plan.loaded.yaml


@pytest.mark.slow
@settings_of_fuzz(15)
@given(changed(CONFIG))
def test_a_configuration_with_anything_in_it_becomes_a_plan_or_an_error_of_one_line(config: Any) -> None:
    planned([config] if isinstance(config, dict) else [{"train": config}], [])


@pytest.mark.slow
@settings_of_fuzz(40)
@given(damaged(yaml.safe_dump(CONFIG).encode()))
def test_a_damaged_file_of_yaml_becomes_a_plan_or_an_error_of_one_line(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "run.yaml"
        path.write_bytes(data)
        planned([path], [])


@pytest.mark.slow
@settings_of_fuzz(15)
@given(st.lists(st.tuples(st.one_of(st.sampled_from(KEYS), texts()), texts()), max_size=3))
def test_overrides_that_say_anything_become_a_plan_or_an_error_of_one_line(pairs: list[tuple[str, str]]) -> None:
    planned([CONFIG], [f"{key}={value}" for key, value in pairs])
