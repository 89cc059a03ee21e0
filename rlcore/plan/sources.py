"""Finds and reads the source code of a target without importing it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rlcore.errors.checks.targets import spec_of

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
MAX_HOPS = 5
"""Maximum number of modules that re-export a name from one another."""
_DATA = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.Compare)
_CONVERSIONS = frozenset({"float", "int", "bool", "str", "len", "sum", "round", "list", "dict", "tuple"})


def source_file(target: str) -> Path | None:
    """The file that a target 'module:attr' or 'file.py:attr' is loaded from, found without importing it."""
    where = target.rpartition(":")[0]
    if where.endswith(".py"):
        path = Path(where)
        return path if path.is_file() else None
    parts = where.split(".")
    spec: ModuleSpec | None = None
    places: list[str] | None = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = getattr(sys.modules.get(name), "__spec__", None) or spec_of(name, places)  # a plugin's file has no place
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    return origin if origin is not None and origin.is_file() else None


def function_node(target: str) -> ast.FunctionDef | None:
    """The plain function that a target names; None for anything else, as in `definition`."""
    found = definition(target)
    return found if isinstance(found, ast.FunctionDef) else None


def definition(target: str) -> Definition | None:
    """The top-level definition of the function or class that a target names, followed through re-exports.

    None for anything else, without source, and with decorators, which may change the signature.
    """
    where, _, attribute = target.rpartition(":")
    path = source_file(f"{where}:{attribute}")
    for _ in range(MAX_HOPS):
        if path is None or path.suffix != ".py":
            return None
        try:
            tree = ast.parse(path.read_text("utf-8"), str(path))
        except (OSError, SyntaxError, ValueError):
            return None
        found = next((node for node in _top_level(tree.body) if attribute in _names(node)), None)
        if isinstance(found, Definition):
            return None if found.decorator_list else found
        if not isinstance(found, ast.ImportFrom):
            return None
        attribute = next(alias.name for alias in found.names if (alias.asname or alias.name) == attribute)
        path = _imported_from(found, path)
    return None


def returns_no_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if the source shows that no call of it returns a function: it returns data, or nothing, or later."""
    if isinstance(node, ast.AsyncFunctionDef):
        return True
    own = list(_within(node))
    if any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in own):
        return True
    return all(_is_data(part.value) for part in own if isinstance(part, ast.Return))


def _is_data(value: ast.expr | None) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_data(value.body) and _is_data(value.orelse)
    if isinstance(value, ast.BinOp):
        return _is_data(value.left) or _is_data(value.right)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in _CONVERSIONS
    return value is None or isinstance(value, _DATA)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a function's body, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _within(child)


def _top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, including those in the branches of `if`, such as `if TYPE_CHECKING`."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If):
            yield from _top_level([*statement.body, *statement.orelse])


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return tuple(alias.asname or alias.name for alias in node.names)
    targets: list[Any] = node.targets if isinstance(node, ast.Assign) else []
    return tuple(target.id for target in targets if isinstance(target, ast.Name))


def _imported_from(node: ast.ImportFrom, path: Path) -> Path | None:
    if not node.level:
        return source_file(f"{node.module}:name")
    directory = path.parents[node.level - 1]
    for part in (node.module or "").split("."):
        directory = directory / part if part else directory
    places = (directory.with_suffix(".py"), directory / "__init__.py")
    return next((place for place in places if place.is_file()), None)
