"""Plugin packages for tests, as an installer would leave them."""

import importlib
import os
import sys
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
    """A module and the metadata of its distribution below `site`, a directory on sys.path; returns the module's name.

    Without `entry_points` the module is a plugin of the module's name. `source` is dedented.
    """
    distribution = distribution or module.replace("_", "-")
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{module}.py").write_text(dedent(source), "utf-8")
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    (info / "METADATA").write_text(
        "\n".join([*lines, *(f"Requires-Dist: {requirement}" for requirement in requires), ""]), "utf-8"
    )
    groups = entry_points if entry_points is not None else {"rlcore": {module: module}}
    text = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    )
    (info / "entry_points.txt").write_text(text, "utf-8")
    return module


@contextmanager
def importable(site: Path) -> Iterator[Path]:
    """Make the packages in `site` importable, with their metadata. Afterwards their modules are unloaded."""
    site.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    before = dict(sys.modules)
    try:
        yield site
    finally:
        sys.path.remove(str(site))
        directory = str(site)
        for name, module in list(sys.modules.items()):  # thousands, of which few are new
            if before.get(name) is not module and os.path.dirname(getattr(module, "__file__", None) or "") == directory:
                del sys.modules[name]
