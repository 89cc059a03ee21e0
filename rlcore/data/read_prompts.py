"""Turns rows into prompts."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.config import DataConfig, SourceConfig
from rlcore.data.conversation import text_of
from rlcore.data.json_rows import Row
from rlcore.data.rows import read_rows
from rlcore.errors import ConfigError, nearest
from rlcore.types import FrozenDict, Message, Prompt, frozen_messages

PROMPT_COLUMNS = ("prompt", "messages", "question")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")


def training_sources(data: DataConfig) -> dict[str, SourceConfig]:
    """The sources that training mixes; it leaves those of weight 0 out, and reads none of their rows."""
    return {name: source for name, source in data.sources.items() if source.weight > 0}


def load_prompts(sources: Mapping[str, SourceConfig], data: DataConfig, section: str = "") -> dict[str, list[Prompt]]:
    """The prompts of every source, in the order of its rows.

    A prompt that is a string becomes one user message. `Prompt.columns` holds the row's other columns unchanged. The
    answer is None if unknown. If a source has `reward_model.ground_truth` instead of an answer column, like verl's
    data, that is the answer. `sources` is `data.sources` or `eval.sources`, and errors name it, or `section`.
    ConfigError if a source cannot be read or is empty, or a row has no usable prompt.
    """
    section = section or ("data.sources" if sources is data.sources else "eval.sources")
    return {name: _load_source(name, source, f"{section}.{name}") for name, source in sources.items()}


def _load_source(name: str, source: SourceConfig, who: str) -> list[Prompt]:
    rows = read_rows(source, who)
    columns = tuple(dict.fromkeys(str(column) for row in rows for column in row.values))
    prompt_column = _pick(rows, source.prompt_column, PROMPT_COLUMNS, columns, f"{who}.prompt_column")
    if prompt_column is None:
        found = next((letter for letter in ";\t|" if len(columns) == 1 and letter in columns[0]), "")
        separator = json.dumps(found)
        hint = f"; if {separator} separates its columns, set {who}.options.sep={separator}" if found else ""
        raise ConfigError(
            f"{who}: none of its columns is {', '.join(PROMPT_COLUMNS)}; set prompt_column to one of: "
            f"{', '.join(sorted(columns))}{hint}"
        )
    answer_column = _pick(rows, source.answer_column, ANSWER_COLUMNS, columns, f"{who}.answer_column")
    _refuse_unusable(rows, prompt_column, who)
    prompts = [
        Prompt(
            id=f"{name}/{index}",
            messages=_messages(value_at(row.values, prompt_column)),
            answer=_answer(row, answer_column),
            source=name,
            columns=FrozenDict({k: v for k, v in row.values.items() if k not in (prompt_column, answer_column)}),
            conversational=not isinstance(value_at(row.values, prompt_column), str),
        )
        for index, row in enumerate(rows)
    ]
    return _keep(prompts, source, who) if source.keep else prompts


def _keep(prompts: list[Prompt], source: SourceConfig, who: str) -> list[Prompt]:
    """The first `source.limit` prompts (0: all) with a message that `source.keep` matches."""
    try:
        pattern = re.compile(source.keep)
    except re.error as cause:
        raise ConfigError(f"{who}.keep: '{source.keep}' is not a regular expression: {cause}") from cause
    kept = [prompt for prompt in prompts if any(pattern.search(text_of(message)) for message in prompt.messages)]
    if not kept:
        raise ConfigError(f"{who}.keep: '{source.keep}' is found in none of the {len(prompts)} prompts; change it")
    return kept[: source.limit or None]


def _pick(rows: Sequence[Row], configured: str, usual: Sequence[str], columns: tuple[str, ...], who: str) -> str | None:
    """The configured column, which must exist, else the first usual column that exists.

    A name with dots is a path into a column of objects (reward_model.ground_truth), unless it is a column's name.
    """
    if not configured or configured in columns:
        return configured or next((name for name in usual if name in columns), None)
    if any(value_at(row.values, configured) is not None for row in rows):
        return configured
    top, _, below = configured.partition(".")
    inner = sorted({str(key) for row in rows if isinstance(found := row.values.get(top), Mapping) for key in found})
    if below and inner:
        raise ConfigError(f"{who}: column '{top}' has no '{below}'; {nearest(below, inner)}")
    raise ConfigError(f"{who}: there is no column '{configured}'; {nearest(configured, columns)}")


def value_at(values: Mapping[str, Any], column: str) -> Any:
    """The value in a column, or at a dotted path into a column of objects; None if there is none."""
    if column in values:
        return values[column]
    found: Any = values
    for part in column.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _refuse_unusable(rows: Sequence[Row], column: str, who: str) -> None:
    """ConfigError that names the first row without a usable prompt, and the number of such rows."""
    unusable = [row for row in rows if not _messages(value_at(row.values, column))]
    if not unusable:
        return
    value = value_at(unusable[0].values, column)
    found = "nothing" if value is None or value in ("", []) else f"{type(value).__name__} {str(value)[:60]!r}"
    as_many = f", as {len(unusable)} of {len(rows)} rows," if len(unusable) > 1 else ""
    raise ConfigError(
        f"{who}: {unusable[0].where}{as_many} has {found} in column '{column}'; needs a text, or messages with role "
        "and content, which is a text or parts of the type text; remove such rows, or name another column in "
        "prompt_column"
    )


def _messages(value: Any) -> tuple[Message, ...]:
    """The conversation of a row's prompt; empty if the value is not a prompt."""
    if isinstance(value, str) and value.strip():
        return frozen_messages([{"role": "user", "content": value}])
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(map(_is_message, value)):
        return frozen_messages([{**message, "content": _content(message["content"])} for message in value])
    return ()


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str) or "content" not in value:
        return False
    return not _has_parts(value["content"]) or all(map(_is_text, value["content"]))


def _content(content: Any) -> Any:
    """The content with text parts joined to one text: many templates drop parts, or write them as Python does."""
    return "".join(part["text"] for part in content) if _has_parts(content) else content


def _has_parts(content: Any) -> bool:
    return isinstance(content, Sequence) and not isinstance(content, str)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _answer(row: Row, column: str | None) -> Any:
    if column is not None:
        return value_at(row.values, column)
    judged = row.values.get("reward_model")
    return judged.get("ground_truth") if isinstance(judged, Mapping) else None
