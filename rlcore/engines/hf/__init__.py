"""The transformers backend: a training engine and the rollout embedded in it. Importing this imports no torch."""

from typing import TYPE_CHECKING, Any

from rlcore.engines.hf.worker import HfActor, HfReference, HfRollout, seed_process, use_threads

if TYPE_CHECKING:
    from rlcore.engines.hf.train.engine import TrainEngine
    from rlcore.engines.hf.train.export import export_model
    from rlcore.engines.hf.train.microbatch import LossTerms, MicroBatch, Predictions
    from rlcore.engines.hf.train.model import VALUE_HEAD_FILE, PolicyModel, ValueModel, load_value_head
    from rlcore.engines.hf.train.ranks import ranks_of

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
    "TrainEngine": "train.engine",
    "export_model": "train.export",
    "LossTerms": "train.microbatch",
    "MicroBatch": "train.microbatch",
    "Predictions": "train.microbatch",
    "VALUE_HEAD_FILE": "train.model",
    "PolicyModel": "train.model",
    "ValueModel": "train.model",
    "load_value_head": "train.model",
    "ranks_of": "train.ranks",
}


def __getattr__(name: str) -> Any:
    """What imports torch, at its first use."""
    from importlib import import_module

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
