"""Reward functions from Python, in a form that child processes can load: a module's name, or source in a file.

A child process imports a function by name. It cannot import a function of `__main__`, of a notebook, or one that is
defined in another function: importing from a script would run it, and train, again. The source of such a function is
written to a file with everything that it refers to: modules, importable objects, plain values, and the source of
further functions and classes.
"""

import __future__

import ast
import inspect
import linecache
import re
import symtable
import sys
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlcore.errors import ConfigError, describe

MAX_TEXT = 1 << 20
"""Most characters of one value in the written source; larger values belong in a file."""
FUTURE = "from __future__ import annotations"
MISSING = object()


@dataclass(frozen=True)
class SharedFunction:
    """A function in a form that another process can load."""

    name: str
    """The function's `__name__`."""
    module: str
    """The module to import it from; empty if `source` defines it."""
    source: str = ""
    """A module that defines it."""
    reason: str = ""
    """The reason why it is passed as source."""


def share_function(function: Any, who: str) -> SharedFunction:
    """The function in a form that child processes can load; ConfigError, beginning with `who`, if there is none."""
    if not isinstance(function, FunctionType):
        kind = describe_type(function)
        raise ConfigError(f"{who}: found {kind}; needs a function that is written with def, or a text 'file.py:name'")
    if function.__name__ == "<lambda>":
        raise ConfigError(f"{who}: found a lambda, which has no name in another process; write it with def")
    reason = why_not_importable(function)
    if not reason:
        return SharedFunction(function.__name__, function.__module__)
    return SharedFunction(function.__name__, "", _Source(who).of(function), reason)


def why_not_importable(found: Any) -> str:
    """The reason why another process cannot import the function or class; empty if it can."""
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if not isinstance(module, str) or not name:
        return "it has no module"
    if module == "__main__":
        return "it is defined in __main__"
    if "<locals>" in name:
        return "it is defined in a function"
    if not _found_again(module):
        return f"its module '{module}' cannot be imported by name"
    value: Any = sys.modules[module]
    for part in name.split("."):
        value = getattr(value, part, MISSING)
    return "" if value is found else f"'{module}.{name}' is another object"


def _found_again(module: str) -> bool:
    """True if importing the name in another process with the same `sys.path` gives the module that is loaded here."""
    loaded, top = sys.modules.get(module), module.partition(".")[0]
    if loaded is None or top not in sys.modules:
        return False
    # `importlib.util.find_spec` would return the spec of the loaded module, regardless of its origin
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    spec = next((spec for finder in finders if (spec := finder.find_spec(top, None)) is not None), None)
    return spec is not None and (not spec.has_location or spec.origin == getattr(sys.modules[top], "__file__", None))


def describe_type(value: Any) -> str:
    """The type of a value, with its article: 'a Linear of torch.nn'."""
    kind = type(value)
    article = "an" if kind.__qualname__[:1].lower() in "aeiou" else "a"
    home = kind.__module__
    return f"{article} {kind.__qualname__}" + ("" if home == "builtins" else f" of {home}")


