"""The transformers backend. Its public names train a plugin's model or loss. Importing this does not import torch.

In a worker: `prepare_process(context)`, then a `TrainEngine` with a `Loss` and `ranks=ranks_of(context)`. A
worker inside the actor reads the actor's model through `actor_engine(context)`. A method that computes does so in
`with device_turn(context)`. A `ClassifierEngine` scores rows with a sequence classifier. An engine that offloads takes
the host memory that the plan counts after `pin_exactly()`, which `prepare_process` calls, too.
"""

from typing import TYPE_CHECKING

from rlcore.imports import lazy_names

if TYPE_CHECKING:  # the one list of public names, read by type checkers and by `lazy_names`
    from rlcore.engines.freed_memory import device_turn as device_turn
    from rlcore.engines.hf.train.classifier import ClassifierEngine as ClassifierEngine
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
    from rlcore.engines.pinned_memory import pin_exactly as pin_exactly


__getattr__, __dir__ = lazy_names(__name__, __file__)
