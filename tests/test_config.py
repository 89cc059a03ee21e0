"""Layers, types, origins and conditions of the configuration."""

import dataclasses
import math
import pickle
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rlcore.config import AlgoConfig, EngineConfig, LoadedConfig, RunConfig, enabled_plugins, load_config, option
from rlcore.config.checks import walk
from rlcore.config.options import condition_of, within
from rlcore.config.presets import PRESETS
from rlcore.errors import ConfigError, PluginError
from rlcore.plan import ConfigSection, Offer, Provider

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


def test_the_result_is_frozen_typed_and_pickles() -> None:
    loaded = load("rollout.stop=[a, b]", "train.seed=3")
    assert loaded.config.rollout.stop == ("a", "b")
    assert type(loaded.config.data.sources["all"]).__name__ == "SourceConfig"
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.config.train.seed = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(loaded)).config == loaded.config


def test_every_key_of_the_result_has_an_origin_and_a_value() -> None:
    loaded = load()
    assert set(loaded.origins) == set(loaded.values)
    leaves = {each.key for each in walk(loaded.config) if not isinstance(each.value, dict)}
    sections = {key for key in leaves if any(other.startswith(f"{key}.") for other in leaves)}
    assert leaves - sections <= set(loaded.origins)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("actor.lr=1e-5", "actor.lr", 1e-5),
        ("actor.lr=1", "actor.lr", 1.0),
        ("train.name=a-b", "train.name", "a-b"),
        ("data.system_prompt=a=b: c", "data.system_prompt", "a=b: c"),
        ('data.system_prompt="quoted"', "data.system_prompt", "quoted"),
        ("data.system_prompt=", "data.system_prompt", ""),
        ("rollout.stop=[</a>, b]", "rollout.stop", ("</a>", "b")),
        ("rollout.stop=[]", "rollout.stop", ()),
        ("track.to=[wandb, trackio]", "track.to", ("wandb", "trackio")),
        ("data.shuffle=false", "data.shuffle", False),
        ("model.chat_template_kwargs={thinking: false}", "model.chat_template_kwargs", {"thinking": False}),
        ("data.system_prompt=Say 'x', {y}: z", "data.system_prompt", "Say 'x', {y}: z"),
        ("data.system_prompt=: @`", "data.system_prompt", ": @`"),
        ("model.chat_template_kwargs.a=null", "model.chat_template_kwargs", {"a": None}),
        ("model.revision=12e4567", "model.revision", "12e4567"),
        ("model.revision=0012", "model.revision", "0012"),
    ],
)
def test_overrides_are_yaml_but_text_stays_as_it_was_typed(override: str, key: str, value: Any) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load(override).config, section), name) == value


def test_a_number_for_a_text_in_a_file_is_refused_because_yaml_has_changed_it(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "model: {revision: 12e4}")
    message = error_of(files=[file])
    assert message.startswith("model.revision: found 120000.0")
    assert str(file) in message
    assert "quote" in message


