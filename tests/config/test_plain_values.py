"""Configurations that are made without OmegaConf equal those that are made with it, and so do their errors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlcore.config import LoadedConfig, RunConfig, load, load_config, option
from rlcore.config.choices import DEVICE, Choice
from rlcore.config.layers import leaves, nest, overlay
from rlcore.config.plain_values import NotPlain, make_plain, merge_plain
from rlcore.config.providers import ConfigSection, Offer, Provider
from rlcore.errors import RlcoreError
from rlcore.testing.hostile import json_values, settings_of_fuzz

NEEDED = {
    "model": {"path": "m"},
    "data": {"sources": {"all": {"path": "p.jsonl"}}},
    "reward": {"functions": {"ok": {"fn": "r.py:score", "kwargs": {"a": {"b": 1}}}}},
}


@dataclass(frozen=True)
class Inner:
    """A section below a plugin's."""

    rates: dict[str, float] = field(default_factory=dict)
    size: int = option(4, at_least=1)
    mode: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Settings:
    """A plugin's section with a field of each type."""

    one: Inner = field(default_factory=Inner)
    many: dict[str, Inner] = field(default_factory=dict)
    limit: float | None = None
    names: tuple[str, ...] = ("x",)
    options: dict[str, Any] = field(default_factory=lambda: {"deep": {"list": [1, {"a": 2}]}})


SECTIONS = (Offer(ConfigSection("outside", Settings), Provider("outside", "outside", "1")),)
TYPES = {"outside": Settings}
KEYS: dict[str, Any] = {
    "train.seed": st.integers(0, 9),
    "actor.lr": st.one_of(st.floats(0, 1, exclude_min=True), st.integers(1, 2), st.just("1e-5")),
    "actor.lora.enabled": st.booleans(),
    "rollout.stop": st.one_of(st.lists(st.sampled_from("ab"), max_size=2), st.just("a")),
    "rollout.agent": st.sampled_from(["single_turn", "${model.path}", "???", "null", "\\${x}"]),
    "algo.preset": st.sampled_from(["grpo", "dr_grpo", "dapo", "ppo", "none"]),
    "algo.kl.placement": st.sampled_from(["none", "loss", "reward"]),
    "data.sources.all.options": st.dictionaries(st.sampled_from("ab"), json_values(), max_size=2),
    "data.sources.other": st.fixed_dictionaries({"path": st.just("q")}, optional={"weight": st.integers(0, 3)}),
    "eval.sources": st.sampled_from([{}, None, {"held": {"path": "h"}}]),
    "model.chat_template_kwargs": st.sampled_from([{"a": 1}, {"a": {"b": [2]}}, {"a": None}, "${model.path}"]),
    "cluster.pools.main.resources": st.dictionaries(st.sampled_from("ab"), st.one_of(st.integers(), st.floats())),
    "cluster.device": st.sampled_from(["cpu", "cuda", "auto"]),
    "plugins.outside.one.size": st.integers(0, 4),
    "plugins.outside.one.rates": st.dictionaries(st.sampled_from("ab"), st.integers(-3, 2**60)),
    "plugins.outside.many.first": st.fixed_dictionaries({}, optional={"mode": st.sampled_from("abc")}),
    "plugins.outside.limit": st.one_of(st.none(), st.integers(), st.floats()),
    "plugins.outside.options": st.dictionaries(st.sampled_from(["deep", "b"]), json_values(), max_size=2),
}


@st.composite
def layer(draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(sorted(KEYS)), max_size=4, unique=True)):
        values = overlay(values, nest(key, draw(KEYS[key])))
    if draw(st.integers(0, 9)) == 0:
        values = overlay(values, nest(draw(st.sampled_from(sorted(KEYS))), draw(json_values())))
    return values


