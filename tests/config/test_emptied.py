"""Mappings of named entries that a higher layer empties, entries that it removes, and features that it switches off."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.config import load_config
from rlcore.errors import ConfigError

BELOW: dict[str, Any] = {
    "model": {"path": "m", "chat_template_kwargs": {"thinking": True}},
    "data": {"sources": {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl"}}},
    "eval": {"sources": {"held": {"path": "h.jsonl"}}},
    "reward": {"functions": {"ok": {"fn": "r.py:score", "kwargs": {"x": 1}}}},
    "plugins": {"mine": {}},
}


@pytest.mark.parametrize("value", ["{}", "null", ""])
def test_a_mapping_is_emptied_and_gets_what_is_above(value: str) -> None:
    config = load_config([BELOW], [f"eval.sources={value}", f"model.chat_template_kwargs={value}"], ()).config
    assert (config.eval.sources, config.model.chat_template_kwargs) == ({}, {})
    functions = [f"reward.functions={value}", "reward.functions.new.fn=r.py:other"]
    config = load_config([BELOW], functions, ()).config
    assert {name: function.fn for name, function in config.reward.functions.items()} == {"new": "r.py:other"}
    assert set(config.eval.sources) == {"held"}


def test_an_entry_is_removed_by_null_and_others_stay(tmp_path: Path) -> None:
    above = tmp_path / "above.yaml"
    above.write_text("data: {sources: {a: null}}\neval: {sources: {}}\n")
    loaded = load_config([BELOW, above], [], ())
    assert (set(loaded.config.data.sources), set(loaded.config.eval.sources)) == ({"b"}, set())
    config = load_config([BELOW, above], ["eval.sources.new.path=n.jsonl"], ()).config
    assert set(config.eval.sources) == {"new"}


def test_the_removal_of_no_entry_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([BELOW], ["eval.sources.hled=null"], ())
    assert str(caught.value) == (
        "eval.sources.hled: null removes an entry (override 'eval.sources.hled=null'); did you mean 'held'? "
        "choose from: held"
    )


def test_a_section_stays_as_it_is() -> None:
    config = load_config([BELOW], ["plugins={}", "data.sources.a={}", "train={}"], ()).config
    assert (set(config.plugins), config.data.sources["a"].path) == ({"mine"}, "a.jsonl")


STOPS: dict[str, Any] = {"train": {"stop": {"metric": "reward/mean", "mode": "min", "patience": 5}}}


def test_a_feature_is_switched_off_by_a_later_file_or_an_override() -> None:
    off = {"train": {"stop": {"metric": ""}}}
    assert load_config([BELOW, STOPS], ["train.stop.metric="], ()).saved["train"]["stop"] == {"metric": ""}
    assert load_config([BELOW, STOPS, off], [], ()).config.train.stop.metric == ""


def test_what_has_no_effect_is_refused_where_its_condition_is_of_the_same_level() -> None:
    with pytest.raises(ConfigError, match=r"^train\.stop\.patience: set to 2 \(override .*\), which has no effect"):
        load_config([BELOW, STOPS], ["train.stop.patience=2", "train.stop.metric="], ())
    never = {"train": {"stop": {"metric": "", "mode": "min"}}}
    with pytest.raises(ConfigError, match=r"^train\.stop\.mode: set to 'min' .* which has no effect"):
        load_config([BELOW, never], [], ())


def test_what_is_saved_leaves_out_what_depended_on_what_was_switched_off(tmp_path: Path) -> None:
    ranks = ["actor.data_parallel=4", "actor.sharding=fsdp2", "actor.dp_replicate=2"]
    on, off = tmp_path / "on.yaml", tmp_path / "off.yaml"
    on.write_text(load_config([BELOW], ranks, ()).yaml)
    off.write_text(load_config([on], ["actor.data_parallel=1"], ()).yaml)
    assert load_config([off], [], ()).config.actor.dp_replicate == 1
