"""From 'module:attr' or 'file.py:attr' to the object. The standard library and `rlcore.errors` only: children use
it."""

import functools
import gc
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.errors import PluginError, boundary, nearest

FILE_PLUGIN = "rlcore_file_"
"""Prefix of the names that modules of plugins in plain files have in the process that loaded them."""
FILE_DIRECTORIES: set[str] = set()
"""Entries of `sys.path` that are there only for imports of a file that this process, or its parent, imported."""
STARTING_THRESHOLDS = (20_000, 20, 20)
"""Thresholds of Python's garbage collector while a process imports what it needs."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """In the block, Python's garbage collector runs a thirtieth as often as by default, and after it as before.

    Objects that torch and transformers make while they are imported stay; looking through them again and again takes an
    eighth of a worker's start. Thresholds that code in the block sets are kept.
    """
    before = gc.get_threshold()
    gc.set_threshold(*STARTING_THRESHOLDS)
    try:
        yield
    finally:
        if gc.get_threshold() == STARTING_THRESHOLDS:
            gc.set_threshold(*before)


def import_function(target: str) -> Callable[..., Any]:
    """The function that 'module:attr' or '/absolute/file.py:attr' names; files are imported as by `import_target`.

    PluginError when the target is malformed, the import fails, or the module lacks the function.
    """
    where, separator, name = target.rpartition(":")
    if not (separator and where and name):
        raise PluginError(f"target '{target}': needs the form 'module:function' or '/absolute/file.py:function'")
    if where.endswith(".py") and not Path(where).is_absolute():
        raise PluginError(f"file '{where}': needs an absolute path, workers may start in another directory")
    with boundary(f"target '{target}': importing '{where}' failed", PluginError):
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    found = getattr(module, name, None)
    if callable(found):
        result: Callable[..., Any] = found
        return result
    if found is not None:
        raise PluginError(f"target '{target}': '{name}' is {type(found).__name__}; needs a function")
    choices = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    raise PluginError(f"target '{target}': '{where}' has no '{name}'; {nearest(name, choices)}")


def importable_target(target: str) -> str:
    """The target as other processes can import it: by its file, if its module is a plugin in a plain file."""
    where, _, attribute = target.rpartition(":")
    module = sys.modules.get(where) if where.startswith(FILE_PLUGIN) else None
    return target if module is None else f"{module.__file__}:{attribute}"


@functools.cache
def names_for_checkers(file: str) -> dict[str, str]:
    """The module of each name that an `__init__.py` imports under `if TYPE_CHECKING:` as `from module import X as X`.

    So a package that imports its public names when they are first used states each of them once.
    """
    source = Path(file).read_text("utf-8")
    return {name: module for module, name in re.findall(r"^ +from (\S+) import (\w+) as \2$", source, re.MULTILINE)}


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of the package in `file`, which imports its public names when they are first used.

    The names are those of `names_for_checkers`; `__all__` lists them. AttributeError for any other.
    """

    def found(name: str) -> Any:
        modules = names_for_checkers(file)
        if name == "__all__":
            return sorted(modules)
        if name.startswith("__") or name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(modules[name]), name)

    return found, lambda: sorted([*vars(sys.modules[package]), *names_for_checkers(file)])


def import_target(target: str) -> Any:
    """The object that 'module:attr' or '/path/file.py:attr' names; attr may have dots.

    A file is imported once per process. What it imports is also found in its directory, if nowhere before in `sys.path`
    but in directories of other files. PluginError when the file, module or attribute does not exist; errors of the
    import itself pass unchanged.
    """
    where, separator, attribute = target.rpartition(":")
    if not separator or not where or not attribute:
        raise PluginError(f"target '{target}': needs the form module:name or file.py:name")
    found: Any = _load_file(where) if where.endswith(".py") else _load_module(where, target)
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise PluginError(f"target '{target}': there is no '{name}' in {where}; {nearest(name, public)}")
        found = getattr(found, name)
    return found


def _load_module(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name and (name == cause.name or name.startswith(f"{cause.name}.")):
            raise PluginError(f"target '{target}': there is no module '{cause.name}'") from cause
        raise


def _load_file(path: str) -> ModuleType:
    full = Path(path).resolve()
    name = f"_file_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    if not full.is_file() or spec is None or spec.loader is None:
        raise PluginError(f"target '{path}': the file does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _search_last_but_first_of_files(str(full.parent))
    loaded = False
    try:
        spec.loader.exec_module(module)
        loaded = True
    except ImportError as cause:
        if str(cause) == "attempted relative import with no known parent package":
            raise PluginError(no_relative_imports(full)) from cause
        raise
    finally:
        if not loaded:
            del sys.modules[name]
    return module


def _search_last_but_first_of_files(directory: str) -> None:
    """Search modules in the directory after all of `sys.path`, and before directories of files imported earlier: two
    files may each have a `helper.py` next to them."""
    if directory in sys.path and directory not in FILE_DIRECTORIES:
        return
    FILE_DIRECTORIES.add(directory)
    earlier = [entry for entry in sys.path if entry in FILE_DIRECTORIES and entry != directory]
    sys.path[:] = [*(entry for entry in sys.path if entry not in FILE_DIRECTORIES), directory, *earlier]


def no_relative_imports(path: Path) -> str:
    """The error about a file that is named by its path and has relative imports: it names the module form."""
    package = path.parent
    while (package.parent / "__init__.py").is_file():
        package = package.parent
    module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
    return (
        f"{path}: imports relatively (from . import ...), which a file that is named by its path cannot; name it as "
        f"{module}:name, with {package.parent} on PYTHONPATH or the package installed"
    )
