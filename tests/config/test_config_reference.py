"""The annotated reference says everything, and is itself a configuration."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.config import RunConfig, load_config
from rlcore.config.key_reference import docs_of, render
from rlcore.config.schema import entries_of, hints_of, section_of

REFERENCE = Path(__file__).parent.parent.parent / "examples" / "reference.yaml"
NEEDED = ("model.path=m", "data.sources.all.path=p.jsonl", "reward.functions.ok.fn=r.py:score")


def sections(section: type[Any] = RunConfig) -> dict[str, type[Any]]:
    """Every dataclass of the configuration by name."""
    found = {section.__name__: section}
    for hint in hints_of(section).values():
        below = section_of(hint) or section_of(entries_of(hint))
        if below is not None:
            found |= sections(below)
    return found


def keys_of(text: str) -> set[str]:
    """The dotted keys of the reference, commented out or not."""
    path: list[str] = []
    found = set()
    for line in text.splitlines():
        match = re.fullmatch(r"( *)(?:# )?([a-z_0-9]+|<name>):( .*)?", line)
        if match and "##" not in line:
            depth = len(match[1]) // 2
            path = [*path[:depth], match[2]]
            found.add(".".join(path))
    return found


def test_the_file_under_examples_is_what_the_code_renders() -> None:
    assert REFERENCE.read_text("utf-8") == render(), "run: rlcore config --reference > examples/reference.yaml"


@pytest.mark.slow
def test_every_field_is_documented() -> None:
    missing = [
        f"{name}.{spec.name}"
        for name, section in sections().items()
        for spec in fields(section)
        if not docs_of(section).get(spec.name)
    ]
    assert len(sections()) > 15
    assert missing == []


def test_the_reference_has_every_key() -> None:
    def keys(section: type[Any], prefix: str) -> set[str]:
        found = set()
        for name, hint in hints_of(section).items():
            key = f"{prefix}{name}"
            found.add(key)
            entry = section_of(entries_of(hint))
            if entry is not None:
                found |= keys(entry, f"{key}.<name>.")
            elif section_of(hint) is not None:
                found |= keys(section_of(hint) or RunConfig, f"{key}.")
        return found

    assert keys_of(render()) - {f"{key}.<name>" for key in keys(RunConfig, "")} == keys(RunConfig, "")


@pytest.mark.slow
def test_the_reference_is_a_configuration_of_nothing_but_defaults() -> None:
    plain = load_config([], NEEDED, [])
    referred = load_config([REFERENCE], NEEDED, [])
    assert referred.config == plain.config
    assert referred.yaml == plain.yaml
    assert isinstance(yaml.safe_load(render()), dict)
