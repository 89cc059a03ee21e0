"""A configuration runs no code, stays in its directory and gives away no secret."""

import json
import logging
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import LoadedConfig, TrainConfig, default_run_name, enabled_plugins, load_config, run_directory
from rlcore.config.layers import MAX_DEPTH
from rlcore.errors import ConfigError
from rlcore.errors.redaction import LONGEST_LINE, DisplayFormatter, bounded, redact

NEEDED = ("model.path=m", "data.sources.all.path=p.jsonl", "reward.functions.ok.fn=r.py:score")
NOW = datetime(2026, 1, 31, 23, 59, 58, tzinfo=UTC)
SECRET = 'sk-"very\\secret'


@pytest.fixture
def secret() -> Iterator[str]:
    """The name of an environment variable that holds SECRET."""
    os.environ["RLCORE_TEST_API_KEY"] = SECRET
    yield "RLCORE_TEST_API_KEY"
    del os.environ["RLCORE_TEST_API_KEY"]


def load(*overrides: str) -> LoadedConfig:
    return load_config([], [*NEEDED, *overrides], [])


@pytest.mark.parametrize(
    "value",
    [
        "${eval:1+1}",
        "a ${eval:'__import__(\"os\").getcwd()'} b",
        "${oc.decode:x}",
        "${oc.create:{}}",
        "${oc.select:train.dir}",
        "${oc.env:HOME,default}",
        "${oc.env:}",
        "${oc.env:${train.dir}}",
        "${${train.dir}}",
        "${.path}",
        "${path",
        "${}",
        "[1, {a: '${eval:1}'}]",
        "${eval:1}: x",
    ],
)
@pytest.mark.parametrize("key", ["reward.functions.ok.kwargs.x", "data.system_prompt"])
def test_no_resolver_but_the_environments_is_ever_run(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"interpolation"):
        load(f"{key}={value}")


