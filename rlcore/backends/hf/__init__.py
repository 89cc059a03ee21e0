"""The transformers backend: a training engine and the rollout embedded in it. Importing this imports no torch."""

from typing import TYPE_CHECKING, Any

from rlcore.backends.hf.worker import HfActor, HfReference, HfRollout, seed_process, use_threads

if TYPE_CHECKING:
    from rlcore.backends.hf.engine import TrainEngine
    from rlcore.backends.hf.export import export_model
    from rlcore.backends.hf.microbatch import LossTerms, MicroBatch, Predictions
    from rlcore.backends.hf.model import VALUE_HEAD_FILE, PolicyModel, ValueModel, load_value_head
    from rlcore.backends.hf.ranks import ranks_of

__all__ = [
    "VALUE_HEAD_FILE",
    "HfActor",
    "HfReference",
    "HfRollout",
    "LossTerms",
    "MicroBatch",
    "PolicyModel",
    "Predictions",
    "TrainEngine",
    "ValueModel",
    "export_model",
    "load_value_head",
    "ranks_of",
    "seed_process",
    "use_threads",
]

_LAZY = {
    "TrainEngine": "engine",
    "export_model": "export",
    "LossTerms": "microbatch",
    "MicroBatch": "microbatch",
    "Predictions": "microbatch",
    "VALUE_HEAD_FILE": "model",
    "PolicyModel": "model",
    "ValueModel": "model",
    "load_value_head": "model",
    "ranks_of": "ranks",
}


def __getattr__(name: str) -> Any:
    """What imports torch, at its first use."""
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
