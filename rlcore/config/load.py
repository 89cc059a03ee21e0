"""Files and overrides become one frozen `RunConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.config.sections import RunConfig


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved configuration with where its values came from."""

    config: RunConfig
    origins: Mapping[str, str]
    """Of every dotted key: 'default', 'preset grpo', 'plugin x', the file's path, or the override as it was typed."""
    yaml: str
    """What is saved with the run: complete, but with `${oc.env:NAME}` unresolved."""