def test_a_refused_resolver_in_a_file_is_named_with_key_and_choices(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("data: {system_prompt: 'x ${eval:2*3}'}")
    with pytest.raises(ConfigError) as caught:
        load_config([file], NEEDED, [])
    message = str(caught.value)
    assert message.startswith("data.system_prompt: refused interpolation '${eval:2*3}'")
    assert str(file) in message
    assert "${oc.env:NAME}" in message


@pytest.mark.parametrize(
    "override",
    [
        "reward.functions.ok.kwargs={_target_: os.system}",
        "reward.functions.ok.kwargs.deep={a: [{_target_: os.system}]}",
        "model._target_=os.system",
        "plugins.x._target_=os.system",
    ],
)
def test_a_target_is_refused_wherever_it_occurs(override: str) -> None:
    with pytest.raises(ConfigError, match=r"_target_: refused .* builds no objects"):
        load(override)


@pytest.mark.parametrize("value", ["!!binary aGk=", "[!!binary aGk=]", "{a: !!binary aGk=}"])
def test_bytes_are_refused_wherever_they_occur(value: str) -> None:
    with pytest.raises(ConfigError, match=r"kwargs\.x.*: found bytes \(override .* cannot hold; needs text$"):
        load(f"reward.functions.ok.kwargs.x={value}")


@pytest.mark.slow
def test_a_secret_from_the_environment_is_resolved_only_for_the_run(secret: str) -> None:
    loaded = load(f"reward.functions.ok.kwargs.api_key=${{oc.env:{secret}}}")
    assert loaded.config.reward.functions["ok"].kwargs == {"api_key": SECRET}
    shown = json.dumps(dict(loaded.values)) + loaded.yaml + json.dumps(dict(loaded.origins))
    assert f"${{oc.env:{secret}}}" in shown
    assert SECRET not in shown
    assert json.dumps(SECRET)[1:-1] not in shown


def test_what_is_printed_of_a_resolved_secret_is_its_name(secret: str) -> None:
    load(f"reward.functions.ok.kwargs.headers=[a, 'Bearer ${{oc.env:{secret}}}']")
    name = f"${{oc.env:{secret}}}"
    assert redact(f"login with {SECRET} failed") == f"login with {name} failed"
    assert redact(json.dumps({"key": SECRET})) == json.dumps({"key": name})
    assert redact(repr([SECRET])) == repr([name])


def test_log_records_and_their_tracebacks_are_redacted(secret: str) -> None:
    load(f"reward.functions.ok.kwargs.x=${{oc.env:{secret}}}")
    formatter = DisplayFormatter("%(message)s")
    try:
        raise ValueError(f"refused {SECRET}")
    except ValueError as error:
        record = logging.LogRecord(
            "rlcore", logging.ERROR, "f", 1, "call with %s", (SECRET,), (type(error), error, None)
        )
    text = formatter.format(record)
    assert "refused ${oc.env:" in text
    assert SECRET not in text


def test_a_long_line_of_a_message_is_cut_after_the_secret_is_redacted(secret: str) -> None:
    assert bounded("a" * LONGEST_LINE + "\nb") == "a" * LONGEST_LINE + "\nb"
    cut = bounded("a" * (LONGEST_LINE - 3) + SECRET + "b" * 1_000_000)
    assert cut.startswith("a" * (LONGEST_LINE - 3) + "${o... (")
    assert len(cut) < LONGEST_LINE + 40
    record = logging.LogRecord("x", logging.WARNING, "x", 1, "c" * 1_000_000, (), None)
    assert len(DisplayFormatter("%(message)s").format(record)) < LONGEST_LINE + 40


def test_a_short_value_that_is_not_a_secret_does_not_redact_other_text() -> None:
    os.environ["RLCORE_TEST_SIZE"] = "8"
    try:
        loaded = load("train.prompts_per_step=${oc.env:RLCORE_TEST_SIZE}")
    finally:
        del os.environ["RLCORE_TEST_SIZE"]
    assert loaded.config.train.prompts_per_step == 8
    assert redact("step 8 of 18") == "step 8 of 18"


def test_errors_do_not_show_a_resolved_secret(secret: str) -> None:
    for override in (f"actor.lr=${{oc.env:{secret}}}", f"train.name=${{oc.env:{secret}}}"):
        with pytest.raises(ConfigError) as caught:
            load(override)
        assert SECRET not in redact(str(caught.value))
        assert repr(SECRET)[1:-1] not in redact(str(caught.value))


@pytest.mark.parametrize("key", ["api_key", "apikey", "password", "judge_api_token", "token", "client_secret"])
def test_a_secret_written_out_is_refused_without_repeating_it(key: str) -> None:
    with pytest.raises(ConfigError, match=r"needs \$\{oc.env:NAME\}") as caught:
        load(f"reward.functions.ok.kwargs.{key}=hunter22")
    assert "hunter22" not in str(caught.value)


def test_keys_that_only_look_like_secrets_are_fine() -> None:
    kwargs = load("reward.functions.ok.kwargs={max_tokens: 3, stop_token: x, password: '', keyword: k}")
    assert kwargs.config.reward.functions["ok"].kwargs["stop_token"] == "x"


@pytest.mark.parametrize(
    "name", ["..", ".", "../x", "/tmp/x", "a/b", "a\\b", "~", "' '", "-x", ".hidden", "a\nb", "x y"]
)
def test_a_run_name_that_is_not_a_plain_directory_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.name"):
        load(f"train.name={name}")
    with pytest.raises(ConfigError, match=r"train\.name"):
        run_directory(TrainConfig(name=name), [], NOW)


@pytest.mark.parametrize("section", ["data.sources", "reward.functions", "cluster.pools", "eval.sources"])
def test_names_of_entries_are_safe_in_paths_and_metric_names(section: str) -> None:
    with pytest.raises(ConfigError, match=section):
        load(f"{section}={{../x: {{}}}}")


@pytest.mark.parametrize("section", ["data.sources", "reward.functions", "cluster.pools", "eval.sources"])
def test_the_name_of_an_entry_has_no_dot_which_divides_the_parts_of_a_key(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}: found 'v1\.0' as the name of an entry; .*such as v1_0, bec"):
        load(f"{section}={{v1.0: {{}}}}")
    with pytest.raises(ConfigError, match=r"^plugins: found 'gpt-4\.1' as the name of a plugin; .*such as gpt-4_1"):
        enabled_plugins([{"plugins": {"gpt-4.1": {}}}], [])
    assert load("train.name=v1.0").config.train.name == "v1.0"


def test_a_run_directory_that_is_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        run_directory(TrainConfig(name="mine", dir=str(tmp_path / "runs")), [], NOW)
    assert run_directory(TrainConfig(name="other", dir=str(tmp_path / "runs")), [], NOW) == tmp_path / "runs" / "other"


def test_the_default_name_is_the_stem_and_the_time_in_utc() -> None:
    assert default_run_name([Path("a/base.yaml"), Path("b/config.yaml")], NOW) == "config-20260131-235958"
    assert default_run_name([], NOW) == "run-20260131-235958"
    assert default_run_name([Path("a/ü x!.yaml")], NOW) == "x-20260131-235958"
    elsewhere = NOW.astimezone(timezone(timedelta(hours=5)))
    assert run_directory(TrainConfig(), [Path("c.yaml")], elsewhere) == Path("runs/c-20260131-235958")


def test_every_default_name_is_a_valid_one() -> None:
    for stem in ("x" * 300, "..", "-", "ü", "a b"):
        assert run_directory(TrainConfig(), [Path(f"{stem}.yaml")], NOW).parent == Path("runs")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100, 5000])
def test_values_that_are_nested_too_deeply_are_refused_in_one_line(depth: int, tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(depth):
        value = {"k": value}
    with pytest.raises(ConfigError, match="nested more than 32 levels deep"):
        load_config([{"reward": value}], NEEDED, [])
    path = tmp_path / "deep.yaml"
    path.write_text("train: " + "[" * depth + "]" * depth)
    with pytest.raises(ConfigError, match=r"nested more than 32 levels deep|RecursionError|not valid YAML"):
        load_config([path], NEEDED, [])


@pytest.mark.parametrize("value", ["\ud800", "\ud800\n", "a\nb\u2028c"])
def test_an_override_of_any_text_is_refused_in_one_line(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"train.seed={value}")
    assert len(str(caught.value).splitlines()) == 1
