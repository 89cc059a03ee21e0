"""Checks, without an import, that a target ('module:attr' or '/abs/file.py:attr') leads to a function.

Parses the source of a module that is not loaded. A target passes if the source does not show it (a C module,
`import *`, a module `__getattr__`, a decorated function's parameters): the import at run time decides.
"""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rlcore.errors import counted, nearest, shown

FORM = "'module:attr' or '/abs/file.py:attr', a function at the top level of its module"
_DYNAMIC = ("sys.modules", "globals()", "locals()", "vars()", "setattr(", "exec(", "__path__", "meta_path")
"""Source that may define names, or find submodules, in ways that parsing does not see."""
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr)
_Body = Sequence[ast.stmt]
_Definitions = dict[str, list[ast.AST]]


def static_problem(target: object, num_arguments: int | None = None) -> str | None:
    """The certain problem with a target: 'there is no module 'x''; None if it may be importable.

    With `num_arguments` the target has to be a plain function that takes this many positional arguments. Without, it
    may also be a class or `async def`, and `attr` may have dots. Imports nothing; inspects a loaded module directly.
    """
    if not well_formed(target):
        return f"found {shown(target)}; needs {FORM}"
    where, _, attribute = str(target).rpartition(":")
    names = attribute.split(".")
    if num_arguments is not None and len(names) > 1:
        return f"found {shown(target)}; needs {FORM}"
    if where.endswith(".py"):
        return _in_file(Path(where), names, num_arguments)
    module = sys.modules.get(where)
    if module is not None:
        return _in_module(module, where, names, num_arguments)
    found = _source_of(where)
    if not isinstance(found, Path):
        return found
    return _in_source(found, f"module '{where}'", names, num_arguments)


def well_formed(target: object) -> bool:
    """True for 'a.b:c' and '/abs/file.py:c'; c may have dots."""
    where, _, attribute = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    is_place = where.endswith(".py") or all(part.isidentifier() for part in where.split("."))
    return is_place and all(name.isidentifier() for name in attribute.split("."))


def _in_file(path: Path, names: Sequence[str], num_arguments: int | None) -> str | None:
    if not path.is_absolute():
        return f"file '{path}': needs an absolute path, workers may start in another directory"
    if not path.is_file():
        return f"found no file '{path}'"
    return _in_source(path, f"file '{path}'", names, num_arguments)


def _source_of(module: str) -> Path | str | None:
    """The source file of a module that is not loaded, or the problem with its name; None if neither is known."""
    places: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        loaded = sys.modules.get(name)
        spec: ModuleSpec | None = getattr(loaded, "__spec__", None) or spec_of(name, places)
        if spec is None and loaded is not None:
            return None
        if spec is None:
            return f"there is no module '{name}'; install what has it, or correct the name"
        if depth == len(parts):
            return _python_file(spec)
        inside = getattr(loaded, "__path__", None) or spec.submodule_search_locations
        source = _python_file(spec)
        if loaded is None and source is not None and _is_dynamic(source):
            return None
        if inside is None and source is not None:
            return f"there is no module '{'.'.join(parts[: depth + 1])}': '{name}' is not a package"
        if inside is None:
            return None
        places = list(inside)
    return None


def spec_of(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module like `importlib.util.find_spec`, but without importing the packages around it."""
    tail = name.rpartition(".")[2]
    for finder in sys.meta_path:
        # For a nested namespace package, PathFinder would look up the outer one among loaded modules.
        known_as = tail if finder is PathFinder else name
        with suppress(Exception):  # of a foreign finder; the import will fail in the same way
            spec = finder.find_spec(known_as, places)
            if spec is not None:
                return spec
    return None


def _python_file(spec: ModuleSpec) -> Path | None:
    if not spec.has_location or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    return path if path.is_file() else None


def _is_dynamic(path: Path) -> bool:
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return True
    return any(word in text for word in _DYNAMIC)


def _in_module(module: ModuleType, where: str, names: Sequence[str], num_arguments: int | None) -> str | None:
    """The problem in a loaded module. Does not call the module's `__getattr__`, which may import anything."""
    contents = vars(module)
    if names[0] not in contents:
        if "__getattr__" in contents or type(module) is not ModuleType:
            return None
        return _missing(names[0], f"module '{where}'", [name for name, value in contents.items() if callable(value)])
    if len(names) > 1:
        return None
    found = contents[names[0]]
    if not callable(found):
        return f"'{names[0]}' of module '{where}' is {type(found).__name__}; needs a function"
    if num_arguments is None or not isinstance(found, FunctionType):
        return None
    if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found) or inspect.isgeneratorfunction(found):
        return _not_plain(names[0], where, "async def" if not inspect.isgeneratorfunction(found) else "a generator")
    return _does_not_bind(found, names[0], where, num_arguments)