def test_an_entry_of_a_named_section_is_completed_and_overridden(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "data: {sources: {all: {limit: 5}, b: {task: chain_sum, seed: 7}}}")
    loaded = load("data.sources.b.weight=2", files=[file])
    b = loaded.config.data.sources["b"]
    assert (b.task, b.seed, b.weight, b.split) == ("chain_sum", 7, 2.0, "train")
    assert loaded.config.data.sources["all"].limit == 5
    assert loaded.origins["data.sources.b.weight"] == "override 'data.sources.b.weight=2'"
    assert loaded.origins["data.sources.b.split"] == "default"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.learning_rat=1", ("actor.learning_rat: unknown key", "choose from:", "actor.lr")),
        ("rollout.temperatur=1", ("rollout.temperatur", "did you mean 'rollout.temperature'?")),
        ("lr=1", ("lr: unknown key", "did you mean 'actor.lr'?")),
        ("rollut.max_tokens=1", ("did you mean 'rollout'?",)),
        ("data.sources.all.wieght=1", ("data.sources.all.wieght", "did you mean 'data.sources.all.weight'?")),
        ("reward.functions.ok.kwarg={}", ("did you mean 'reward.functions.ok.kwargs'?",)),
        ("actor.lora.ranks=1", ("did you mean 'actor.lora.rank'?",)),
        ("cluster.pools.a.gpu_per_node=1", ("did you mean 'cluster.pools.a.gpus_per_node'?",)),
        ("train.max_steps=ten", ("train.max_steps: found 'ten'", "needs a whole number")),
        ("train.max_steps=1.5", ("found 1.5", "needs a whole number")),
        ("train.max_steps=true", ("found True", "needs a whole number")),
        ("train.max_steps=null", ("found null", "needs a whole number")),
        ("actor.lr=[1]", ("actor.lr: found [1]", "needs a number")),
        ("data.shuffle=maybe", ("found 'maybe'", "needs true or false")),
        ("actor.dtype=float16", ("found 'float16'", "choose from: bfloat16, float32, float64")),
        ("actor.lr_schedule=cosin", ("did you mean 'cosine'?",)),
        ("track.to=[wandb, tensorbord]", ("track.to", "tensorbord", "each of them one of")),
        ("track.to=wandb", ("track.to: found 'wandb'", "needs a list")),
        ("rollout.stop=x", ("rollout.stop", "needs a list")),
        ("actor=3", ("actor: found 3", "needs a section")),
        ("data.sources.b=3", ("data.sources.b: found 3", "needs a section")),
        ("data.sources=[1]", ("data.sources: found [1]", "needs a section")),
        ("algo.preset=grop", ("algo.preset: found 'grop'", "did you mean 'grpo'?")),
        ("reward.functions.new.weight=2", ("reward.functions.new.fn: required", "text")),
        ("actor.lr=-1", ("actor.lr: found -1", "needs above 0")),
        ("actor.lr=0", ("needs above 0",)),
        ("actor.lr=.nan", ("actor.lr", "needs a finite number")),
        ("reward.functions.ok.weight=.nan", ("reward.functions.ok.weight", "needs a finite number")),
        ("rollout.samples_per_prompt=0", ("needs at least 1",)),
        ("rollout.temperature=-0.1", ("rollout.temperature", "needs above 0")),
        ("rollout.max_tokens=-5", ("needs at least 1",)),
        ("actor.beta2=1", ("needs at least 0 and below 1",)),
        ("data.sources.all.weight=-1", ("data.sources.all.weight", "needs at least 0")),
        ("checkpoint.keep=-1", ("needs at least 0",)),
        ("rollout.top_p=0.9", ("rollout.top_p", "ratio would be biased", "eval.top_p")),
        ("rollout.top_k=20", ("rollout.top_k", "ratio would be biased")),
        ("rollout.min_p=0.1", ("rollout.min_p", "ratio would be biased")),
        ("data.sources.b.limit=3", ("data.sources.b: found neither path nor task",)),
        ("data.sources.all.task=chain_sum", ("data.sources.all", "needs exactly one")),
        ("data.sources.all.weight=0", ("every weight is 0",)),
        ("reward.canary=42", ("needs {answer}",)),
        ("model.attention=flash_attention_2", ("needs cluster.device=cuda and actor.dtype=bfloat16", "sdpa, eager")),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_key_origin_and_way_out(override: str, parts: tuple[str, ...]) -> None:
    message = error_of(override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algo.overlong=penalty", "rollout.max_tokens=16"], "algo.overlong_buffer: 64 tokens do not fit"),
        (["eval.sources.h.path=h.jsonl", "eval.samples_per_prompt=4"], "needs eval.temperature above 0"),
    ],
)
def test_combinations_that_nobody_can_want_are_refused(overrides: list[str], part: str) -> None:
    assert part in error_of(*overrides)


