"""Texts of overrides stay as they were typed, texts that YAML has changed are refused, and so are dotted keys."""

from pathlib import Path

import pytest

from rlcore.config import LoadedConfig, load_config
from rlcore.config.layers import Source
from rlcore.errors import ConfigError

NEEDED = ("model.path=m", "data.sources.all.path=p.jsonl", "reward.functions.ok.fn=r.py:score")


def load(*overrides: str, files: tuple[Source, ...] = ()) -> LoadedConfig:
    """A configuration that has what every one must have."""
    return load_config(files, [*NEEDED, *overrides], ())


def error_of(*overrides: str, files: tuple[Source, ...] = ()) -> str:
    """The one line that loading ends with."""
    with pytest.raises(ConfigError) as caught:
        load(*overrides, files=files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("Answer after #### only", "Answer after #### only"),
        ("a\n\n  b", "a\n\n  b"),
        ("--- x", "--- x"),
        ("#", "#"),
        ("'a # b'", "a # b"),
        ('"a\\nb"', "a\nb"),
    ],
)
def test_a_text_is_neither_cut_at_a_number_sign_nor_folded(typed: str, text: str) -> None:
    """YAML reads ' #' as the beginning of a comment; a text in quotes is what YAML reads."""
    assert load(f"data.system_prompt={typed}").config.data.system_prompt == text
    assert load(f"data.sources.all.keep={typed}").config.data.sources["all"].keep == text
    assert load(f"rollout.stop={typed}").config.rollout.stop == (text,)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("rollout.stop=[a, No]", "rollout.stop: found False, which YAML does not read as text"),
        ("rollout.stop=[012]", "rollout.stop: found 10, which"),
        ("cluster.pools.a.labels={zone: 1.0}", "cluster.pools.a.labels.zone: found 1.0, which"),
    ],
)
def test_a_text_in_a_list_or_mapping_that_yaml_has_changed_is_refused(override: str, part: str) -> None:
    message = error_of(override)
    assert message.startswith(part)
    assert message.endswith("needs text: quote it")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("actor.lr: 1e-5", "actor.lr: found a key with '.' in it (FILE); a file nests sections: actor: {lr: ...}"),
        ("train.max_steps: 3", "train.max_steps: found a key with '.' in it (FILE); a file nests sections: train: {ma"),
        ("actor: {lora.rank: 8}", "actor.lora.rank: found a key with '.' in it (FILE); a file nests sections: actor: "
         "{lora: {rank: ...}}"),
    ],
)  # fmt: skip
def test_a_dotted_key_of_a_file_is_refused_with_the_sections_that_are_meant(
    tmp_path: Path, text: str, line: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert error_of(files=(file,)).startswith(line.replace("FILE", str(file)))


def test_a_variable_where_a_list_is_due_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCORE_TEST_TRACKER", "wandb")
    message = error_of("rollout.stop=[a]", "eval.sources.h.path=h", "track.to=${oc.env:RLCORE_TEST_TRACKER}")
    assert message.startswith("track.to: found '${oc.env:RLCORE_TEST_TRACKER}' (override ")
    assert "needs a list like [x, y], each of them text: put it in brackets and quotes" in message
    listed = load("track.to=['${oc.env:RLCORE_TEST_TRACKER}']").config.track.to
    assert listed == load("rollout.stop=[wandb]", "track.to=${rollout.stop}").config.track.to == ("wandb",)


def test_a_label_of_an_override_is_the_text_that_was_typed() -> None:
    overrides = ("cluster.backend=ray", "cluster.pools.a.labels.zone=012", "cluster.pools.a.labels.disk=a #1")
    assert load(*overrides).config.cluster.pools["a"].labels == {"zone": "012", "disk": "a #1"}


@pytest.mark.parametrize("typed", ["null", "~"])
def test_a_null_typed_for_a_text_is_refused_with_the_way_to_empty_it(tmp_path: Path, typed: str) -> None:
    """It switches nothing off, and is not a system prompt; in a file it is refused, too."""
    file = tmp_path / "c.yaml"
    file.write_text("data: {system_prompt: Be brief.}")
    message = error_of(f"data.system_prompt={typed}", files=(file,))
    assert message.startswith("data.system_prompt: found null (override ")
    assert "needs text: data.system_prompt= for an empty one" in message
    assert load("data.system_prompt=", files=(file,)).config.data.system_prompt == ""
    assert load(f'data.system_prompt="{typed}"', files=(file,)).config.data.system_prompt == typed
    assert error_of("data.sources.all.keep=null").startswith("data.sources.all.keep: found null")


def test_a_null_typed_for_a_backend_is_its_name() -> None:
    assert load("rollout.backend=null", "actor.backend=null").config.rollout.backend == "null"


def test_a_directory_is_not_a_configuration_and_its_files_are_named(tmp_path: Path) -> None:
    line = f"{tmp_path}: is a directory; needs a configuration file: "
    assert error_of(files=(tmp_path,)) == f"{line}it holds none (*.yaml)"
    file = tmp_path / "c.yaml"
    file.write_text("train: {seed: 1}")
    assert error_of(files=(tmp_path,)) == f"{line}choose from: {file}"
    (tmp_path / "plan.json").write_text("{}")
    assert error_of(files=(tmp_path,)) == f"{line}choose from: {file}; `rlcore resume` and `rlcore eval` take a run"
