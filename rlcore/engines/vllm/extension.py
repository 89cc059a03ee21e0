"""What vLLM's workers import before they load a model, since `WorkerExtension` is named to them as their base class."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

from rlcore.engines.vllm.engine import ACTOR_TRANSFER

WeightTransferEngineFactory.register_engine(ACTOR_TRANSFER, "rlcore.engines.vllm.transfer", "ActorTransfer")


class WorkerExtension:
    """Adds nothing to a worker: the registration above is all that it is for."""
