"""Names that become paths and parts of metric names: of runs, sources, reward functions, pools and plugins."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcore.config.sections import TrainConfig
from rlcore.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST = 120


def check_name(key: str, name: object, what: str, *, dots: bool = False) -> None:
    """ConfigError unless `name` is safe as one component of a path, without separators and '..'.

    `dots`: it may have '.', because it is not a part of a dotted key.
    """
    if isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= _LONGEST and (dots or "." not in name):
        return
    letters = "letters, digits, '.', '_' and '-'" if dots else "letters, digits, '_' and '-'"
    dotted = isinstance(name, str) and not dots and _NAME.fullmatch(name) and "." in name
    example = f", such as {str(name).replace('.', '_')}, because '.' divides the parts of a key" if dotted else ""
    raise ConfigError(
        f"{key}: found {name!r} as the name of {what}; needs {letters} only, beginning with a letter or digit, "
        f"{_LONGEST} characters at most{example}"
    )


def default_run_name(files: Sequence[Any], now: datetime) -> str:
    """The stem of the last configuration file ('run' without one) and the UTC time: 'config-20260131-235959'."""
    stems = [file.stem for file in files if isinstance(file, Path)]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stems[-1]).strip("-._") if stems else ""
    return f"{stem[: _LONGEST - 20] or 'run'}-{now.astimezone(UTC):%Y%m%d-%H%M%S}"


def run_directory(train: TrainConfig, files: Sequence[Any], now: datetime) -> Path:
    """`train.dir` / `train.name`, or the default name. Creates nothing.

    ConfigError for a name that could leave `train.dir`, and for a directory that is a symbolic link.
    """
    name = train.name or default_run_name(files, now)
    check_name("train.name", name, "a run", dots=True)
    path = Path(train.dir).expanduser() / name
    if path.is_symlink():
        raise ConfigError(
            f"train.name: '{path}' is a symbolic link; needs a separate directory, choose another name or train.dir"
        )
    return path