def test_a_configuration_without_model_sources_or_rewards_says_what_is_missing() -> None:
    missing = ("model.path: required", "data.sources: empty", "reward.functions: empty")
    for left_out, part in zip(NEEDED, missing, strict=True):
        with pytest.raises(ConfigError, match=part):
            load_config([], [each for each in NEEDED if each != left_out], [])


def test_an_error_names_the_file_that_the_value_stands_in(tmp_path: Path) -> None:
    good = written(tmp_path / "good.yaml", "train: {seed: 1}")
    bad = written(tmp_path / "bad.yaml", "rollout: {max_tokens: lots}")
    assert str(bad) in error_of(files=[good, bad])
    assert str(bad) in error_of("rollout.temperature=0.5", files=[good, bad])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not valid YAML in line"),
        ("a: 1\na: 2", "found duplicate key a"),
        ("- 1", "holds a list"),
        ("5", "cannot be read"),
        ("null: {}", "keys must be text"),
        ("a: ${b", "interpolations"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_an_error_with_its_name(tmp_path: Path, text: str, part: str) -> None:
    file = written(tmp_path / "c.yaml", text)
    message = error_of(files=[file])
    assert message.startswith(str(file))
    assert part in message


def test_a_missing_file_and_a_malformed_override_are_one_line(tmp_path: Path) -> None:
    assert "no such configuration file" in error_of(files=[tmp_path / "none.yaml"])
    assert "needs the form key=value" in error_of("nokey")
    assert "needs the form key=value" in error_of("=1")
    assert "not valid YAML" in error_of("rollout.stop=[a")


def test_an_empty_section_in_a_file_is_no_setting(tmp_path: Path) -> None:
    file = written(tmp_path / "c.yaml", "train:\nmodel: {path: m}\ndata: {sources: }")
    assert load(files=[file]).config.train == RunConfig().train


@pytest.mark.parametrize(
    ("override", "condition"),
    [
        ("algo.kl.coef=0.1", "algo.kl.placement != 'none', and algo.kl.placement is 'none'"),
        ("reference.path=x", "algo.kl.placement != 'none'"),
        ("actor.lora.rank=4", "actor.lora.enabled == True, and actor.lora.enabled is False"),
        ("reward.functions.ok.threads=4", "reward.functions.ok.isolation == 'threads'"),
        ("data.sources.all.seed=4", "data.sources.all.task != '', and data.sources.all.task is empty"),
        ("eval.every_steps=4", "eval.sources != {}, and eval.sources is empty"),
        ("track.project=x", "track.to != ()"),
    ],
)
def test_a_setting_without_effect_is_an_error_that_names_the_condition(override: str, condition: str) -> None:
    message = error_of(override)
    assert "has no effect: it is used only when" in message
    assert condition in message
    assert f"override '{override}'" in message


def test_a_setting_has_an_effect_when_another_setting_gives_it_one() -> None:
    loaded = load("algo.kl.placement=reward", "algo.kl.coef=0.1", "algo.kl.controller=adaptive", "algo.kl.target=3")
    assert loaded.config.algo.kl.target == 3.0
    assert load("actor.lora.enabled=true", "actor.lora.rank=4").config.actor.lora.rank == 4


def test_a_default_of_a_plugin_or_preset_without_effect_is_no_error() -> None:
    assert load(sections=[offer(algo__kl__coef=0.5)]).config.algo.kl.coef == 0.5


def test_every_condition_names_a_key_that_exists() -> None:
    config = load("data.sources.b.task=chain_sum", "eval.sources.h.path=h.jsonl", "cluster.pools.p.nodes=1").config
    fields = {each.key: each for each in walk(config)}
    conditions = [
        condition_of(each.metadata["used_when"], each.section)
        for each in fields.values()
        if each.metadata.get("used_when")
    ]
    assert len(conditions) > 30
    assert [str(each) for each in conditions if each.key not in fields] == []


@pytest.mark.parametrize(
    "wrong", ["a", "a = 1", "a == b", "a == f()", "a < 1", "a == 1 and b == 2", "__import__('os')"]
)
def test_a_condition_outside_its_language_is_refused_and_never_evaluated(wrong: str) -> None:
    with pytest.raises(ValueError, match="used_when"):
        option(1, used_when=wrong)


def test_bounds_include_what_they_say() -> None:
    metadata = {"at_least": 0, "below": 1}
    assert [within(value, metadata) for value in (-0.1, 0, 0.5, 1)] == [False, True, True, False]
    metadata = {"above": 0, "at_most": 1}
    assert [within(value, metadata) for value in (0, 0.1, 1, 1.1)] == [False, True, True, False]


def test_interpolations_follow_other_values_whatever_the_order_of_the_layers(tmp_path: Path) -> None:
    file = written(
        tmp_path / "c.yaml", "actor: {micro_batch_tokens: '${rollout.max_tokens}'}\nmodel: {path: '${train.dir}/m'}"
    )
    loaded = load_config([file], [*NEEDED[1:], "rollout.max_tokens=77", "train.dir=d"], [])
    assert loaded.config.actor.micro_batch_tokens == 77
    assert loaded.config.model.path == "d/m"
    assert "${train.dir}/m" in loaded.yaml


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("actor.lr=${nowhere}", "actor.lr: found '${nowhere}'"),
        ("actor.lr=${actor.lr}", "does not resolve"),
        ("actor.lr=${model.path}", "could not be converted to Float"),
        ("model.path=${oc.env:RLCORE_TEST_NOT_SET}", "RLCORE_TEST_NOT_SET"),
    ],
)
def test_an_interpolation_that_does_not_resolve_names_its_key(override: str, part: str) -> None:
    message = error_of(override)
    assert part in message
    assert message.startswith(override.partition("=")[0])


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


