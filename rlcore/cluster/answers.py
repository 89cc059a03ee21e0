"""Encodes and decodes values that a child process sends: plain data and frozen dataclasses, read without running code.

A child runs foreign code, which can write anything to the pipe of its process. So the pickle that the controller reads
names no class or function: other values are sent as (kind, data), and rebuilt here from a short list.
"""

import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import rlcore.errors
from rlcore.errors import ChildError, RlcoreError, shown
from rlcore.errors.redaction import beginning

PLAIN = frozenset({str, int, float, bool, type(None), bytes, bytearray, list, tuple, dict, set, frozenset})
BASES: tuple[Any, ...] = (str, int, float, bytes, list, tuple, dict, set, frozenset)
PACKAGE = "rlcore"
"""Frozen dataclasses and enums of this package pass; so do those of the package that the child serves."""


OK, RAISED, OURS = "ok", "raised", "ours"
"""Kinds of answers: a value; a foreign exception as (message, trace); an error of rlcore as (class, message)."""


def dumps(value: Any) -> bytes:
    """The value for `loads`; TypeError naming a class that cannot be sent."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def loads(payload: bytes, package: str = PACKAGE) -> Any:
    """The value of a possibly forged pickle, without running any code. UnpicklingError for anything that `dumps` does
    not produce.

    `package`: the top-level name of the package that the child serves.
    """
    return _Unpickler(io.BytesIO(payload), package).load()


def package_of(reference: str) -> str:
    """The top-level package of the served object; rlcore for a file, which has none."""
    module = reference.partition(":")[0]
    return module.partition(".")[0] if all(part.isidentifier() for part in module.split(".")) else PACKAGE


def error_of(kind: Any, value: Any, keeps_class: bool) -> RlcoreError:
    """The error in an answer of that kind; with rlcore's class only if `keeps_class`."""
    if kind == OURS:
        name, message = value
        return (error_class(name) if keeps_class else ChildError)(beginning(str(message)))
    if kind == RAISED:
        message, trace = value
        return ChildError(beginning(str(message)), beginning(str(trace)))
    return ChildError(f"it answered {shown(kind)}; needs one of: {OK}, {RAISED}, {OURS}")


def error_class(name: Any, otherwise: type[RlcoreError] = ChildError) -> type[RlcoreError]:
    """The error class of rlcore with that name."""
    found = getattr(rlcore.errors, str(name), None)
    return found if isinstance(found, type) and issubclass(found, RlcoreError) else otherwise


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        cls = type(value)
        if cls in PLAIN:
            return None
        types = sys.modules.get("rlcore.types")  # not imported here: numpy would slow the start of children
        if types is not None and cls is types.FrozenDict:
            return "frozen", dict(value)
        if isinstance(value, enum.Enum):
            return "enum", (cls.__module__, cls.__qualname__, value.name)
        if dataclasses.is_dataclass(cls):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return "dataclass", (cls.__module__, cls.__qualname__, fields)
        return _as_array(value) or _as_base(value)

    def reducer_override(self, value: Any) -> Any:
        cls = value if isinstance(value, type) else type(value)
        raise TypeError(f"{cls.__module__}.{cls.__qualname__} cannot cross from a child process; {NEEDED}")


NEEDED = "needs built-in values, numpy arrays of numbers, or frozen dataclasses of rlcore or of the package served"


def _as_array(value: Any) -> tuple[str, Any] | None:
    np = sys.modules.get("numpy")
    if np is None or not isinstance(value, (np.ndarray, np.generic)) or value.dtype.kind not in "biufc":
        return None
    return "array", (value.dtype.str, value.shape, value.tobytes(), isinstance(value, np.generic))


def _as_base(value: Any) -> tuple[str, Any] | None:
    """Instances of classes derived from built-in ones are sent as the built-in: unpickling them would need a call."""
    for base in BASES:
        if isinstance(value, base):
            return "plain", base(value)
    return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, package: str) -> None:
        super().__init__(file)
        self._packages = (PACKAGE, package)

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}; {NEEDED}")

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 2 and isinstance(pid[0], str) and pid[0] in _READERS):
            raise pickle.UnpicklingError(f"it is not an answer of a child; {NEEDED}")
        try:
            return _READERS[pid[0]](pid[1], self._packages)
        except (TypeError, ValueError, KeyError) as cause:
            raise pickle.UnpicklingError(
                f"it is not an answer of a child ({type(cause).__name__}); {NEEDED}"
            ) from cause


def _read_array(pid: Any, packages: tuple[str, ...]) -> Any:
    import numpy as np

    dtype, shape, data, is_scalar = pid
    found = np.dtype(str(dtype))
    if found.kind not in "biufc":
        raise TypeError(dtype)
    array = np.frombuffer(bytearray(data), found).reshape(shape)
    return array[()] if is_scalar else array


def _read_dataclass(pid: Any, packages: tuple[str, ...]) -> Any:
    module, name, fields = pid
    cls = _known(module, name, packages)
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise TypeError(name)
    found = cls(**fields)
    if callable(found):  # a pickle can call what it contains
        raise TypeError(name)
    return found


def _read_enum(pid: Any, packages: tuple[str, ...]) -> Any:
    module, name, member = pid
    cls = _known(module, name, packages)
    if not issubclass(cls, enum.Enum):
        raise TypeError(name)
    return cls[member]


def _known(module: Any, name: Any, packages: tuple[str, ...]) -> type[Any]:
    """The class, if it is defined in a module of these packages that was imported before."""
    if str(module).partition(".")[0] not in packages or module not in sys.modules:
        raise TypeError(module)
    cls = vars(sys.modules[module]).get(name)
    if not isinstance(cls, type) or (cls.__module__, cls.__qualname__) != (module, name):
        raise TypeError(name)
    return cls


def _read_frozen(pid: Any, packages: tuple[str, ...]) -> Mapping[Any, Any]:
    if type(pid) is not dict:
        raise TypeError(pid)
    from rlcore.types import FrozenDict

    return FrozenDict(pid)


def _read_plain(pid: Any, packages: tuple[str, ...]) -> Any:
    return pid


_READERS: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "array": _read_array,
    "dataclass": _read_dataclass,
    "enum": _read_enum,
    "frozen": _read_frozen,
    "plain": _read_plain,
}
