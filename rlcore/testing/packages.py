"""Plugin packages for tests, as an installer would write them."""

import importlib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent


def write_package(
    site: Path,
    module: str,
    source: str,
    *,
    distribution: str = "",
    version: str = "1.0",
    requires: Sequence[str] = ("rlcore>=0.1,<0.2",),
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """Write a module and its distribution's metadata below `site`, a directory on sys.path; returns the module's name.

    Without `entry_points`, the module is a plugin of the same name. `source` is dedented.
    """
    distribution = distribution or module.replace("_", "-")
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(dedent(source), "utf-8")
    groups = entry_points if entry_points is not None else {"rlcore": {module: module}}
    _write_metadata(site, distribution, version, requires, groups)
    return module


def write_metadata(site: Path, project: Path) -> list[str]:
    """Write metadata of the project, a directory with a pyproject.toml, below `site`; returns the names of its plugins.

    With `site` and the project's directory on sys.path, rlcore finds the plugins as after an installation.
    """
    described = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    groups = described.get("entry-points", {})
    _write_metadata(site, described["name"], described["version"], described.get("dependencies", ()), groups)
    return list(groups.get("rlcore", {}))


def _write_metadata(
    site: Path, distribution: str, version: str, requires: Sequence[str], groups: Mapping[str, Mapping[str, str]]
) -> None:
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join([*lines, ""]), "utf-8")
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    )
    (info / "entry_points.txt").write_text(text, "utf-8")


@contextmanager
def importable(site: Path) -> Iterator[Path]:
    """Make the packages in `site` importable, with their metadata, and unload their modules afterwards."""
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    before = dict(sys.modules)
    try:
        yield site
    finally:
        sys.path.remove(str(site))
        directory = str(site)
        for name, module in list(sys.modules.items()):  # thousands of modules, few of them new
            if before.get(name) is not module and os.path.dirname(getattr(module, "__file__", None) or "") == directory:
                del sys.modules[name]
