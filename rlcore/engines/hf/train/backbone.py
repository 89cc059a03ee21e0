"""The part that all our models share: a transformers model, and the hidden states that loss tokens are predicted from.

Letters: B rows, T positions, N chosen (row, position) pairs, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlcore.engines.hf.train.compiled import CompiledLayers
from rlcore.engines.hf.train.gradients import Masters, adding_gradients
from rlcore.engines.hf.train.prefixes import cache_hidden
from rlcore.engines.hf.train.tree import attending_to_trees, tree_hidden
from rlcore.types import SharedPrefix

if TYPE_CHECKING:
    from rlcore.engines.hf.train.microbatch import MicroBatch


class Model(nn.Module):
    """A transformers model with our head, for training, scoring and sampling.

    It is always in evaluation mode, so that log-probs mean the same wherever they are computed; `training_mode` turns
    on only what training needs.
    """

    owns_transformer: bool = True
    """True if the transformer's weights belong to this model; False if it shares another's trunk."""

    def __init__(self, transformer: Any, adapter: Any = None) -> None:
        super().__init__()
        self.transformer = transformer
        self.compiled: CompiledLayers | None = None
        self._masters: Masters | None = None
        # In a tuple, so that torch does not register it: its parameters are those of `transformer`.
        self._adapter = (adapter,)
        self.eval()

    @property
    def adapter(self) -> Any:
        """The peft model around `transformer`, or None."""
        return self._adapter[0]

    @property
    def context_length(self) -> int | None:
        """Tokens that the window holds; None if the model's configuration does not say."""
        window = getattr(self.transformer.config.get_text_config(), "max_position_embeddings", None)
        return int(window) if window else None

    def facts(self) -> dict[str, Any]:
        """num_parameters, num_trainable, context_length and vocabulary (or None)."""
        return {
            "num_parameters": sum(parameter.numel() for parameter in self.parameters()),
            "num_trainable": sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad),
            "context_length": self.context_length,
            "vocabulary": getattr(self.transformer.config.get_text_config(), "vocab_size", None),
        }

    def hidden_at(self, micro: MicroBatch) -> Tensor:
        """(N, H) hidden states from which the loss tokens are predicted: for a token at t of a row, that at t - 1.

        In a context group N are those that this rank predicts.

        Rows are padded on the right, and attention is causal, so no token sees padding and no mask is needed.
        """
        if micro.shared_prefix is SharedPrefix.TREE:
            return tree_hidden(self.transformer, micro.packed)
        if micro.shared_prefix is SharedPrefix.CACHE:
            return cache_hidden(self.transformer, micro.padded)
        hidden_BTH = self.transformer.base_model(input_ids=micro.token_ids_BT, use_cache=False).last_hidden_state
        return torch.index_select(hidden_BTH.flatten(0, 1), 0, micro.flat_N - 1)

    @contextmanager
    def attending(self, shared_prefix: SharedPrefix) -> Iterator[None]:
        """Context with the attention that `shared_prefix` needs, and compiled layers if the model has them; backward
        passes belong inside, too."""
        attention = attending_to_trees(self.transformer) if shared_prefix is SharedPrefix.TREE else nullcontext()
        with nullcontext() if self.compiled is None else self.compiled.used(), attention:
            yield

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Context with gradient checkpointing and the adapter's dropout enabled; the model's dropout stays off.

        Noisy log-probs would make importance ratios noise, so `model.train()` is never called.
        """
        from transformers.modeling_layers import GradientCheckpointingLayer

        adapters = [module for name, module in self.named_modules() if "lora_dropout" in name]
        layers: list[Any] = [
            module
            for module in self.modules()
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        ]
        checkpoints = [layer._gradient_checkpointing_func for layer in layers]
        for layer, checkpoint in zip(layers, checkpoints, strict=True):
            layer._gradient_checkpointing_func = partial(_checkpoint_in_evaluation, layer, checkpoint)
        for module in (*adapters, *layers):
            module.training = True
        try:
            yield
        finally:
            for module in (*adapters, *layers):
                module.training = False
            for layer, checkpoint in zip(layers, checkpoints, strict=True):
                layer._gradient_checkpointing_func = checkpoint

    @contextmanager
    def adding_gradients(self, masters: Masters) -> Iterator[None]:
        """Context in which weight gradients are accumulated in place; backward passes belong inside, too.

        `masters`: those of half-precision weights, which get their gradients. Compiled layers accumulate as torch does.
        """
        if self.compiled is not None:
            yield
            return
        with adding_gradients(self, masters):
            self._masters = masters
            try:
                yield
            finally:
                self._masters = None

    def without_adapter(self) -> Any:
        """Context with the adapter disabled: the model that training started from."""
        return self.adapter.disable_adapter() if self.adapter is not None else nullcontext()


def _checkpoint_in_evaluation(
    layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *inputs: Any
) -> Any:
    """Compute a layer in a checkpoint as if it were in evaluation mode: in training mode, which transformers requires
    for checkpoints, layers such as OPT's call dropout themselves."""

    def evaluated(*inputs: Any) -> Any:
        layer.training = False
        try:
            return forward(*inputs)
        finally:
            layer.training = True

    return checkpoint(evaluated, *inputs)