def _does_not_bind(function: Callable[..., Any], name: str, where: str, num_arguments: int) -> str | None:
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        signature.bind(*range(num_arguments))
    except TypeError:
        return _wrong_parameters(name, str(signature), where, num_arguments)
    except ValueError:
        return None
    return None


def _in_source(path: Path, where: str, names: Sequence[str], num_arguments: int | None) -> str | None:
    try:
        file = path.stat()
        defined = _defined(path, file.st_mtime_ns, file.st_size)
    except (SyntaxError, ValueError) as cause:
        line = f"line {cause.lineno}: " if isinstance(cause, SyntaxError) and cause.lineno else ""
        return f"{where} is not a Python file: {line}{getattr(cause, 'msg', cause)}"
    except (OSError, RecursionError, MemoryError):
        return None
    if "*" in defined or "__getattr__" in defined or _is_dynamic(path):
        return None
    if names[0] not in defined:
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        functions = [name for name, nodes in defined.items() if isinstance(nodes[-1], named)]
        return _missing(names[0], where, functions)
    return None if len(names) > 1 else _wrong_definition(names[0], defined[names[0]], where, num_arguments)


@lru_cache(maxsize=128)
def _defined(path: Path, changed_ns: int, size: int) -> _Definitions:
    """Names that a file of this age and size binds; cached, because plans are made more often than files change."""
    defined: _Definitions = {}
    for name, node in _definitions(ast.parse(path.read_bytes(), str(path)).body):
        defined.setdefault(name, []).append(node)
    return defined


def _wrong_definition(name: str, nodes: Sequence[ast.AST], where: str, num_arguments: int | None) -> str | None:
    if all(isinstance(node, _LITERALS) for node in nodes):
        return f"'{name}' of {where} is {ast.unparse(nodes[-1]):.40}; needs a function"
    node = nodes[0]
    if num_arguments is None or len(nodes) > 1 or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    if node.decorator_list:
        return None
    if isinstance(node, ast.AsyncFunctionDef) or _yields(node):
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "a generator"
        return _not_plain(name, where, kind)
    by_position = [*node.args.posonlyargs, *node.args.args]
    required = len(by_position) - len(node.args.defaults)
    by_name = sum(default is None for default in node.args.kw_defaults)
    if required <= num_arguments and (node.args.vararg or num_arguments <= len(by_position)) and not by_name:
        return None
    return _wrong_parameters(name, f"({ast.unparse(node.args)})", where, num_arguments)


def _definitions(body: _Body) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements of a module bind, each with the definition or value; '*' for `from x import *`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
            yield from (
                (name, child) for child in ast.walk(node) if isinstance(child, ast.Global) for name in child.names
            )
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (((alias.asname or alias.name).split(".")[0], alias) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                else:
                    yield from _stored(target)
            yield from _stored(node.value)
        elif not isinstance(node, ast.AnnAssign):
            yield from _in_statement(node)


def _in_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Names that any other statement binds, and those of the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield from _definitions([child])
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from _definitions(child.body)
            yield from _stored(child)
        else:
            yield from _stored(child)


def _stored(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, child
        elif isinstance(child, (ast.MatchAs, ast.MatchStar)) and child.name:
            yield child.name, child


def _yields(function: ast.AST) -> bool:
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return False


def _missing(name: str, where: str, functions: Sequence[str]) -> str:
    public = [function for function in functions if not function.startswith("_")]
    return f"{where} defines no '{name}'; {nearest(name, public)}"


def _not_plain(name: str, where: str, kind: str) -> str:
    return f"'{name}' of {where} is {kind}; needs a plain function, which returns its result"


def _wrong_parameters(name: str, parameters: str, where: str, num_arguments: int) -> str:
    count = counted(num_arguments, "argument")
    return f"'{name}' of {where} takes {parameters}; needs to take {count} by position"
