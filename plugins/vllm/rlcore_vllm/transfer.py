"""The actor's weights, on their way into vLLM's workers: an engine of vLLM's weight-transfer interface.

vLLM calls it between `start_weight_update` and `finish_weight_update`, on a CPU as on GPUs. Weights come from a
directory with safetensors files, which every worker maps into its memory, or from the actor's process, over a
separate link or by a broadcast; under tensor parallelism a worker keeps its part of each.

vLLM's own NCCL engine is not used: it has no deadline and cannot leave a broadcast, so a replica that dies in one would
leave all others in a call that never returns; it takes no other transport; and it does not find out that weights lack.
"""

import logging
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rlcore import WeightsHandle, WorkerError
from rlcore.contracts.weight_groups import GroupReceiver
from rlcore.contracts.weights import weights_of

SHOWN = 3
"""Names of weights in an error."""

# With every version it warns of layers that share their weights, such as a tied head. What lacks is an error here.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class ActorInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class ActorUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a `WeightsHandle`: vLLM sends them to its workers as a mapping."""

    version: int
    kind: Any
    path: str
    members: int = 0

    @property
    def handle(self) -> WeightsHandle:
        """Names all weights of a version."""
        return WeightsHandle(self.version, self.kind, self.path, self.members)


class ActorTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads the actor's weights into the worker's model, in place."""

    init_info_cls = ActorInit
    update_info_cls = ActorUpdate

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._receiver = GroupReceiver(self.device, self.parallel_config.world_size)

    def init_transfer_engine(self, init_info: ActorInit) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Make the model ready for weights in the form of a checkpoint."""
        served = {name for name, _ in self.model.named_parameters()}  # without weights that are tied to others
        initialize_layerwise_reload(self.model)
        loaded = {name for name, _ in self.model.named_parameters()}  # without scales that vLLM computes itself
        self._awaited = served & loaded

    def receive_weights(self, update_info: ActorUpdate) -> None:
        """Load all weights; WorkerError when one is lacking, for the old one would stay in its place."""
        handle = update_info.handle
        weights = self._receiver.weights(handle) if handle.kind == "nccl" else weights_of(handle)
        with closing(weights):
            missing = self._awaited - self.model.load_weights(weights)
        if missing:
            shown = ", ".join(sorted(missing)[:SHOWN])
            raise WorkerError(f"'{handle.place}' has no weights for {len(missing)} parameters of vLLM's: {shown}")

    def finish_weight_update(self) -> None:
        """Let every layer compute with what it was given."""
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_layers(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces vLLM's own, which wants an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Leave the group of those that take weights together."""
        self._receiver.close()


def refresh_tied_layers(model: torch.nn.Module) -> None:
    """Make layers that share a weight compute with it as it is now.

    On a CPU vLLM packs weights for its matrix product. When weights are reloaded, an output layer that is tied to the
    embedding gets no separate tensor, and would go on with what was packed before.
    """
    by_place: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            by_place.setdefault(weight.data_ptr(), []).append(module)
    for modules in by_place.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)
