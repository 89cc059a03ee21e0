"""Types, origins and conditions of the configuration."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import LoadedConfig, RunConfig, load_config, option
from rlcore.config.checks import walk
from rlcore.config.layers import read_override
from rlcore.config.options import condition_of, within
from rlcore.errors import ConfigError

NEEDED = ("model.path=m", "data.sources.all.path=p.jsonl", "reward.functions.ok.fn=r.py:score")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.weights=link", "rollout.weights: now rollout.weight_sync (override"),
        ("actor.ranks=2", "actor.ranks: now actor.data_parallel (override"),
        ("cluster.pools.main.union_of=[a]", "cluster.pools.main.union_of: now cluster.pools.main.colocates (override"),
    ],
)
def test_an_old_name_of_a_key_is_refused_with_the_new_one(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config([], [override], ())
    assert str(raised.value).startswith(message)


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
    leaves = {node.key for node in walk(loaded.config) if not isinstance(node.value, dict)}
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
        ("algo.kl_coef=1", ("algo.kl_coef: unknown key", "did you mean 'algo.kl.coef'?")),
        ("actor_lora_rank=1", ("did you mean 'actor.lora.rank'?",)),
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
        ("actor.dtype=float8", ("found 'float8'", "choose from: bfloat16, float16, float32, float64")),
        ("actor.rounding=stochastic", ("actor.rounding", "has no effect")),
        ("actor.rounding=down", ("actor.rounding: found 'down'", "choose from: nearest, stochastic")),
        ("actor.lr_schedule=cosin", ("did you mean 'cosine'?",)),
        ("track.to=5", ("track.to: found 5", "needs a list")),
        ("rollout.stop=5", ("rollout.stop", "needs a list")),
        ("actor=3", ("actor: found 3", "needs a section")),
        ("data.sources.b=3", ("data.sources.b: found 3", "needs a section")),
        ("data.sources=[1]", ("data.sources: found [1]", "needs a section")),
        ("rollout.stop={}", ("rollout.stop: found {}", "needs a list")),
        ("algo.preset=grop", ("algo.preset: found 'grop'", "did you mean 'grpo'?")),
        ("reward.functions.new.weight=2", ("reward.functions.new.fn: required", "text")),
        ("actor.lr=-1", ("actor.lr: found -1", "needs above 0")),
        ("actor.lr=0", ("needs above 0",)),
        ("actor.lr=.nan", ("actor.lr", "needs a finite number")),
        ("rollout.samples_per_prompt=2147483648", ("rollout.samples_per_prompt", "needs at most 2147483647")),
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
        ("eval.sources={h: {path: p, weight: 2}}", ("eval.sources.h.weight: found 2, which has no effect", "leave it")),
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
def test_useless_combinations_are_refused(overrides: list[str], part: str) -> None:
    assert part in error_of(*overrides)


def test_a_configuration_without_model_sources_or_rewards_says_what_is_missing() -> None:
    missing = ("model.path: required", "data.sources: empty", "reward.functions: empty")
    for left_out, part in zip(NEEDED, missing, strict=True):
        with pytest.raises(ConfigError, match=part):
            load_config([], [key for key in NEEDED if key != left_out], [])


def test_an_error_names_the_file_with_the_value(tmp_path: Path) -> None:
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
        (
            "a:\n  b: 1\nplugins: {null: {}}",
            "line 3: YAML reads the key null as an empty value; keys must be text: quote",
        ),
        ("a: 1\n---\nb: 2", "a second document begins in line 2, with '---'; needs one"),
        ("a: ${b", "interpolations"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_an_error_with_its_name(tmp_path: Path, text: str, part: str) -> None:
    file = written(tmp_path / "c.yaml", text)
    message = error_of(files=[file])
    assert message.startswith(str(file))
    assert part in message


def test_a_missing_file_and_a_malformed_override_are_one_line(tmp_path: Path) -> None:
    assert "no such configuration file" in error_of(files=[tmp_path / "none.yaml"])
    assert "needs the form key=value" in error_of("nokey")
    assert "needs the form key=value" in error_of("=1")
    assert "not valid YAML" in error_of("rollout.stop=[a")


def test_an_empty_section_in_a_file_is_not_a_setting(tmp_path: Path) -> None:
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


def test_every_condition_names_a_key_that_exists() -> None:
    config = load("data.sources.b.task=chain_sum", "eval.sources.h.path=h.jsonl", "cluster.pools.p.nodes=1").config
    fields = {entry.key: entry for entry in walk(config)}
    conditions = [
        condition_of(field.metadata["used_when"], field.section)
        for field in fields.values()
        if field.metadata.get("used_when")
    ]
    assert len(conditions) > 30
    assert [str(condition) for condition in conditions if condition.key not in fields] == []


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


@pytest.mark.slow
def test_yaml_that_is_nested_without_end_is_refused_in_one_line(tmp_path: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    path = tmp_path / "deep.yaml"
    path.write_text(f"data: {{sources: {deep}}}\n")
    for files, overrides in (([path], []), ([], [f"model.path={deep}"])):
        with pytest.raises(ConfigError) as caught:
            load_config(files, overrides, ())
        assert "\n" not in str(caught.value)


def test_a_value_of_a_wrong_type_is_refused_also_below_a_layer_that_sets_the_same_key() -> None:
    found = error_of("actor.lr=1e-5", files=[{"actor.lr": "fast"}])
    assert found.startswith("actor.lr: found 'fast' (Python); needs")


def test_what_is_done_to_a_list_of_an_override_does_not_reach_the_next_reader() -> None:
    read_override("data.sources.all.columns=[a]").values["data"]["sources"]["all"]["columns"].append("b")
    assert read_override("x=[a]").values == {"x": ["a"]}


def test_an_empty_stop_string_is_refused() -> None:
    assert error_of("rollout.stop=['', END]").startswith(
        "rollout.stop: an empty string, which would end every response"
    )
