"""The transformers backend: a training engine and the rollout embedded in it. Importing this imports no torch."""

from typing import TYPE_CHECKING, Any

from rlcore.backends.hf.worker import HfActor, HfReference, HfRollout

if TYPE_CHECKING:
    from rlcore.backends.hf.engine import TrainEngine
    from rlcore.backends.hf.export import export_model
    from rlcore.backends.hf.microbatch import LossTerms, MicroBatch, Predictions

__all__ = [
    "HfActor",
    "HfReference",
    "HfRollout",
    "LossTerms",
    "MicroBatch",
    "Predictions",
    "TrainEngine",
    "export_model",
]

_LAZY = {
    "TrainEngine": "engine",
    "export_model": "export",
    "LossTerms": "microbatch",
    "MicroBatch": "microbatch",
    "Predictions": "microbatch",
}


def __getattr__(name: str) -> Any:
    """What imports torch, at its first use."""
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
