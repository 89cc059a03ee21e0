"""FSDP2: each rank keeps a part of every weight, of its gradient and of the optimizer's state.

An update gathers the weights of one layer at a time, and gives every rank its part of the summed gradient. All ranks
take part in each of these exchanges, so all have to make the same number of passes: `idle`.

Everything else (scoring, sampling, writing weights) needs no gradients and runs on whole weights, which are gathered
once: ranks then do what they have to do at their own pace. What FSDP does is in torch.distributed.fsdp (arXiv
2304.11277); its gradients are divided by nothing, since the controller has weighed every row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlcore.data.batch import select
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.model import Model
from rlcore.engines.hf.train.prefix_trial import two_groups
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.errors import ConfigError
from rlcore.types import Batch

NEEDED = "reset_iter_state"
"""Of FSDPModule: what older releases of torch lack."""


class Shards:
    """A model whose parameters are DTensors from now on: the parts of this rank, except while they are whole."""

    stay_whole: bool = False
    """Between updates, too: something samples from the weights here."""

    def __init__(self, model: Model, ranks: Ranks) -> None:
        """Release the shards of other ranks; ConfigError when this torch cannot."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not hasattr(FSDPModule, NEEDED):
            raise ConfigError(
                f"actor.sharding=fsdp2: torch {torch.__version__} has no FSDPModule.{NEEDED}; needs torch >= 2.13, or "
                "actor.sharding=none"
            )
        self._ranks = ranks
        self._model: Any = model
        self._is_whole = False
        mesh = init_device_mesh(ranks.device.type, (ranks.num,))
        dtype = next(model.transformer.parameters()).dtype
        half = dtype in (torch.bfloat16, torch.float16)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        # A unit's weights have one number format, and the value head of a half-precision model has another.
        heads = [child for child in model.children() if next(child.parameters()).dtype != dtype]
        self._units: list[Any] = [*reversed(layers), *heads, model]
        for unit in self._units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        vocabulary = model.transformer.config.get_text_config().vocab_size
        with torch.no_grad():  # FSDP takes what computes first for the whole, and sampling begins further inside
            model(MicroBatch(two_groups(vocabulary), ranks.device), 1.0, False)
        self.scatter()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every rank has all weights inside; all ranks have to come here."""
        if not self._is_whole:
            self._model.set_reshard_after_forward(False)
            for unit in self._units:
                unit.unshard()
            self._is_whole = True
        try:
            yield
        finally:
            if not self.stay_whole:
                self.scatter()

    def scatter(self) -> None:
        """Keep this rank's parts only."""
        self._model.reset_iter_state()
        self._model.set_reshard_after_forward(True)
        self._model.set_reshard_after_forward(False, recurse=False)  # its backward pass begins at once
        self._is_whole = False

    def num_idle(self, num_passes: int) -> int:
        """The number of passes that the busiest rank makes beyond this one's."""
        most = torch.tensor(num_passes, device=self._ranks.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most) - num_passes


def idle(minibatch: Batch) -> Batch:
    """The batch of a rank without rows: the shortest row with a loss token, with weight 0.

    A row without one has no logits, so it would leave the output layer without a gradient.
    """
    longest = int(minibatch.lengths_B.max())
    lengths_B = np.where(minibatch.num_sampled_B > 0, minibatch.lengths_B, longest + 1)
    row = select(minibatch, [int(lengths_B.argmin())])
    return replace(row, weights_B=np.zeros(1, dtype=np.asarray(minibatch.weights_B).dtype))