def test_adapters_have_a_learning_rate_of_their_own_by_default() -> None:
    assert load().config.actor.lr == 1e-6
    adapted = load("actor.lora.enabled=true")
    assert adapted.config.actor.lr == 1e-5
    assert adapted.origins["actor.lr"] == "default with actor.lora"
    assert load("actor.lora.enabled=true", "actor.lr=3e-6").config.actor.lr == 3e-6
    assert load("actor.lora.enabled=true", "actor.lora.enabled=false").config.actor.lr == 1e-6


def test_the_presets_differ_as_their_papers_do() -> None:
    algo = {name: load(f"algo.preset={name}").config.algo for name in PRESETS}
    assert algo["ppo"].advantage == "gae"
    assert (algo["dr_grpo"].aggregation, algo["dr_grpo"].aggregation_constant) == ("token_sum_constant", 256.0)
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


def test_the_path_of_a_plain_file_is_kept_beside_its_typed_section() -> None:
    loaded = load("plugins.mine.path=/x/mine.py", "plugins.mine.limit=3", sections=[offer()])
    assert loaded.config.plugins["mine"] == Settings(limit=3.0)
    assert "path: /x/mine.py" in loaded.yaml
    assert loaded.origins["plugins.mine.path"] == "override 'plugins.mine.path=/x/mine.py'"


def test_two_plugins_that_set_one_key_differently_clash_unless_the_user_chose() -> None:
    clash = [offer("one", train__seed=1), offer("two", train__seed=2)]
    for order in (clash, clash[::-1]):
        with pytest.raises(PluginError, match=r"plugin 'one' .* and plugin 'two' .*: both set 'train.seed'"):
            load(sections=order)
        assert load("train.seed=5", sections=order).config.train.seed == 5
    assert load(sections=[offer("one", train__seed=1), offer("two", train__seed=1)]).config.train.seed == 1


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
    with pytest.raises(PluginError, match="plugin 'mine' "):
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
