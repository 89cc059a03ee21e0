"""AdamW over master weights, and the learning-rate schedule.

Arxiv 1711.05101 (decoupled weight decay). Half-precision weights have float32 masters, which start from the
checkpoint's values and which the optimizer updates. After each step they are rounded into the weights
(`rlcore.engines.hf.train.rounding`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.config import EngineConfig
from rlcore.engines.hf.train import sharded_tensors as parts
from rlcore.engines.hf.train.gradients import Masters, add
from rlcore.engines.hf.train.rounding import HALF, RoundingKey, publish
from rlcore.engines.hf.train.sharded_tensors import Rows, held, like, own
from rlcore.errors import CheckpointError, ConfigError


def learning_rate(config: EngineConfig, update: int, position: int, num_updates: int) -> float:
    """The learning rate of optimizer step `update` (from 0), at `position` (from 0) of `num_updates` in the run.

    Warm-up is linear and reaches lr at step `warmup_steps`; linear and cosine then decay to `min_lr_ratio` of it, which
    they would reach one position after the last. The two numbers differ after skipped updates, and after a resume with
    another number of updates per step: only steps that were taken warm the optimizer up.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = (position - config.warmup_steps) / max(1, num_updates - config.warmup_steps)
    remaining = min(1.0, max(0.0, 1.0 - progress))
    above = remaining if config.lr_schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * remaining)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * above)


def check_schedule(config: EngineConfig, num_updates: int, who: str) -> None:
    """ConfigError when the schedule has to end with the run and the run's end is unknown."""
    if config.lr_schedule != "constant" and num_updates <= 0:
        raise ConfigError(
            f"{who}.lr_schedule={config.lr_schedule}: it ends with the last optimizer step, and the number of steps is "
            "not known; set train.max_steps or train.epochs, or choose constant"
        )


