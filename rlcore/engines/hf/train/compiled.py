"""Runs a model's layers through torch.compile, which fuses the operations between two matrix products."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from rlcore.errors import ConfigError


class CompiledLayers:
    """The decoder layers of a transformers model, compiled when they are first computed.

    All layers of a kind share one compiled function, for any number of rows and tokens. Attention over a token tree is
    not compiled, so each layer has a compiled part before it and one after it. Hooks, such as FSDP's, and gradient
    checkpointing stay around the compiled forward: torch compiles nothing of a checkpoint that it cannot compile whole.
    """

    def __init__(self, transformer: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
        """`backend`: torch.compile's."""
        self._transformer, self._backend = transformer, backend

    @cached_property
    def _forwards(self) -> dict[nn.Module, Callable[..., Any]]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [layer for layer in self._transformer.modules() if isinstance(layer, GradientCheckpointingLayer)]
        return {layer: self._compiled(layer) for layer in layers}

    def _compiled(self, layer: Any) -> Callable[..., Any]:
        """The compiled forward of a layer, in a checkpoint where the layer's own forward would be in one."""
        plain = _without_checkpoint(type(layer).forward)
        compiled = torch.compile(MethodType(plain, layer), dynamic=True, backend=self._backend)
        if plain is type(layer).forward:
            return compiled

        def forward(*inputs: Any, **named: Any) -> Any:
            if layer.gradient_checkpointing and layer.training:
                return layer._gradient_checkpointing_func(partial(compiled, **named), *inputs)
            return compiled(*inputs, **named)

        return forward

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which the layers are compiled; backward passes belong inside, too.

        ConfigError if torch cannot compile them.
        """
        from torch._dynamo.exc import TorchDynamoException

        for layer, forward in self._forwards.items():
            layer.forward = forward
        try:
            with warnings.catch_warnings():  # torch looks at `grad` of each tensor when it compiles
                warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
                yield
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
            raise ConfigError(
                f"actor.compile=true: torch {torch.__version__} does not compile the layers of "
                f"{type(self._transformer).__name__}: {reason}; set actor.compile=false"
            ) from error
        finally:
            for layer in self._forwards:
                del layer.forward


def _without_checkpoint(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer's class without transformers' wrappers, which checkpoint it.

    Later releases of transformers 5 wrap `forward`, and once more for each subclass, such as FSDP's. In earlier ones
    the call of a layer checkpoints it.
    """
    from transformers import modeling_layers

    while getattr(forward, "__globals__", None) is vars(modeling_layers) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward
