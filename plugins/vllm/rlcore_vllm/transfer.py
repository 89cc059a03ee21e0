"""Transfers the actor's weights into vLLM's workers: an engine of vLLM's weight-transfer interface.

vLLM calls it between `start_weight_update` and `finish_weight_update`, on CPUs and GPUs. Weights come from a directory
of safetensors files, which every worker memory-maps, or from the actor's process, over a separate link or by a
broadcast. Under tensor parallelism a worker keeps its shard of each.

vLLM's own NCCL engine is not used. It has no deadline and cannot leave a broadcast, so one replica's death would block
all others for ever; it supports no other transport; and it does not detect missing weights.
"""

import logging
from collections.abc import Generator
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
from rlcore.contracts.weight_ipc import weights_over_ipc
from rlcore.contracts.weights import weights_of

SHOWN = 3
"""Names of weights listed in an error."""

# On every version vLLM warns about tied layers. Missing weights are an error here instead.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class ActorInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: there is nothing to negotiate."""


@dataclass
class ActorUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The fields of a `WeightsHandle`: vLLM sends them to its workers as a mapping."""

    version: int
    kind: Any
    path: str
    members: int = 0

    @property
    def handle(self) -> WeightsHandle:
        """The handle for all weights of a version."""
        return WeightsHandle(self.version, self.kind, self.path, self.members)


class ActorTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads the actor's weights into the worker's model, in place."""

    init_info_cls = ActorInit
    update_info_cls = ActorUpdate

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._receiver = GroupReceiver(self.device, self.parallel_config.world_size)

    def init_transfer_engine(self, init_info: ActorInit) -> None:
        """Does nothing: there is nothing to open."""

    def start_weight_update(self) -> None:
        """Prepare the model for weights in checkpoint format."""
        served = {name for name, _ in self.model.named_parameters()}  # without tied weights
        initialize_layerwise_reload(self.model)
        loaded = {name for name, _ in self.model.named_parameters()}  # without scales that vLLM computes
        self._awaited = served & loaded

    def receive_weights(self, update_info: ActorUpdate) -> None:
        """Load all weights; WorkerError if one is missing, because the old one would stay in use."""
        handle = update_info.handle
        with closing(self._weights(handle)) as weights:
            missing = self._awaited - self.model.load_weights(weights)
        if missing:
            shown = ", ".join(sorted(missing)[:SHOWN])
            raise WorkerError(f"'{handle.place}' has no weights for {len(missing)} parameters of vLLM's: {shown}")

    def _weights(self, handle: WeightsHandle) -> Generator[tuple[str, torch.Tensor]]:
        if handle.kind == "nccl":
            return self._receiver.weights(handle)
        if handle.kind == "ipc":
            return weights_over_ipc(handle, self.device, self.parallel_config.world_size)
        # A layer may keep borrowed views until finish_weight_update(); the sender writes the next version after that.
        return weights_of(handle, borrowed=True)

    def finish_weight_update(self) -> None:
        """Finish the update of every layer."""
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_layers(self.model)
        if self.device.type == "cpu":
            pack_experts(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces vLLM's method, which requires an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Leave the group of workers that receive weights together."""
        self._receiver.close()


def refresh_tied_layers(model: torch.nn.Module) -> None:
    """Make tied layers use the current weight.

    On a CPU vLLM packs weights for its matrix product. When weights are reloaded, an output layer that is tied to the
    embedding gets no separate tensor, and would keep using the old packed weights.
    """
    by_place: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            by_place.setdefault(weight.data_ptr(), []).append(module)
    for modules in by_place.values():
        for module in modules if len(modules) > 1 else ():
            module.quant_method.process_weights_after_loading(module)


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of experts for the CPU's matrix products, which vLLM does when it loads a model, and not when
    weights are reloaded."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
