"""Layers of the configuration: presets, and the sections and defaults of plugins."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rlcore.config import AlgoConfig, EngineConfig, LoadedConfig, enabled_plugins, load_config, option
from rlcore.config.presets import PRESETS
from rlcore.config.providers import ConfigSection, Offer, Provider
from rlcore.errors import ConfigError, PluginError

NEEDED = ("model.path=m", "data.sources.all.path=p.jsonl", "reward.functions.ok.fn=r.py:score")


def load(*overrides: str, files: Any = (), sections: Any = ()) -> LoadedConfig:
    """A configuration that has what every one must have."""
    return load_config(files, [*NEEDED, *overrides], sections)


def error_of(*overrides: str, files: Any = (), sections: Any = ()) -> str:
    """The one line that loading ends with."""
    with pytest.raises(ConfigError) as caught:
        load(*overrides, files=files, sections=sections)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Inner:
    rank: int = option(4, at_least=1)
    used: str = option("", used_when="rank != 4")


@dataclass(frozen=True)
class Settings:
    limit: float = option(1.0, above=0)
    colour: Colour = Colour.RED
    maybe: int | None = None
    either: int | str = 0
    names: tuple[str, ...] = ()
    inner: dict[str, Inner] = field(default_factory=dict)
    engine: EngineConfig = field(default_factory=EngineConfig)
    deep: str = option("", used_when="algo.kl.placement != 'none'")


def offer(name: str = "mine", type_: type[Any] = Settings, **defaults: Any) -> Offer[ConfigSection]:
    dotted = {key.replace("__", "."): value for key, value in defaults.items()}
    return Offer(ConfigSection(name, type_, dotted), Provider(name, f"dist-{name}", "1.0"))


def test_each_layer_wins_over_the_one_below_and_says_so(tmp_path: Path) -> None:
    low = written(tmp_path / "low.yaml", "train: {seed: 1, prompts_per_step: 4}\nalgo: {clip_high: 0.5}")
    high = written(tmp_path / "high.yaml", "train: {seed: 2}")
    loaded = load(
        "train.dir=out", "algo.preset=dr_grpo", files=[low, high], sections=[offer(train__seed=9, algo__clip_low=0.1)]
    )
    config, origins = loaded.config, loaded.origins
    assert (config.train.seed, origins["train.seed"]) == (2, str(high))
    assert (config.train.prompts_per_step, origins["train.prompts_per_step"]) == (4, str(low))
    assert (config.train.dir, origins["train.dir"]) == ("out", "override 'train.dir=out'")
    assert (config.algo.clip_high, origins["algo.clip_high"]) == (0.5, str(low))
    assert (config.algo.clip_low, origins["algo.clip_low"]) == (0.1, "plugin 'mine'")
    assert (config.algo.advantage, origins["algo.advantage"]) == ("dr_grpo", "preset dr_grpo")
    assert (config.actor.lr, origins["actor.lr"]) == (1e-6, "default")
    assert loaded.files == (low, high)


def test_a_default_of_a_plugin_or_preset_without_effect_is_not_an_error() -> None:
    assert load(sections=[offer(algo__kl__coef=0.5)]).config.algo.kl.coef == 0.5


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_gives_a_configuration_and_stays_below_what_is_set(name: str) -> None:
    loaded = load(f"algo.preset={name}")
    for key, value in PRESETS[name].items():
        section: Any = loaded.config.algo
        *above, last = key.split(".")
        for part in above:
            section = getattr(section, part)
        expected = loaded.config.rollout.max_tokens if value == "${rollout.max_tokens}" else value
        assert getattr(section, last) == expected
        assert loaded.origins[f"algo.{key}"] == f"preset {name}"
    assert load(f"algo.preset={name}", "algo.clip_high=0.9").config.algo.clip_high == 0.9


def test_adapters_have_their_own_default_learning_rate() -> None:
    assert load().config.actor.lr == 1e-6
    adapted = load("actor.lora.enabled=true")
    assert adapted.config.actor.lr == 1e-5
    assert adapted.origins["actor.lr"] == "default with actor.lora"
    assert load("actor.lora.enabled=true", "actor.lr=3e-6").config.actor.lr == 3e-6
    assert load("actor.lora.enabled=true", "actor.lora.enabled=false").config.actor.lr == 1e-6


@pytest.mark.parametrize("enabled", ["y", "yes", "on", "1", "'True'", "${oc.env:RLCORE_TEST_LORA}"])
def test_adapters_are_enabled_by_each_text_that_is_true(enabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_TEST_LORA", "true")
    adapted = load(f"actor.lora.enabled={enabled}")
    assert (adapted.config.actor.lora.enabled, adapted.config.actor.lr) == (True, 1e-5)
    assert adapted.values["actor.lr"] == adapted.saved["actor"]["lr"] == 1e-5


def test_the_presets_differ_as_their_papers_do() -> None:
    algo = {name: load(f"algo.preset={name}").config.algo for name in PRESETS}
    assert algo["ppo"].advantage == "gae"
    assert (algo["dr_grpo"].aggregation, algo["dr_grpo"].aggregation_constant) == ("token_sum_constant", 512.0)
    assert (algo["dapo"].dynamic_sampling, algo["dapo"].overlong, algo["dapo"].clip_high) == (True, "penalty", 0.28)
    assert algo["rloo"].aggregation == "seq_mean_token_sum"
    assert algo["reinforce_pp"].advantage == "reinforce_pp"
    assert (algo["gspo"].policy_loss, algo["gspo"].clip_high) == ("gspo", 4e-4)
    assert (algo["cispo"].policy_loss, algo["cispo"].clip_low) == ("cispo", 1.0)
    assert algo["remax"].advantage == "remax"
    assert algo["reinforce_pp_baseline"].advantage == "reinforce_pp_baseline"
    assert set(PRESETS) == set(get_args(get_type_hints(AlgoConfig)["preset"]))


def test_a_preset_may_come_from_a_plugin_and_is_looked_up_first() -> None:
    loaded = load(sections=[offer(algo__preset="rloo")])
    assert loaded.config.algo.advantage == "rloo"
    assert load("algo.preset=ppo", sections=[offer(algo__preset="rloo")]).config.algo.advantage == "gae"


@pytest.mark.slow
def test_what_is_saved_loads_to_the_same_configuration(tmp_path: Path) -> None:
    first = load(
        "algo.preset=dapo",
        "reward.functions.ok.kwargs={a: [1, 'no', null], b: {c: '12e4567'}}",
        "data.system_prompt=${train.dir}: yes\\${x}",
        "plugins.mine={limit: 2, colour: BLUE, inner: {q: {rank: 3, used: x}}}",
        sections=[offer(algo__kl__coef=0.5)],
    )
    again = load_config([written(tmp_path / "config.yaml", first.yaml)], [], [offer(algo__kl__coef=0.5)])
    assert again.config == first.config
    assert again.yaml == first.yaml
    assert first.config.data.system_prompt == "runs: yes${x}"


def test_a_mapping_is_read_like_a_file_and_may_have_dotted_keys() -> None:
    values = {"model.path": Path("m"), "rollout": {"stop": ("a",)}, "plugins.mine.colour": Colour.BLUE}
    loaded = load_config([values], NEEDED[1:], [offer()])
    assert (loaded.config.model.path, loaded.config.rollout.stop) == ("m", ("a",))
    assert loaded.config.plugins["mine"].colour is Colour.BLUE
    assert loaded.origins["model.path"] == "Python"


@pytest.mark.slow
def test_a_plugins_section_is_typed_and_checked_like_the_core(tmp_path: Path) -> None:
    sections = [offer()]
    loaded = load(
        "plugins.mine={either: x, names: [a], inner: {q: {rank: 2, used: u}}, engine: {lr: 0.1}}", sections=sections
    )
    section = loaded.config.plugins["mine"]
    assert section == Settings(
        either="x", names=("a",), inner={"q": Inner(rank=2, used="u")}, engine=EngineConfig(lr=0.1)
    )
    assert isinstance(load(sections=sections).config.plugins["mine"], Settings)
    assert "did you mean 'plugins.mine.limit'?" in error_of("plugins.mine.limmit=1", sections=sections)
    assert "needs above 0" in error_of("plugins.mine.limit=0", sections=sections)
    assert "needs above 0" in error_of("plugins.mine.engine.lr=0", sections=sections)
    assert "plugins.mine.inner.q.rank" in error_of("plugins.mine.inner.q.rank=x", sections=sections)
    assert "choose from: BLUE, RED" in error_of("plugins.mine.colour=green", sections=sections)
    assert "plugins.mine.inner.q.rank != 4" in error_of("plugins.mine.inner.q.used=x", sections=sections)
    assert "algo.kl.placement is 'none'" in error_of("plugins.mine.deep=x", sections=sections)
    assert math.isclose(load("plugins.mine.maybe=3", sections=sections).config.plugins["mine"].maybe, 3)


def test_a_plugin_without_settings_takes_none_but_the_path_of_its_file() -> None:
    loaded = load("plugins.bare.path=/x/bare.py")
    assert loaded.config.plugins == {"bare": {"path": "/x/bare.py"}}
    assert "path: /x/bare.py" in loaded.yaml
    assert "plugin 'bare' declares no settings" in error_of("plugins.bare.a=1")


def test_the_path_of_a_plain_file_is_kept_next_to_its_typed_section() -> None:
    loaded = load("plugins.mine.path=/x/mine.py", "plugins.mine.limit=3", sections=[offer()])
    assert loaded.config.plugins["mine"] == Settings(limit=3.0)
    assert "path: /x/mine.py" in loaded.yaml
    assert loaded.origins["plugins.mine.path"] == "override 'plugins.mine.path=/x/mine.py'"


@pytest.mark.slow
def test_two_plugins_that_set_one_key_differently_clash_unless_the_user_chose() -> None:
    clash = [offer("one", train__seed=1), offer("two", train__seed=2)]
    for order in (clash, clash[::-1]):
        with pytest.raises(PluginError, match=r"plugin 'one' .* and plugin 'two' .*: both set 'train.seed'"):
            load(sections=order)
        assert load("train.seed=5", sections=order).config.train.seed == 5
    assert load(sections=[offer("one", train__seed=1), offer("two", train__seed=1)]).config.train.seed == 1


@pytest.mark.slow
def test_the_order_of_plugins_has_no_meaning() -> None:
    sections = [offer("one", train__seed=1), offer("two", train__dir="d")]
    first, second = load(sections=sections), load(sections=sections[::-1])
    assert first.config == second.config
    assert first.origins == second.origins


@pytest.mark.parametrize(("key", "value"), [("train__sed", 1), ("train__seed", "x"), ("algo__kl__coef", "much")])
def test_a_wrong_default_is_the_plugins_fault(key: str, value: Any) -> None:
    with pytest.raises(PluginError, match="plugin 'mine'"):
        load(sections=[offer(**{key: value})])


@dataclass
class Thawed:
    a: int = 1


@dataclass(frozen=True)
class Listed:
    a: tuple[Inner, ...] = ()


@dataclass(frozen=True)
class Odd:
    a: complex = 1j


@pytest.mark.parametrize("wrong", [Thawed, Listed, Odd, int])
def test_a_section_type_that_cannot_be_checked_is_the_plugins_fault(wrong: type[Any]) -> None:
    with pytest.raises(PluginError, match="'mine'"):
        load(sections=[offer(type_=wrong)])


def test_the_cores_own_sections_stand_at_the_top_level() -> None:
    core = Offer(ConfigSection("actor", EngineConfig), Provider("core", "rlcore", "0.1.0"))
    assert load(sections=[core]).config.plugins == {}


def test_plugins_are_enabled_by_sections_of_any_layer(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "plugins:\n  one: {a: 1}\n  two:\n")
    found = enabled_plugins([file], ["plugins.one.b=2", "plugins.three={}", "actor.lr=1"])
    assert found == {"one": {"a": 1, "b": 2}, "two": {}, "three": {}}
    for wrong in ("plugins=3", "plugins.x=3", "plugins.../x={}"):
        with pytest.raises(ConfigError):
            enabled_plugins([], [wrong])


def test_a_plugin_is_left_out_by_false_in_a_higher_layer_and_enabled_again_above_it(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "plugins:\n  one: {a: 1}\n  two:\nactor: {lr: 2.0}\n")
    above = written(tmp_path / "d.yaml", "plugins: {one: false}\n")
    assert enabled_plugins([file], ["plugins.one=false"]) == {"two": {}}
    assert enabled_plugins([file, above], []) == {"two": {}}
    assert enabled_plugins([file, above], ["plugins.one.b=2"]) == {"one": {"b": 2}, "two": {}}
    loaded = load("plugins.two=false", files=[file, above])
    assert (loaded.config.plugins, loaded.config.actor.lr) == ({}, 2.0)
    assert not [key for key in loaded.origins if key.startswith("plugins.")]


def test_a_plugin_that_is_left_out_but_not_enabled_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "plugins: {one: {a: 1}}\n")
    with pytest.raises(ConfigError, match=r"^plugins\.oen: found False \(override 'plugins\.oen=false'\), but nothing"):
        enabled_plugins([file], ["plugins.oen=false"])
    with pytest.raises(ConfigError, match="nothing before it enables that plugin"):
        enabled_plugins([], ["plugins.one=false", "plugins.one={}"])
    with pytest.raises(ConfigError, match="nothing before it enables that plugin"):
        enabled_plugins([], ["plugins=3", "plugins.one=false"])
