"""Removes secrets from what is shown.

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


@cache
def _secrets() -> tuple[tuple[str, str], ...]:
    found = [(value, name) for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST]
    return tuple(sorted(found, key=lambda pair: len(pair[0]), reverse=True))
