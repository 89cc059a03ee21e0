"""The transformers backend. Its public names train a model or a loss of a plugin. Importing this imports no torch.

In a worker: `prepare_process(context)`, then a `TrainEngine` with a `Loss`, then `engine.join(ranks_of(context))`. A
worker inside the actor reads the actor's model through `actor_engine(context)`.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlcore.imports import names_for_checkers

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and `_homes` does
    from rlcore.engines.hf.train.engine import TrainEngine as TrainEngine
    from rlcore.engines.hf.train.microbatch import Loss as Loss
    from rlcore.engines.hf.train.microbatch import LossTerms as LossTerms
    from rlcore.engines.hf.train.microbatch import MicroBatch as MicroBatch
    from rlcore.engines.hf.train.microbatch import Predictions as Predictions
    from rlcore.engines.hf.train.model import VALUE_HEAD_FILE as VALUE_HEAD_FILE
    from rlcore.engines.hf.train.model import PolicyModel as PolicyModel
    from rlcore.engines.hf.train.model import ValueModel as ValueModel
    from rlcore.engines.hf.train.model import load_value_head as load_value_head
    from rlcore.engines.hf.train.ranks import ranks_of as ranks_of
    from rlcore.engines.hf.worker import actor_engine as actor_engine
    from rlcore.engines.hf.worker import prepare_process as prepare_process


@cache
def _homes() -> dict[str, str]:
    return names_for_checkers(__file__)


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, because its module imports torch."""
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes()[name]), name)
