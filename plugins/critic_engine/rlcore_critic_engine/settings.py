"""The plugin's settings."""

from dataclasses import dataclass, field, replace
from typing import Literal

from rlcore.config import EngineConfig, LoraConfig, option

SECTION = "plugins.critic_engine"
"""Key of the settings in the configuration."""


@dataclass(frozen=True)
class CriticSettings:
    """The critic and how it learns; `plugins.critic_engine`. Mini-batches and epochs are those of `actor`."""

    path: str = ""
    """Model directory or hub name to start from; empty: `model.path`. Its tokenizer must be the policy's."""
    revision: str = option("main", used_when="path != ''")
    """Of a `path` on the hub: branch, tag or commit."""
    head: Literal["planned", "new", "saved", "classifier"] = "planned"
    """new: the value head starts at zero. saved: `path` is a saved critic, `critic/model` of a checkpoint. classifier:
    the head of a sequence or token classifier with one label, such as a reward model. planned: the head that the model
    has, as `rlcore plan` says, else new."""
    trunk: Literal["own", "actor"] = "own"
    """own: a second model. actor: the policy's own weights serve, frozen, and only a head (and `lora`) is trained."""
    own_pool: bool = False
    """Devices of the critic's own, the pool critic; otherwise it takes turns with the actor on the pool main."""
    data_parallel: int = option(1, at_least=1, used_when="trunk == 'own'")
    """Processes that train it together, each on a share of every mini-batch; on the actor's trunk as many as it has."""
    sharding: Literal["none", "fsdp2"] = option("none", used_when="data_parallel != 1")
    """fsdp2: each rank keeps a part of weights, gradients and optimizer state; none: each keeps all of them."""
    dp_replicate: int = option(1, at_least=1, used_when="sharding == 'fsdp2'")
    """Copies of the sharded weights, each on as many neighbouring ranks, as `actor.dp_replicate`."""
    context_parallel: int = option(1, at_least=1, used_when="data_parallel != 1")
    """Neighbouring ranks that hold slices of the same sequences, as `actor.context_parallel`, which decides on the
    actor's trunk."""
    backend: str = "hf"
    """Settings of the critic."""
    lr: float = option(1e-5, at_least=0)
    """Learning rate of AdamW; 0: the critic stays as it is."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up of lr; linear and cosine end at 0 with the run's last update."""
    warmup_steps: int = option(0, at_least=0)
    """Updates over which lr grows from 0."""
    max_grad_norm: float = option(1.0, above=0)
    """The gradient is scaled down to this norm."""
    weight_decay: float = option(0.0, at_least=0)
    """Decoupled weight decay of AdamW."""
    beta1: float = option(0.9, at_least=0, below=1)
    """Decay of AdamW's first moment."""
    beta2: float = option(0.999, at_least=0, below=1)
    """Decay of AdamW's second moment."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = option(
        "float32", used_when="trunk == 'own'", on_cuda="actor.dtype"
    )
    """Number format of weights and activations; the value head is float32 at least."""
    rounding: Literal["stochastic", "nearest"] = option("stochastic", used_when="dtype in ('bfloat16', 'float16')")
    """Rounding of float32 masters to half-precision weights after an update, as `actor.rounding`."""
    gradient_checkpointing: bool = option(False, used_when="trunk == 'own'", on_cuda="actor.gradient_checkpointing")
    """Compute activations again in the backward pass; on the actor's trunk `actor.gradient_checkpointing` decides."""
    offload: bool = option(False, used_when="cluster.device == 'cuda'", on_cuda="actor.offload")
    """Keep weights and optimizer state in host memory between the updates of one step and those of the next."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters instead of all weights; on the actor's trunk beside the actor's own."""
    micro_batch_tokens: int = option(2048, at_least=1, on_cuda="actor.micro_batch_tokens")
    """Tokens, padding included, of one forward and backward pass."""
    shared_prefix: Literal["planned", "tree", "cache", "none"] = "planned"
    """Way to compute the prompt of a group once for all its samples; planned: as `rlcore plan` says for the model."""
    max_skipped_updates: int = option(3, at_least=1)
    """The run stops when this many updates in a row had a gradient that is not finite."""
    value_clip: float = option(0.2, at_least=0)
    """Distance that a value may move from that of the step's start before its loss stops counting; 0: no clip."""
    actor_waits_updates: int = option(0, at_least=0)
    """Updates at the start of the run in which only the critic learns."""

    def engine(self, actor: EngineConfig) -> EngineConfig:
        """The settings as the training engine takes them; on the actor's trunk its number format and slices."""
        engine = EngineConfig(
            lr=self.lr,
            lr_schedule=self.lr_schedule,
            warmup_steps=self.warmup_steps,
            max_grad_norm=self.max_grad_norm,
            weight_decay=self.weight_decay,
            beta1=self.beta1,
            beta2=self.beta2,
            dtype=self.dtype,
            rounding=self.rounding,
            gradient_checkpointing=self.gradient_checkpointing,
            offload=self.offload,
            lora=self.lora,
            data_parallel=self.data_parallel,
            sharding=self.sharding,
            dp_replicate=self.dp_replicate,
            context_parallel=self.context_parallel,
            micro_batch_tokens=self.micro_batch_tokens,
            shared_prefix=self.shared_prefix,
            max_skipped_updates=self.max_skipped_updates,
        )
        if self.trunk == "own":
            return engine
        return replace(
            engine,
            dtype=actor.dtype,
            rounding=actor.rounding,
            gradient_checkpointing=actor.gradient_checkpointing,
            context_parallel=actor.context_parallel,
        )
