"""Prepares foreign text for a terminal or a page: removes secrets and control characters.

Secrets are environment variables with telling names, and tokens with a known format.
"""

import os
import re
from functools import cache

_NAME = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
_SHORTEST = 8
_FORMS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[0-9A-Z]{16}|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{16,})"
)


def redact(text: str) -> str:
    """The text with secrets replaced by the variable's name or the kind of token."""
    for value, name in _secrets():
        if value in text:
            text = text.replace(value, f"${{{name}}}")
    return _FORMS.sub(lambda match: f"[{match[0][:4]}... redacted]", text)


def displayable(text: str) -> str:
    """A line for a terminal, without secrets; control characters are written as Python escapes."""
    text = redact(text)
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def clipped(text: str, characters: int) -> str:
    """The beginning of a text without secrets. Redacts before it cuts, because half a secret is not recognised."""
    return redact(text)[:characters]


@cache
def _secrets() -> tuple[tuple[str, str], ...]:
    found = [(value, name) for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST]
    return tuple(sorted(found, key=lambda pair: len(pair[0]), reverse=True))
