"""Refuses changes of torch's global state by algorithms, because later steps compute with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import PluginError


@dataclass(frozen=True)
class _Setting:
    """One setting: functions that read and restore it, and advice for code that changed it."""

    read: Callable[[], Any]
    restore: Callable[[Any], object]
    instead: str
    per_thread: bool = False


_FLAG = "leave it to the run"
_SETTINGS = {
    "grad mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled, "use `with torch.no_grad():`", True),
    "the default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype, "give each tensor its dtype"),
    "the default device": _Setting(
        torch.get_default_device, lambda device: torch.set_default_device(None), "give each tensor its device", True
    ),
    "the random state": _Setting(torch.get_rng_state, torch.set_rng_state, "draw from a new torch.Generator"),
    "the number of threads": _Setting(torch.get_num_threads, torch.set_num_threads, _FLAG),
    "deterministic algorithms": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, _FLAG),
    "float32 matmul precision": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, _FLAG),
    "anomaly detection": _Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, _FLAG),
}


@contextmanager
def unchanged_torch(who: str, this_thread_only: bool = False) -> Iterator[None]:
    """Raises a PluginError that begins with `who` if the block changes torch's global state; always restores it.

    `this_thread_only`: compares only the state of this thread. Workers in other threads of the process share the rest:
    a concurrent update draws random numbers. Takes about 20 microseconds.
    """
    settings = {name: setting for name, setting in _SETTINGS.items() if setting.per_thread or not this_thread_only}
    before = {name: setting.read() for name, setting in settings.items()}
    try:
        yield
    finally:
        changed = [name for name, setting in settings.items() if not _same(setting.read(), before[name])]
        for name in changed:
            _SETTINGS[name].restore(before[name])
    if changed:
        name = changed[0]
        needed = f"needs {name} left as it is: {_SETTINGS[name].instead}"
        raise PluginError(f"{who} changed torch's global state: {' and '.join(changed)}; {needed}")


def _same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, Tensor) else bool(left == right)