class MasterAdamW:
    """AdamW over the trainable parameters of a model; float32 and float64 weights are their own masters.

    Weight decay spares vectors: norms and biases.
    """

    def __init__(
        self, model: nn.Module, config: EngineConfig, seed: int = 0, start: Mapping[str, Tensor] | None = None
    ) -> None:
        """Create the masters; those of half-precision weights start from the tensors of `start`, by parameter name.

        For a sharded model `start` holds this rank's rows. Its tensors become the masters without a copy.

        Masters whose name is not in `start` start from the weight itself. `seed`: for stochastic rounding.
        """
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameters = list(named.values())
        self.masters = [_master_of(parameter, (start or {}).get(name)) for name, parameter in named.items()]
        self._names = list(named)
        self._resting: dict[int, Tensor] = {}
        """Masters in host memory by index, while a placeholder receives each one's gradients."""
        self._rounding, self._seed = config.rounding, seed
        matrices = [master for master in self.masters if master.ndim >= 2]
        vectors = [master for master in self.masters if master.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )

    def collect_gradients(self) -> None:
        """Add the half-precision gradients of a micro-batch to the masters' gradients, so that sums are in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is parameter or parameter.grad is None:
                continue
            add(master, parameter.grad)
            parameter.grad = None

    def unscale_gradients(self, scale: float) -> None:
        """Divide the masters' gradients by a power of two."""
        if scale != 1.0:
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(1.0 / scale)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale all gradients down to `max_norm` if their norm is larger, and return the norm; 0 never scales."""
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):  # over the ranks' shards
            mesh, norm = norm.device_mesh, norm.full_tensor()
            if mesh.ndim > 1:  # a difference in the last bit would let the copies of the weights diverge
                dist.all_reduce(norm, dist.ReduceOp.MAX, group=mesh.get_group(0))
        if max_norm > 0.0:
            nn.utils.clip_grads_with_norm_(self.masters, max_norm, norm)
        return float(norm)

    def step(self, lr: float) -> None:
        """One AdamW step with the masters' gradients; `publish` writes the result to half-precision weights."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()

    def publish(self, update: int) -> None:
        """Round the masters into the half-precision weights; the same `update` gives the same bits."""
        for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            if master is not parameter:
                publish(parameter, master, self._rounding, RoundingKey(self._seed, update, index))

    def summed_in(self) -> Masters:
        """The masters of half-precision weights, whose `grad` sums the gradients, by weight."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return {parameter: master for parameter, master in pairs if master is not parameter}

    def half_masters(self) -> dict[str, Tensor]:
        """The masters of half-precision weights, by parameter name."""
        return {
            name: master
            for name, parameter, master in zip(self._names, self.parameters, self.masters, strict=True)
            if master is not parameter
        }

    def clear_gradients(self) -> None:
        """Discard all gradients."""
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def to(self, device: torch.device) -> None:
        """Move the optimizer's state, with masters that are copies, to a device or to host memory.

        Gradients are summed on the device in any case. `parts.finish_moves` ends the move.
        """
        for state in self._adamw.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":
                    parts.move(value, device)
                elif isinstance(value, Tensor) and device != parts.HOST:
                    state[name] = value.to(device)  # restored in host memory; it stays on the device from then on
        for index, copied in enumerate(self._copies()):
            master = parts.holder(copied)
            if device != parts.HOST and index in self._resting:
                master.data = parts.begin_move(self._resting.pop(index), device)
            elif device == parts.HOST and index not in self._resting:
                self._resting[index] = parts.begin_move(master.data, device)
                master.data = parts.placeholder(master.data)

    def state(self) -> tuple[dict[str, Rows], dict[str, Any]]:
        """The state for a checkpoint: what this rank holds of each tensor, by name, and plain values."""
        adamw = self._adamw.state_dict()
        tensors = {
            f"adamw.{index}.{name}": held(value)
            for index, moments in adamw["state"].items()
            for name, value in moments.items()
        }
        for index, (master, value) in enumerate(zip(self._copies(), self._values(), strict=True)):
            tensors[f"master.{index}"] = held(master).moved_to(own(value))
        return tensors, {"param_groups": adamw["param_groups"]}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from what `state` returned, rows as plain tensors, bit for bit; betas and weight decay stay those
        of this run's settings.

        CheckpointError if it has other masters.
        """
        num_saved = sum(name.startswith("master.") for name in tensors)
        if num_saved != len(self._values()):
            raise CheckpointError(
                f"the checkpoint has float32 masters of {num_saved} tensors, and this run of {len(self._values())}: "
                "the dtype is another one (actor.dtype, or the critic's); resume with that of the checkpoint, or begin "
                "a new run with its model as model.path"
            )
        trained = [parameter for group in self._adamw.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, index, *rest = name.split(".")
            if kind == "adamw":
                of_one = state.setdefault(int(index), {})
                target = trained[int(index)]
                of_one[rest[0]] = like(value.to(target.device), target) if value.ndim else value
        configured = [{name: group[name] for name in ("weight_decay", "betas")} for group in self._adamw.param_groups]
        self._adamw.load_state_dict({"state": state, "param_groups": values["param_groups"]})
        for group, settings in zip(self._adamw.param_groups, configured, strict=True):
            group.update(settings)
        with torch.no_grad():
            for number, master in enumerate(self._values()):
                own(master).copy_(tensors[f"master.{number}"])

    def _values(self) -> list[Tensor]:
        """The masters that are copies, wherever they are; this rank's shards of offloaded ones."""
        return [self._resting.get(index, master) for index, master in enumerate(self._copies())]

    def _copies(self) -> list[Tensor]:
        pairs: Iterable[tuple[Tensor, Tensor]] = zip(self.parameters, self.masters, strict=True)
        return [master for parameter, master in pairs if master is not parameter]


def _master_of(parameter: Tensor, start: Tensor | None) -> Tensor:
    if parameter.dtype not in HALF:
        return parameter
    return nn.Parameter(parameter.detach().float() if start is None else like(start.detach(), parameter))
