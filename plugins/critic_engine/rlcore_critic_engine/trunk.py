"""A value model on the actor's weights: a head, and optionally low-rank adapters, on a borrowed trunk.

The trunk is the current policy: with LoRA on the actor its frozen base, otherwise the weights that the actor trains. No
gradient of the critic ever reaches it. Letters: N tokens, H hidden size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.config import LoraConfig
from rlcore.engines.hf import MicroBatch, PolicyModel, ValueModel
from rlcore.errors import ConfigError

ALL_LINEAR = ("all-linear",)


class SideAdapter(nn.Module):
    """Adds to the output of one linear layer: alpha / rank * B A x; B starts at zero (arXiv 2106.09685)."""

    def __init__(self, layer: nn.Linear, lora: LoraConfig) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.a = nn.Linear(layer.in_features, lora.rank, bias=False, **place)
        self.b = nn.Linear(lora.rank, layer.out_features, bias=False, **place)
        nn.init.zeros_(self.b.weight)
        # Named so that `Model.training_mode` turns it on.
        self.lora_dropout = nn.Dropout(lora.dropout)
        self._scale = lora.alpha / lora.rank

    def forward(self, inputs: Tensor) -> Tensor:
        """The addition for the layer's inputs."""
        added: Tensor = self.b(self.a(self.lora_dropout(inputs)))
        return self._scale * added

    def added(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The forward hook: the layer's output plus the adapter's."""
        added: Tensor = self(args[0])
        return output + added


class TrunkValueModel(ValueModel):
    """A value head, and with `lora.enabled` adapters, on a policy's transformer, which it does not change.

    Without adapters the hidden states have no graph, so training costs a forward pass of the trunk and keeps no
    activations. With them, the backward pass runs through the trunk to the adapters, without gradients of its weights.
    """

    owns_transformer = False

    def __init__(self, policy: PolicyModel, lora: LoraConfig, seed: int) -> None:
        super().__init__(policy.transformer)
        # Kept out of torch's registry: parameters(), and so optimizer and checkpoint, cover the critic only.
        del self._modules["transformer"]
        self.__dict__["transformer"] = policy.transformer
        self._policy = (policy,)
        self._active, self._alpha = False, lora.alpha
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._layers = linear_layers(policy.transformer, lora.target_modules) if lora.enabled else {}
            self.adapters = nn.ModuleDict({name: SideAdapter(layer, lora) for name, layer in self._layers.items()})
        self.eval()

    def forward(self, micro: MicroBatch, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
        """(N,) value before each loss token, and (N,) zeros in place of the entropy."""
        with self.on_trunk():
            return super().forward(micro, temperature, with_entropy)

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """See `Model.training_mode`. The trunk stays in the critic's state until the backward pass has ended."""
        with self._policy[0].training_mode(), super().training_mode(), self.on_trunk():
            yield

    @contextmanager
    def on_trunk(self) -> Iterator[None]:
        """Inside, the trunk is frozen, with the critic's adapters instead of the actor's."""
        if self._active:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(self._policy[0].without_adapter())
            trained = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
            stack.callback(_require_grad, trained, True)
            _require_grad(trained, False)
            for name, layer in self._layers.items():
                stack.callback(layer.register_forward_hook(self._adapter_of(name).added).remove)
            stack.callback(setattr, self, "_active", False)
            self._active = True
            yield

    def head_settings(self) -> dict[str, str]:
        """Alpha, which multiplies what the adapters have learned."""
        return {"plugins.critic_engine.lora.alpha": f"{self._alpha:g}"} if self.adapters else {}

    def head_tensors(self) -> dict[str, Tensor]:
        """The head's tensors and the adapters'."""
        adapters = {f"adapters.{name}": tensor for name, tensor in self.adapters.state_dict().items()}
        return super().head_tensors() | adapters

    def _adapter_of(self, name: str) -> SideAdapter:
        adapter = self.adapters[name]
        if not isinstance(adapter, SideAdapter):
            raise TypeError(f"adapters['{name}'] is a {type(adapter).__name__}")
        return adapter


def linear_layers(transformer: Any, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers of the backbone to adapt, by name with '/' for '.'; ConfigError if there are none.

    `targets` are suffixes of names, or all-linear. A layer with an adapter of the actor keeps its original name.
    """
    found = {}
    for name, module in transformer.base_model.named_modules():
        own = name.removesuffix(".base_layer")
        chosen = targets == ALL_LINEAR or any(f".{own}".endswith(f".{target}") for target in targets)
        if isinstance(module, nn.Linear) and chosen and ".lora_" not in name:
            found[own.replace(".", "/")] = module
    if not found:
        raise ConfigError(
            f"plugins.critic_engine.lora.target_modules={list(targets)}: {type(transformer).__name__} has no such "
            "linear layer; choose ends of names such as q_proj, or all-linear"
        )
    return found


def _require_grad(parameters: list[nn.Parameter], wanted: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(wanted)
