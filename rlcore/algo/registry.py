"""From the reference of a function to the function, in `launch` or in the worker that calls it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.errors import PluginError, boundary, nearest


def resolve(reference: str) -> Callable[..., Any]:
    """The function that 'module:attr' or '/absolute/file.py:attr' names; a file is imported once a process.

    PluginError when the reference is malformed, the import fails, or the module has no such function.
    """
    where, separator, name = reference.rpartition(":")
    if not (separator and where and name):
        raise PluginError(f"reference '{reference}': needs the form 'module:function' or '/absolute/file.py:function'")
    with boundary(f"reference '{reference}': importing '{where}' failed", PluginError):
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    found = getattr(module, name, None)
    if callable(found):
        result: Callable[..., Any] = found
        return result
    if found is not None:
        raise PluginError(f"reference '{reference}': '{name}' is {type(found).__name__}, a function is needed")
    choices = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    raise PluginError(f"reference '{reference}': '{where}' has no '{name}'; {nearest(name, choices)}")


def _from_file(path: Path) -> ModuleType:
    """The module of a bare file, under a name that two files cannot share and no package has."""
    if not path.is_absolute():
        raise PluginError(f"file '{path}': needs an absolute path, workers may start in another directory")
    name = f"rlcore file {path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"file '{path}': cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution: dataclasses look their own module up
    loaded = False
    try:
        spec.loader.exec_module(module)
        loaded = True
    finally:
        if not loaded:
            del sys.modules[name]
    return module