def outcome(files: Sequence[Any], device: str) -> tuple[str, ...]:
    """The texts of a configuration, or its error."""
    chosen = (Choice(DEVICE, device, "so"), Choice("actor.micro_batch_tokens", 64, "so"), Choice("actor.lr", 0.5, "so"))

    def choose(config: RunConfig, origins: Any) -> tuple[Choice, ...]:
        return tuple(choice for choice in chosen if choice.key == DEVICE or origins[choice.key] == "default")

    try:
        loaded = load_config([NEEDED, {"plugins": {"outside": {}}}, *files], [], SECTIONS, choose)
    except RlcoreError as error:
        return type(error).__name__, str(error)
    return seen(loaded)


def seen(loaded: LoadedConfig) -> tuple[str, ...]:
    shown = (loaded.config, dict(loaded.origins), dict(loaded.values), loaded.merged, loaded.saved, loaded.yaml)
    return tuple(map(repr, shown))


def refuse(*arguments: object) -> None:
    raise NotPlain


@pytest.mark.slow
@settings_of_fuzz(50)
@given(st.lists(layer(), max_size=3), st.sampled_from(["cpu", "cuda"]))
def test_values_origins_and_errors_are_those_of_omegaconf(files: list[Any], device: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_merge", refuse)  # OmegaConf's way
        try:
            found = outcome(files, device)
        except NotPlain:
            return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "merge_plain", refuse)
        assert found == outcome(files, device)


def test_a_usual_configuration_needs_no_omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    load_config([NEEDED], ["plugins.outside={}"], SECTIONS)
    monkeypatch.setattr(OmegaConf, "unsafe_merge", refuse)
    monkeypatch.setattr(OmegaConf, "to_object", refuse)
    loaded = load_config([NEEDED], ["plugins.outside.many.a.size=2", "actor.lr=1"], SECTIONS)
    assert (loaded.config.actor.lr, loaded.config.plugins["outside"].many) == (1.0, {"a": Inner(size=2)})


def test_no_two_configurations_share_what_can_be_changed() -> None:
    values = overlay(NEEDED, {"plugins": {"outside": {"options": {"mine": [1]}}}})
    first, second = (merge_plain([values], TYPES) for _ in range(2))
    config = make_plain(first, TYPES)
    first["plugins"]["outside"]["options"]["mine"].append(2)
    first["plugins"]["outside"]["options"]["deep"]["list"].clear()
    first["data"]["sources"]["all"]["path"] = "changed"
    assert second == merge_plain([values], TYPES)
    assert dict(leaves(values))["plugins.outside.options.mine"] == [1]
    assert config.plugins["outside"].options == {"deep": {"list": [1, {"a": 2}]}, "mine": [1]}
    assert make_plain(second, TYPES) == config


@dataclass(frozen=True)
class Checked:
    """A section whose class checks its values."""

    size: int = 1

    def __post_init__(self) -> None:
        if self.size > 1:
            raise ValueError("too large")


@dataclass
class Loose:
    """A section that is not frozen."""

    size: int = 1


@dataclass(frozen=True)
class Made:
    """A section one field of which its class makes."""

    size: int = 1
    twice: int = field(default=2, init=False)


@pytest.mark.parametrize("kind", [Checked, Loose, Made])
def test_classes_that_do_more_than_keep_values_are_left_to_omegaconf(kind: type[Any]) -> None:
    with pytest.raises(NotPlain):
        merge_plain([NEEDED], {"outside": kind})


@pytest.mark.parametrize(
    "values",
    [
        {"train": {"seed": "1"}},
        {"train": {"seed": True}},
        {"actor": {"lr": 2**53 + 1}},
        {"rollout": {"agent": "${model.path}"}},
        {"rollout": {"agent": "???"}},
        {"rollout": {"stop": [1]}},
        {"checkpoint": {"best_mode": "least"}},
        {"data": {"sources": {"all": {"options": {1: 2}}}}},
        {"reward": {"functions": {"ok": {"kwargs": {"a": [1]}}}}},
        {"data": {"sources": {"all": {"options": {"a": b"x"}}}}},
    ],
)
def test_what_omegaconf_would_convert_resolve_or_refuse_is_left_to_it(values: dict[str, Any]) -> None:
    merge_plain([NEEDED], {})
    with pytest.raises(NotPlain):
        merge_plain([NEEDED, values], {})
