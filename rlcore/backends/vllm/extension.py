"""What vLLM's workers can do beside what they can."""

from typing import Any


class WorkerExtension:
    """Becomes a base class of vLLM's worker, whose `model_runner` it uses."""

    model_runner: Any

    def refresh_tied_layers(self) -> int:
        """Make layers that share a weight compute with it as it is now; how many there are.

        On a CPU vLLM packs weights for its matrix product. When weights are reloaded, an output layer that is tied to
        the embedding gets no tensor of its own, and would go on with what was packed before.
        """
        by_place: dict[int, list[Any]] = {}
        for module in self.model_runner.get_model().modules():
            weight = getattr(module, "weight", None)
            if weight is not None and hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
                by_place.setdefault(weight.data_ptr(), []).append(module)
        tied = [module for modules in by_place.values() if len(modules) > 1 for module in modules]
        for module in tied:
            module.quant_method.process_weights_after_loading(module)
        return len(tied)
