"""The file of `model.chat_template`: read, and checked for Jinja's syntax, before anything starts.

Jinja is imported when a template is checked, so planning without one does not import it.
"""

from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, describe

MAX_BYTES = 1 << 22
"""The largest template that is read; real ones have some 10 KB."""


def read_chat_template(named: str) -> str:
    """The text of the file that `model.chat_template` names. ConfigError unless it is a readable file of Jinja."""
    who, file = f"model.chat_template='{named}'", Path(named).expanduser()
    try:
        if file.is_file():
            if file.stat().st_size > MAX_BYTES:
                raise ConfigError(f"{who}: it has more than {MAX_BYTES >> 20} MiB; needs a Jinja file")
            text = file.read_text("utf-8")
        elif file.exists():  # opening a pipe would wait for its other end
            kind = "a directory" if file.is_dir() else "a pipe" if file.is_fifo() else "a device or a socket"
            raise ConfigError(f"{who}: it is {kind}; needs a Jinja file")
        else:
            raise ConfigError(f"{who}: found no file (looked for {file.absolute()}); needs a Jinja file")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{who}: it cannot be read ({describe(cause)}); needs a Jinja file in UTF-8") from cause
    _check_syntax(who, text)
    return text


def _check_syntax(who: str, text: str) -> None:
    """ConfigError for a text that Jinja cannot parse, with the tags that transformers adds to its own."""
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:  # rendering needs it, and says so
        return

    class Generation(Extension):
        """Marks what an assistant wrote: `{% generation %}`."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    try:
        environment.parse(text)
    except TemplateSyntaxError as cause:
        found = " ".join((cause.message or "").split()).rstrip(".")
        raise ConfigError(
            f"{who}: it is not Jinja: line {cause.lineno}: {found}; needs a template that renders messages"
        ) from cause
    except RecursionError as cause:
        raise ConfigError(f"{who}: it is nested too deep for Jinja; needs a template that renders messages") from cause
