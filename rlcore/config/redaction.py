"""Secrets come from the environment as `${oc.env:NAME}`; what they resolve to is taken out of all that is printed."""

import json
import logging
import os
import re

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
        for written in (value, json.dumps(value)[1:-1], repr(value)[1:-1]):
            _resolved[written] = f"${{oc.env:{name}}}"
            _in_json[written] = json.dumps(written, ensure_ascii=False)[1:-1].encode("utf-8", "replace")


def is_redacted(line: bytes) -> bool:
    """Whether a line of JSON, its letters unescaped, holds no text that `redact` would replace."""
    return not any(each in line for each in _in_json.values())


def redact(text: str) -> str:
    """The text with every value that the configuration read from the environment written as `${oc.env:NAME}` again.

    Values are found as they are, and as JSON and `repr` write them. Values of fewer than six characters are left when
    the variable's name has nothing of a secret (key, token, secret, passw, credential, auth).
    """
    for value in sorted(_resolved, key=len, reverse=True):
        text = text.replace(value, _resolved[value])
    return text


class RedactingFormatter(logging.Formatter):
    """Formats log records, tracebacks included, without the values that `redact` knows."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))
