"""Prepares foreign text for a terminal, a log or a page: removes secrets and control characters.

Secrets come from the environment as `${oc.env:NAME}`; their values are removed from everything that is shown or saved.
"""

import base64
import html
import json
import logging
import os
import re
import unicodedata
from urllib.parse import quote, quote_plus

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_SECRET_WORD = re.compile(r"(^|_)(key|token|secret|credentials?)(_|$)|apikey|passw", re.IGNORECASE)
_SHORTEST_UNASKED = 8
_SHORTEST = 6
"""Fewest characters of a value to redact if its variable is not named like a secret.

Shorter values, such as numbers, would redact much of the text.
"""
LONGEST_LINE = 10_000
"""Characters of a line of a warning, an error or the log; an exception's text may have any length."""

LONGEST_TEXT = 100_000
"""Characters that are kept of a text of any length, such as an exception's, before it is redacted and copied."""

# For the whole process, because any output may contain a resolved value: text as printed -> '${oc.env:NAME}'.
_resolved: dict[str, str] = {}
_in_json: dict[str, bytes] = {}
"""The same texts as they stand in a line of JSON."""


def remember_variable(name: str) -> None:
    """Make `redact` replace the value of this environment variable."""
    value = os.environ.get(name, "")
    if value.strip() and (len(value) >= _SHORTEST or _SECRET_NAME.search(name)):
        for written in _written(value) | _lines(value):
            _resolved[written] = f"${{oc.env:{name}}}"
            _in_json[written] = json.dumps(written, ensure_ascii=False)[1:-1].encode("utf-8", "replace")


def remember_environment() -> None:
    """Make `redact` replace the values of variables named like API_KEY or HF_TOKEN, even if nothing reads them.

    Workers and async reward functions have all variables; other child processes have those that the configuration
    names.
    """
    for name, value in os.environ.items():
        if _SECRET_WORD.search(name) and len(value) >= _SHORTEST_UNASKED and not value.startswith(("/", "${oc.env:")):
            remember_variable(name)


def _written(value: str) -> set[str]:
    """The value as programs write it: plain, as JSON once and twice, as Python text, in URLs, pages, hex and base64."""
    in_json = json.dumps(value)
    raw = value.encode("utf-8", "surrogateescape")
    texts = {value, repr(value)[1:-1], ascii(value)[1:-1], repr(raw)[2:-1], quote(raw), quote(raw, safe="")}
    texts |= {in_json[1:-1], in_json[1:-1].replace("/", "\\/"), json.dumps(in_json[1:-1])[1:-1]}
    texts.add(value.replace("/", "\\/"))
    texts |= {quote_plus(raw), _lower_escapes(quote(raw, safe="")), html.escape(value), raw.hex(), raw.hex().upper()}
    texts |= {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}
    return texts | {text for before in range(3) for text in _in_base64(raw, before)}


def _lines(value: str) -> set[str]:
    """The lines of a value of several, such as a private key: output is shown line by line."""
    lines = {line.strip() for line in value.splitlines()} if "\n" in value.strip() else set()
    return {written for line in lines if len(line) >= _SHORTEST_UNASKED for written in (line, json.dumps(line)[1:-1])}


def _lower_escapes(text: str) -> str:
    return re.sub("%[0-9A-F]{2}", lambda escape: escape.group().lower(), text)


def _in_base64(raw: bytes, before: int) -> set[str]:
    """The base64 of a value within a longer text, such as `user:password`; `before` bytes precede it, modulo 3.

    Leaves out letters that hold bits of the neighbours; at each end they hold less than a byte of the value.
    """
    if len(raw) < _SHORTEST:
        return set()
    first, last = (8 * before + 5) // 6, 8 * (before + len(raw)) // 6
    padded = bytes(before) + raw + b"\0\0"
    return {encode(padded).decode()[first:last] for encode in (base64.b64encode, base64.urlsafe_b64encode)}


def is_redacted(line: bytes) -> bool:
    """True if a line of JSON without escaped letters holds no text that `redact` would replace."""
    return not any(form in line for form in _in_json.values())


def has_secrets() -> bool:
    """True if the configuration read a value that `redact` replaces."""
    return bool(_resolved)


def redact(text: str) -> str:
    """The text, with `${oc.env:NAME}` in place of every value that the configuration read from the environment.

    Finds values verbatim, and in the forms of JSON, `repr`, URLs and base64. Leaves values of fewer than six characters
    if the variable's name does not contain a word for secrets (key, token, secret, passw, credential, auth).
    """
    for value in sorted(_resolved, key=len, reverse=True):
        text = text.replace(value, _resolved[value])
    return text


def clipped(text: str, characters: int) -> str:
    """The beginning of a text without secrets. Redacts before it cuts, because half a secret is not recognised."""
    text = redact(text)
    return text if len(text) <= characters else text[:characters]


def beginning(text: str) -> str:
    """The first LONGEST_TEXT characters of a text, without a secret at their end that this or an earlier cut halves.

    For texts that are too long to redact as a whole, which copies them several times.
    """
    if len(text) < LONGEST_TEXT:
        return text
    text = text[:LONGEST_TEXT]
    return text[: len(text) - begun_secret(text)]


def begun_secret(text: str) -> int:
    """The number of last characters that may be the beginning of a secret whose rest has not come; 0: none."""
    return max((_overlap(text, value) for value in _resolved), default=0)


def _overlap(text: str, value: str) -> int:
    lengths = range(min(len(text), len(value) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(value[:length])), 0)


def displayable(text: str) -> str:
    """Text of any origin, safe to show on a terminal, in a log or on a page.

    Redacts secrets. Characters that control a terminal (control characters, escape sequences, bidirectional marks) or
    cannot be encoded (lone surrogates) become U+FFFD; line breaks, tabs and spaces of every width stay.
    """
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else "\N{REPLACEMENT CHARACTER}" for letter in text)


def bounded(text: str) -> str:
    """Displayable text of a message. A line over LONGEST_LINE characters is cut, and says how many more there are."""
    lines = displayable(text).split("\n")
    return "\n".join(
        line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}... ({len(line) - LONGEST_LINE} characters more)"
        for line in lines
    )


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


class DisplayFormatter(logging.Formatter):
    """Formats log records and their tracebacks as displayable text."""

    def format(self, record: logging.LogRecord) -> str:
        return bounded(super().format(record))
