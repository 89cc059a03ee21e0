"""Registers the weight transfer with vLLM.

vLLM's workers import this module before they load a model, because it provides their base class.
"""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

from rlcore_vllm.engine import ACTOR_TRANSFER

WeightTransferEngineFactory.register_engine(ACTOR_TRANSFER, "rlcore_vllm.transfer", "ActorTransfer")


class WorkerExtension:
    """Adds nothing to a worker; it exists for the registration above."""
