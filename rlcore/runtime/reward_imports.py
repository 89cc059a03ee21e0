"""Finds imports of reward files that will fail, without importing the files."""

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlcore.plan import RunPlan
from rlcore.plan.sources import source_file


def missing_imports(plan: RunPlan) -> Iterator[str]:
    """Notes on modules that a reward's file imports at its top level, and that this Python does not have.

    Imports below `try` or `if` are optional, and files that change `sys.path` are skipped.
    """
    if plan.cluster.abilities.elsewhere:
        return
    for reward in plan.rewards:
        path = source_file(reward.target)
        if path is None or path.suffix != ".py":
            continue
        text = path.read_text("utf-8")
        if "sys.path" in text:
            continue
        for line, name in _imported(ast.parse(text)):
            if not _is_there(name, path.parent):
                yield (
                    f"reward.functions.{reward.name}: {path}:{line} imports '{name}', which this Python does not have; "
                    f"install it into {sys.executable}, or put {name}.py next to the file"
                )


def _imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and top-level package of each import that always happens."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, alias.name.partition(".")[0]) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.lineno, statement.module.partition(".")[0]


def _is_there(name: str, directory: Path) -> bool:
    if name in sys.modules or (directory / f"{name}.py").exists() or (directory / name).is_dir():
        return True
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a finder that fails
        return True
