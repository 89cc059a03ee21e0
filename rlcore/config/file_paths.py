"""Data files that a configuration file names count from its directory, as reward functions do, then from the working
directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.config.sections import RunConfig

SUFFIXES = (".yaml", ".yml")


def beside_their_files(config: RunConfig, shown: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """The keys of sources whose path exists in the directory of the file that sets it, with the path from there.

    Absolute paths, interpolated ones, and those of files in the working directory stay as they are.
    """
    sources = {f"data.sources.{name}.path": source.path for name, source in config.data.sources.items()}
    sources |= {f"eval.sources.{name}.path": source.path for name, source in config.eval.sources.items()}
    found = {}
    for key, path in sources.items():
        file = Path(origins.get(key, ""))
        if path and shown.get(key) == path and file.suffix in SUFFIXES and file.is_file():
            beside = file.parent / path
            if str(beside) != str(Path(path)) and beside.exists():
                found[key] = str(beside)
    return found
