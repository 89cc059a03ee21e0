"""Gathers what is written of a sharded model, one unit after the other, in host memory.

So no device holds more of the weights than its shards and one unit.
"""

import torch
from torch import Tensor

from rlcore.engines.hf.train.model import Model
from rlcore.engines.hf.train.sharded_tensors import HOST, gathered
from rlcore.engines.hf.train.shards import Shards
from rlcore.engines.hf.train.state import merged_weights, tensors_of
from rlcore.engines.hf.train.state_files import private_copies


@torch.no_grad()
def gathered_weights(model: Model, shards: Shards | None, *, here: bool) -> dict[str, Tensor] | None:
    """`merged_weights` of the whole model, private copies in host memory; nothing on ranks that are not `here`.

    All ranks have to come here. Tied weights share their copy. None of a model without shards, which is whole.
    """
    if shards is None:
        return None
    found: dict[str, Tensor] = {}
    for names in shards.unit_by_unit():
        if here:
            found |= private_copies(merged_weights(model, names))
    if not here:
        return {}
    own_names = [name.replace(".base_layer.", ".") for name in tensors_of(model.transformer) if ".lora_" not in name]
    buffers = tensors_of(model.transformer)
    return {name: found[name] if name in found else buffers[name].to(HOST, copy=True) for name in own_names}


@torch.no_grad()
def gathered_adapter(model: Model, shards: Shards | None, *, here: bool) -> dict[str, Tensor] | None:
    """The tensors of a LoRA model's adapter by their names in the peft model, gathered as `gathered_weights` does."""
    if shards is None:
        return None
    found = {name: gathered(tensor) for name, tensor in tensors_of(model.adapter).items() if ".lora_" in name}
    return found if here else {}
