"""`model.chat_template`: what is not a readable file of Jinja is refused by plan and run in the same line."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.config import ModelConfig
from rlcore.data.chat_template import MAX_BYTES, read_chat_template
from rlcore.data.tokenizer import load_tokens
from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.runtime.data_preview import preview_data
from rlcore.testing.runs import run_settings

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, r"found no file \(looked for /.*own\.jinja\); needs a Jinja file$"),
    "a directory": (Path.mkdir, "it is a directory; needs a Jinja file$"),
    "a pipe": (os.mkfifo, "it is a pipe; needs a Jinja file$"),
    "a large file": (lambda path: path.write_bytes(b" " * (MAX_BYTES + 1)), "it has more than 4 MiB; needs a Jinja"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), r"it cannot be read \(UnicodeDecodeError: .*in UTF-8$"),
    "no Jinja": (
        lambda path: path.write_text("{% for m in messages %}\n{{ m.content }}"),
        r"it is not Jinja: line 2: Unexpected end of template.*endfor.*; needs a template that renders messages$",
    ),
    "too deep": (lambda path: path.write_text("{{ " + "(" * 10_000), "it is nested too deep for Jinja; needs"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.timeout(60)
def test_a_template_that_cannot_be_used_is_refused_by_plan_and_run_alike(tmp_path: Path, case: str) -> None:
    make, found = REFUSED[case]
    make(tmp_path / "own.jinja")
    template = str(tmp_path / "own.jinja")
    settings = {**run_settings(tmp_path, 4), "model.tokenizer": "none", "model.chat_template": template}
    with pytest.raises(ConfigError, match=rf"^model\.chat_template='.*own\.jinja': {found}") as planned:
        preview_data(plan_run([settings], [], ["null"]))
    with pytest.raises(ConfigError) as loaded:
        load_tokens(ModelConfig(path="none", tokenizer="none", chat_template=template), "")
    assert str(loaded.value) == str(planned.value)
    assert "\n" not in str(planned.value)


def test_a_template_may_have_the_tags_of_transformers(tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    (tmp_path / "own.jinja").write_text(text)
    assert read_chat_template(str(tmp_path / "own.jinja")) == text
