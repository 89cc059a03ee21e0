"""The annotated reference of the configuration: every key with its default, its documentation and its choices."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from typing import Any

import yaml

from rlcore.config.options import condition_of, needed
from rlcore.config.presets import PRESETS
from rlcore.config.schema import choices_of, entries_of, hints_of, section_of
from rlcore.config.sections import RunConfig

_WIDTH = 118
_HEAD = """\
# Every key of rlcore's configuration, with its default. Generated: `rlcore config --reference`.
#
# A configuration needs only the values that differ from the defaults. An override on the command line is key=value.
# A key that is commented out has no effect with the defaults; setting a key without effect is an error. `???` has no
# default. `<name>` stands for any number of entries. Text may hold ${a.b}, another value, and ${oc.env:NAME}, an
# environment variable, which is the only way to pass a secret.
"""


def render() -> str:
    """The reference as YAML: a valid configuration, which sets every key to its default."""
    lines = [*_HEAD.splitlines(), *_section(RunConfig, 0, "", False), "", *_presets()]
    return "\n".join(lines) + "\n"


def docs_of(section: type[Any]) -> dict[str, str]:
    """The docstring under each field of a dataclass, as one line; fields without one are left out."""
    body = ast.parse(inspect.getsource(section)).body[0]
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field_, text in pairwise(statements):
        if isinstance(field_, ast.AnnAssign) and isinstance(field_.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field_.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs


def _section(section: type[Any], depth: int, key: str, commented: bool) -> Iterator[str]:
    """The lines of every field of a section."""
    hints, docs = hints_of(section), docs_of(section)
    for spec in fields(section):
        hint = hints[spec.name]
        off = commented or _has_no_effect(spec, key)
        if depth == 0:
            yield ""
        yield from _comment(" ".join(_words(spec, hint, docs.get(spec.name, ""))), depth)
        below = section_of(hint)
        path = f"{key}.{spec.name}" if key else spec.name
        if below is not None:
            yield _line(f"{spec.name}:{'' if _sets_anything(below, path) else ' {}'}", depth, off)
            yield from _section(below, depth + 1, path, off)
            continue
        yield _line(f"{spec.name}: {_scalar(_default(spec))}", depth, off)
        entry = section_of(entries_of(hint)) if entries_of(hint) is not None else None
        if entry is not None:
            yield _line("<name>:", depth + 1, True)
            yield from _section(entry, depth + 2, f"{path}.<name>", True)


def _words(spec: "Field[Any]", hint: Any, doc: str) -> Iterator[str]:
    yield doc
    if choices := choices_of(hint):
        yield f"One of {', '.join(choices)}."
    if bounds := needed(spec.metadata):
        yield f"Must be {bounds}."
    if used_when := spec.metadata.get("used_when"):
        yield f"Used when {used_when}."
    if on_cuda := spec.metadata.get("on_cuda"):
        yield f"On a GPU the default is {on_cuda}."


def _has_no_effect(spec: "Field[Any]", section: str) -> bool:
    used_when = spec.metadata.get("used_when")
    if not used_when or "<name>" in section:
        return bool(used_when)
    condition = condition_of(used_when, section)
    value: Any = RunConfig()
    for part in condition.key.split("."):
        value = getattr(value, part)
    return not condition.holds(value)


def _sets_anything(section: type[Any], key: str) -> bool:
    return any(not _has_no_effect(spec, key) for spec in fields(section))


def _default(spec: "Field[Any]") -> Any:
    value = spec.default if spec.default_factory is MISSING else spec.default_factory()
    return list(value) if isinstance(value, tuple) else value


def _scalar(value: Any) -> str:
    if value == "???":
        return "???"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _line(text: str, depth: int, commented: bool) -> str:
    return f"{'  ' * depth}{'# ' if commented else ''}{text}"


def _comment(text: str, depth: int) -> Iterator[str]:
    """The text as lines '## ...', broken at spaces."""
    line = ""
    for word in text.split():
        if line and len(line) + len(word) + 1 > _WIDTH - 2 * depth - 3:
            yield f"{'  ' * depth}## {line}"
            line = ""
        line = f"{line} {word}".strip()
    if line:
        yield f"{'  ' * depth}## {line}"


def _presets() -> Iterator[str]:
    yield "# The values that algo.preset sets; files and overrides take precedence:"
    for name, values in PRESETS.items():
        settings = ", ".join(f"{key}={_scalar(value)}" for key, value in values.items()) or "nothing"
        yield from (line.replace("##", "#  ", 1) for line in _comment(f"{name}: {settings}", 0))
