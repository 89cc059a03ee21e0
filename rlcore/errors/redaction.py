"""The one way of foreign text to a terminal, a log or a page: without secrets, without control characters.

Secrets come from the environment as `${oc.env:NAME}`; what they resolve to is taken out of all that is shown or saved.
"""

import base64
import json
import logging
import os
import re
import unicodedata
from urllib.parse import quote

_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_SHORTEST = 6
"""A shorter value of a variable that is not named like a secret, such as a number, would blot out half the text."""

# Of the whole process, because anything that prints may meet a resolved value: text as printed -> '${oc.env:NAME}'.
_resolved: dict[str, str] = {}
_in_json: dict[str, bytes] = {}
"""The same texts, as a line of JSON has them."""


def remember_variable(name: str) -> None:
    """From now on `redact` replaces the value of this environment variable."""
    value = os.environ.get(name, "")
    if value.strip() and (len(value) >= _SHORTEST or _SECRET_NAME.search(name)):
        for written in _written(value):
            _resolved[written] = f"${{oc.env:{name}}}"
            _in_json[written] = json.dumps(written, ensure_ascii=False)[1:-1].encode("utf-8", "replace")


def _written(value: str) -> set[str]:
    """The value as programs write it: plain, in JSON once and twice, as Python's and as a URL's text, as base64."""
    in_json = json.dumps(value)
    raw = value.encode("utf-8", "surrogateescape")
    texts = {value, repr(value)[1:-1], ascii(value)[1:-1], repr(raw)[2:-1], quote(raw), quote(raw, safe="")}
    texts |= {in_json[1:-1], in_json[1:-1].replace("/", "\\/"), json.dumps(in_json[1:-1])[1:-1]}
    texts.add(value.replace("/", "\\/"))
    return texts | {base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()}


def is_redacted(line: bytes) -> bool:
    """True if a line of JSON, its letters unescaped, holds no text that `redact` would replace."""
    return not any(form in line for form in _in_json.values())


def has_secrets() -> bool:
    """True if the configuration read a value that `redact` replaces."""
    return bool(_resolved)


def redact(text: str) -> str:
    """The text with every value that the configuration read from the environment written as `${oc.env:NAME}` again.

    Values are found as they are, and as JSON, `repr`, URLs and base64 write them. Values of fewer than six characters
    are left when the variable's name has nothing of a secret (key, token, secret, passw, credential, auth).
    """
    for value in sorted(_resolved, key=len, reverse=True):
        text = text.replace(value, _resolved[value])
    return text


def clipped(text: str, characters: int) -> str:
    """The beginning of a text without secrets: redacted before it is cut, because half a secret is not recognised."""
    text = redact(text)
    return text if len(text) <= characters else text[:characters]


def displayable(text: str) -> str:
    """Text from anywhere, as a terminal, a log or a page may show it.

    Secrets are redacted. What would steer a terminal (control characters, escape sequences, bidirectional marks) or
    cannot be encoded (lone surrogates) becomes U+FFFD; line breaks, tabs and spaces of every width stay.
    """
    text = redact(text)
    if text.isprintable():
        return text
    return "".join(letter if _is_shown(letter) else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"


class DisplayFormatter(logging.Formatter):
    """Formats log records, tracebacks included, as they may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        return displayable(super().format(record))
