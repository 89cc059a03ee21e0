"""FSDP2: each rank keeps a shard of every weight, gradient and optimizer state.

Updates and scores gather the weights of one layer at a time, and an update reduce-scatters the gradient. These are
collectives, so all ranks must make the same number of passes; a rank without rows computes `idle`. Writing weights
gathers them in the same units.

The ranks may keep several copies of the shards (HSDP), each on neighbours: weights are gathered within a copy, and
copies sum their gradients once per update.

Sampling runs on whole weights, which stay gathered from then on, so ranks sample independently. The implementation is
torch.distributed.fsdp (arXiv 2304.11277); gradients are not divided, because the controller has weighted every row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlcore.data.batch import select
from rlcore.engines.hf.train.backbone import Model
from rlcore.engines.hf.train.microbatch import MicroBatch
from rlcore.engines.hf.train.prefix_trial import two_groups
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.sharded_load import Rows, fill, forget
from rlcore.engines.hf.train.sharded_tensors import part_of
from rlcore.errors import ConfigError
from rlcore.types import Batch


def mesh_of(ranks: Ranks, copies: int = 1, who: str = "actor") -> DeviceMesh:
    """The ranks as a mesh of one dimension, or of copies and, within each, neighbours that shard it (HSDP).

    ConfigError naming `who` when copies do not divide the ranks or their slices.
    """
    if copies == 1:
        return init_device_mesh(ranks.device.type, (ranks.num,))
    slices = 1 if ranks.context is None else ranks.context.num
    if ranks.num % (copies * slices) or copies == ranks.num:
        raise ConfigError(
            f"{who}.dp_replicate={copies}: {ranks.num} ranks, {slices} of them on each slice of a sequence; needs a "
            "number that divides them, with at least two ranks for each copy"
        )
    by_copy = np.array(ranks.order).reshape(copies, -1)
    groups = [ranks.group(by_copy.T.tolist()), ranks.group(by_copy.tolist())]
    return DeviceMesh.from_group(groups, ranks.device.type, by_copy, mesh_dim_names=("replicate", "shard"))


class Shards:
    """Makes the parameters of a model DTensors: this rank's shards, except while they are whole."""

    stay_whole: bool = False
    """True to stay whole between updates, because something samples from the weights."""

    def __init__(self, model: Model, ranks: Ranks, mesh: DeviceMesh, rows: Rows) -> None:
        """Keep this rank's shards only.

        Parameters named in `rows` are placeholders, and `rows` becomes their shards; the others are whole on each rank.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._mesh = mesh
        self._model: Any = model
        self._is_whole = False
        dtype = next(model.transformer.parameters()).dtype
        half = dtype in (torch.bfloat16, torch.float16)
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)
        # Weights of a unit need one dtype, and the value head of a half-precision model has another.
        self._heads: list[Any] = [child for child in model.children() if next(child.parameters()).dtype != dtype]
        self._units: list[Any] = units_of(model, self._heads)
        self._names = names_by_unit(model, self._units)
        forget(model, rows)
        for unit in self._units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        fill(model, rows)
        vocabulary = model.transformer.config.get_text_config().vocab_size
        with torch.no_grad():  # FSDP takes the module that computes first for the root, and sampling starts further in
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

    @contextmanager
    def by_layers(self) -> Iterator[None]:
        """Context in which forward passes without gradients gather a layer at a time; all ranks make equally many.

        Parameters outside the layers are whole inside. Weights that are already whole stay whole.
        """
        if self._is_whole:
            yield
            return
        for unit in (*self._heads, self._model):
            unit.unshard()
        try:
            yield
        finally:
            self.scatter()

    def sum_copies(self, *, now: bool) -> None:
        """Sum gradients over copies in the next backward pass, or accumulate them over passes until then."""
        self._model.set_requires_all_reduce(now)

    @property
    def part(self) -> tuple[int, int]:
        """(part, number of parts) of this rank's shards."""
        return part_of(self._mesh)

    @property
    def writes(self) -> bool:
        """True for the ranks of the first copy, whose shards make up the whole model."""
        return self._mesh.ndim == 1 or self._mesh.get_local_rank(0) == 0

    @property
    def num_units(self) -> int:
        """The number of units of `unit_by_unit`."""
        return len(self._names)

    def unit_by_unit(self) -> Iterator[frozenset[str]]:
        """Gathers the weights of one unit at a time and yields their names; all ranks must iterate to the end.

        A unit is a layer, a head, or all remaining parameters. Weights that are whole stay whole.
        """
        if self._is_whole:
            yield from self._names
            return
        for unit, names in zip(self._units, self._names, strict=True):
            unit.unshard()
            try:
                yield names
            finally:
                unit.reshard()

    def scatter(self) -> None:
        """Keep this rank's shards only."""
        self._model.reset_iter_state()
        self._model.set_reshard_after_forward(True)
        self._model.set_reshard_after_forward(False, recurse=False)  # its backward pass begins at once
        self._is_whole = False

    @torch.no_grad()
    def have_moved(self, *, here: bool) -> None:
        """Note that the shards were moved; nothing may be gathered until they are `here`."""
        for unit in self._units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if here:
                        parameter.reset_sharded_param()
                    else:  # a cached copy would stay on the device, and hide from FSDP that the shard needs padding
                        parameter._sharded_param_data = parameter.sharded_param._local_tensor.new_empty(0)


def units_of(model: Model, heads: Sequence[Any] = ()) -> list[Any]:
    """The modules that are gathered, one at a time: layers, last one first, heads, and the model with what remains."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [*reversed(layers), *heads, model]


def names_by_unit(model: Model, units: Sequence[Any]) -> list[frozenset[str]]:
    """The names of the parameters that each unit gathers: those within it and not within an earlier unit."""
    paths = {module: name for name, module in model.named_modules()}
    left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = []
    for unit in units:
        prefix = f"{paths[unit]}." if paths[unit] else ""
        found.append(frozenset(name for name in left if name.startswith(prefix)))
        left -= found[-1]
    return found


def idle(minibatch: Batch) -> Batch:
    """The batch of a rank without rows: the shortest row with a loss token, with weight 0.

    A row without one has no logits, so it would leave the output layer without a gradient.
    """
    longest = int(minibatch.lengths_B.max())
    lengths_B = np.where(minibatch.num_sampled_B > 0, minibatch.lengths_B, longest + 1)
    row = select(minibatch, [int(lengths_B.argmin())])
    if row.weights_B is None:
        return row
    return replace(row, weights_B=np.zeros(1, dtype=row.weights_B.dtype))
