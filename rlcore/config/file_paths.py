"""Files that a configuration file names count from its directory, then from the working directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config.sections import RunConfig

SUFFIXES = (".yaml", ".yml")


def directory_of(key: str, origins: Mapping[str, str]) -> Path | None:
    """The directory of the configuration file, or of the file that it links to, that sets the key; None without one."""
    file = Path(origins.get(key, ""))
    if file.suffix not in SUFFIXES or not file.is_file():
        return None
    return (file.resolve() if file.is_symlink() else file).parent


def paths_from_their_files(config: RunConfig, shown: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """The keys of sources whose path exists in the directory of the file that sets it, with the path from there.

    Absolute paths, interpolated ones, and those of files in the working directory stay as they are.
    """
    sources = {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}
    sources |= {f"eval.sources.{name}.path": source.path for name, source in config.eval.sources.items()}
    found = {}
    for key, path in sources.items():
        directory = directory_of(key, origins)
        if path and shown.get(key) == path and directory is not None:
            from_there = directory / path
            if from_there != Path(path) and from_there.exists():
                found[key] = str(from_there)
    return found
