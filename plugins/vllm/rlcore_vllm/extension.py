"""Registers the weight transfer with vLLM.

vLLM's workers import this before they load a model, since `WorkerExtension` is named to them as their base class.
"""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

from rlcore_vllm.engine import ACTOR_TRANSFER

WeightTransferEngineFactory.register_engine(ACTOR_TRANSFER, "rlcore_vllm.transfer", "ActorTransfer")


class WorkerExtension:
    """Adds nothing to a worker: the registration above is all that it is for."""