class _Source:
    """Writes a module that defines a function and all that it refers to."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._lines: list[str] = []
        self._values: dict[str, Any] = {}
        """The object that each name of the module stands for."""

    def of(self, function: FunctionType) -> str:
        """The text of the module; ConfigError for an object that cannot be written as source."""
        self._define(function.__name__, function, function.__name__)
        text = "\n".join([FUTURE, "", *self._lines]) + "\n"
        try:
            compile(text, "<reward function>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as cause:
            raise ConfigError(f"{self._who}: its source does not stand alone: {describe(cause)}; {WAY_OUT}") from cause
        self._check_current(inspect.unwrap(function))
        return text

    def _check_current(self, function: Any) -> None:
        """ConfigError if the source file was edited after the function was made.

        From Python 3.12 on, the code of a call `x.f()` depends on whether the compiled unit imports x. Python compiles
        a script as a whole, and IPython compiles each statement of a cell separately, so either unit may match.
        """
        lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
        sources = "".join(lines), self._source_of(function)
        if not function.__closure__ and not any(_defines(source, function.__code__) for source in sources):
            raise self._changed(function.__name__)

    def _changed(self, name: str) -> ConfigError:
        return ConfigError(f"{self._who}: the source of '{name}' has changed since it was defined; define it again")

    def _define(self, name: str, value: Any, user: str) -> None:
        """Write the object that `name` stands for in `user`, the function or class that refers to it."""
        before = self._values.get(name, MISSING)
        if before is value:
            return
        if before is not MISSING:
            raise ConfigError(
                f"{self._who}: '{name}' stands for two different objects in the code that it uses; {WAY_OUT}"
            )
        self._values[name] = value
        line = _as_line(name, value)
        if line is None and isinstance(inspect.unwrap(value) if callable(value) else None, (FunctionType, type)):
            self._write_definition(name, inspect.unwrap(value), user)
        elif line is None:
            raise ConfigError(
                f"{self._who}: function '{user}' uses '{name}', {describe_type(value)}, which another process cannot "
                f"have; needs plain values and what can be imported; {WAY_OUT}"
            )
        else:
            self._lines.append(line)

    def _write_definition(self, name: str, value: Any, user: str) -> None:
        if value.__name__ == "<lambda>":
            raise ConfigError(f"{self._who}: function '{user}' uses '{name}', a lambda; write it with def")
        source = self._source_of(value)
        for used in _free_names(source):
            found = _lookup(used, value)
            if used != value.__name__ and found is not MISSING:
                self._define(used, found, value.__name__)
        self._lines += ["", source.rstrip()]
        if name != value.__name__:
            self._lines.append(f"{name} = {value.__name__}")

    def _source_of(self, value: Any) -> str:
        try:
            source = textwrap.dedent(_class_source(value) if isinstance(value, type) else inspect.getsource(value))
            (definition,) = ast.parse(source).body
            if getattr(definition, "name", "") != value.__name__:  # `python -c` has lines, too, from Python 3.13 on
                raise OSError(f"its lines define no '{value.__name__}'")
        except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError) as cause:
            if isinstance(value, FunctionType) and Path(value.__code__.co_filename).is_file():
                raise self._changed(value.__name__) from cause
            raise ConfigError(
                f"{self._who}: the source of '{value.__name__}' cannot be found ({why_not_importable(value)}, and it "
                f"was typed into an interpreter or made by exec); {WAY_OUT}"
            ) from cause
        return source


def _defines(source: str, code: CodeType) -> bool:
    """True if the source, compiled as `code` was, has a function of its name, code and constants."""
    flags = code.co_flags & __future__.annotations.compiler_flag | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        waiting = [compile(source, code.co_filename, "exec", flags, dont_inherit=True)]
    except (SyntaxError, ValueError):
        return False
    while waiting:
        found = waiting.pop()
        if found.co_name == code.co_name and _content(found) == _content(code):
            return True
        waiting += [const for const in found.co_consts if isinstance(const, CodeType)]
    return False


def _content(code: CodeType) -> tuple[object, ...]:
    """The parts of a code object that do not depend on its place in the source."""
    consts = [_content(const) if isinstance(const, CodeType) else (type(const), const) for const in code.co_consts]
    return code.co_code, code.co_names, tuple(consts)


def _class_source(found: type) -> str:
    """The source of a class, found through its methods: `inspect` would look for a notebook's class in a file.

    Methods that the standard library wrote for or lent to the class (a dataclass, named tuple or enum) lie in no lines
    that define it. OSError if the source cannot be found.
    """
    methods = [value for value in vars(found).values() if isinstance(value, FunctionType)]
    for code in (method.__code__ for method in methods if method.__module__ == found.__module__):
        sources = _class_sources(linecache.getlines(code.co_filename), found.__name__, code.co_firstlineno)
        if sources:
            return sources[0]
    if found.__module__ != "__main__" or hasattr(sys.modules["__main__"], "__file__"):
        return inspect.getsource(found)
    cells = [entry[2] for entry in linecache.cache.values() if len(entry) == 4 and entry[1] is None]
    sources = [source for lines in cells for source in _class_sources(lines, found.__name__)]
    if not sources:
        raise OSError(f"no cell defines a class '{found.__name__}'")
    return sources[-1]  # a cell that ran again is a further cell


def _class_sources(lines: list[str], name: str, inner: int = 0) -> list[str]:
    """The sources of classes of this name in the lines of a module; with `inner`, of those that hold that line."""
    found = []
    try:
        nodes = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.ClassDef)]
    except SyntaxError:  # a cell that was never run
        return []
    for node in nodes:
        first, last = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno
        if node.name == name and (not inner or node.lineno <= inner <= (last or 0)):
            found.append("".join(lines[first - 1 : last]))
    return found


WAY_OUT = "put it into a file and name it, such as rewards='rewards.py:score'"


def _lookup(name: str, value: Any) -> Any:
    """The object that the name has where the function or class is defined; MISSING for builtins and unknown names."""
    if isinstance(value, type):
        return vars(sys.modules.get(value.__module__, object)).get(name, MISSING)
    function: FunctionType = value
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        try:
            return cells[name].cell_contents
        except ValueError:  # not assigned yet
            return MISSING
    return function.__globals__.get(name, MISSING)


def _free_names(source: str) -> list[str]:
    """Names that the source of a definition refers to and does not bind; not those of its annotations."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
    found: dict[str, None] = {}
    tables = [symtable.symtable(ast.unparse(tree), "<reward function>", "exec")]
    for table in tables:
        tables += table.get_children()
        is_top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (not symbol.is_assigned() if is_top else symbol.is_global()):
                found[symbol.get_name()] = None
    return list(found)


def _as_line(name: str, value: Any) -> str | None:
    """The import or assignment that recreates the value under this name in another process; None if none can."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if _found_again(value.__name__) else None
    if isinstance(value, re.Pattern):
        return f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
    text = _plain_text(value)
    if text is not None:
        return f"{name} = {text}"
    if hasattr(value, "__qualname__") and "." not in value.__qualname__ and not why_not_importable(value):
        return f"from {value.__module__} import {value.__qualname__} as {name}"
    return None


def _plain_text(value: Any) -> str | None:
    """The value as Python text; None if the text would not give the same value again."""
    if not isinstance(value, (type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)):
        return None
    text = f"frozenset({set(value)!r})" if type(value) is frozenset and value else repr(value)
    if len(text) > MAX_TEXT:
        return None
    try:
        plain = text.removeprefix("frozenset(").removesuffix(")") if text.startswith("frozenset(") else text
        same: Callable[[Any], bool] = lambda read: type(read) is type(value) and read == value  # noqa: E731
        return text if same(ast.literal_eval(plain)) or text.startswith("frozenset({") else None
    except (ValueError, SyntaxError, RecursionError):
        return None
