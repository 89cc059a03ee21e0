"""Registers the weight transfer with vLLM, and ends vLLM's workers with the process that started them.

vLLM's workers import this module before they load a model, because it provides their base class. vLLM ends a
worker whose parent has died only between two calls. A worker that waits for one of another node would keep its device's
memory, so the kernel ends it.
"""

import multiprocessing

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

from rlcore_vllm.engine import ACTOR_TRANSFER
from rlcore_vllm.orphans import end_with_parent

if multiprocessing.parent_process() is not None:  # not where an engine computes in the process that has it
    end_with_parent()
WeightTransferEngineFactory.register_engine(ACTOR_TRANSFER, "rlcore_vllm.transfer", "ActorTransfer")


class WorkerExtension:
    """Adds nothing to a worker; it exists for the registration above."""
