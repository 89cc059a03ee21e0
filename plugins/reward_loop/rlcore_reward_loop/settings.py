"""The plugin's settings."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from rlcore.config.options import option
from rlcore.errors import ConfigError


@dataclass(frozen=True)
class RewardLoopSettings:
    """How the scoring service is asked; `plugins.reward_loop`."""

    url: str = ""
    """Where samples are posted: http or https."""
    deadline_s: float = option(60.0, above=0)
    """Seconds from the first try of a call to its answer."""
    tries: int = option(3, at_least=1)
    """Calls at most for a sample; only connect errors, 429 and 5xx are tried again."""
    concurrency: int = option(64, at_least=1)
    """Calls at a time; evaluation has as many of its own."""
    max_response_bytes: int = option(1_000_000, at_least=1)
    """A longer answer is a failure."""
    token: str = ""
    """Bearer token; give it as ${oc.env:NAME}."""


def check_url(settings: RewardLoopSettings) -> None:
    """ConfigError when there is no service to ask."""
    parts = urlsplit(settings.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"plugins.reward_loop.url: found '{settings.url}'; needs the address of a scoring service, such as "
            "http://127.0.0.1:8000/score"
        )
