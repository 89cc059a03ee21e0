"""The plugin's settings."""

from dataclasses import dataclass, field, replace
from typing import Literal

from rlcore.config import EngineConfig, LoraConfig, option

SECTION = "plugins.critic_engine"
"""Key of the settings in the configuration."""


@dataclass(frozen=True)
class CriticSettings:
    """The critic and how it learns; `plugins.critic_engine`. Mini-batches and epochs are the actor's."""

    path: str = ""
    """Model directory or hub name to start from; empty: `model.path`. Its tokenizer must be the policy's."""
    revision: str = option("main", used_when="path != ''")
    """Branch, tag or commit of a `path` on the hub."""
    head: Literal["planned", "new", "saved", "classifier"] = "planned"
    """new: the value head starts at zero. saved: `path` is a saved critic, `critic/model` of a checkpoint. classifier:
    the head of a sequence or token classifier with one label, such as a reward model. planned: the model's own head, as
    shown by `rlcore plan`, else new."""
    trunk: Literal["own", "actor"] = "own"
    """own: a second model. actor: the policy's weights, frozen for the critic; only a head (and `lora`) is trained."""
    own_pool: bool = False
    """Give the critic its own devices (pool critic); otherwise it takes turns with the actor on the pool main."""
    data_parallel: int = option(1, at_least=1, used_when="trunk == 'own'")
    """Processes that train it, each on a share of every mini-batch; on the actor's trunk: the actor's number."""
    sharding: Literal["none", "fsdp2"] = option("none", used_when="data_parallel != 1")
    """fsdp2: each rank keeps a shard of weights, gradients and optimizer state; none: each keeps all of them."""
    dp_replicate: int = option(1, at_least=1, used_when="sharding == 'fsdp2'")
    """Copies of the sharded weights, each over equally many neighbouring ranks, like `actor.dp_replicate`."""
    context_parallel: int = option(1, at_least=1, used_when="data_parallel != 1")
    """Neighbouring ranks that hold slices of the same sequences, like `actor.context_parallel`, which applies on the
    actor's trunk."""
    backend: str = "hf"
    """Backend of the training engine."""
    lr: float = option(1e-5, at_least=0)
    """Learning rate of AdamW; 0: the critic does not change."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of lr after the warm-up; linear and cosine fall to `min_lr_ratio` of lr, which they would reach one update
    after the run's last one."""
    min_lr_ratio: float = option(0.0, used_when="lr_schedule != 'constant'", at_least=0, below=1)
    """Share of lr that the schedule would reach one update after the run's last one."""
    warmup_steps: int = option(0, at_least=0)
    """Updates over which lr rises from 0."""
    max_grad_norm: float = option(1.0, above=0)
    """Largest norm of the gradient; longer ones are scaled down."""
    weight_decay: float = option(0.0, at_least=0)
    """Decoupled weight decay of AdamW."""
    beta1: float = option(0.9, at_least=0, below=1)
    """Decay of AdamW's first moment."""
    beta2: float = option(0.999, at_least=0, below=1)
    """Decay of AdamW's second moment."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = option(
        "float32", used_when="trunk == 'own'", on_cuda="actor.dtype"
    )
    """Number format of weights and activations; the value head is at least float32."""
    rounding: Literal["stochastic", "nearest"] = option("stochastic", used_when="dtype in ('bfloat16', 'float16')")
    """Rounding of float32 masters to half-precision weights after an update, like `actor.rounding`."""
    gradient_checkpointing: bool = option(False, used_when="trunk == 'own'", on_cuda="actor.gradient_checkpointing")
    """Recompute activations in the backward pass; on the actor's trunk `actor.gradient_checkpointing` applies."""
    offload: bool = option(False, used_when="cluster.device == 'cuda'", on_cuda="actor.offload")
    """Keep weights and optimizer state in host memory between the updates of two steps."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters instead of all weights; on the actor's trunk in addition to the actor's."""
    micro_batch_tokens: int = option(2048, at_least=1, on_cuda="actor.micro_batch_tokens")
    """Tokens, padding included, of one forward and backward pass."""
    shared_prefix: Literal["planned", "tree", "cache", "none"] = "planned"
    """Method for computing a group's prompt once for all its samples; planned: chosen by the planner for the model."""
    max_skipped_updates: int = option(3, at_least=1)
    """The run stops after this many updates in a row with a gradient that is not finite."""
    value_clip: float = option(0.2, at_least=0)
    """Distance that a value may move from its value at the step's start before its loss stops counting; 0: no clip."""
    actor_waits_updates: int = option(0, at_least=0)
    """Updates at the start of the run in which only the critic learns."""

    def engine(self, actor: EngineConfig) -> EngineConfig:
        """The settings in the training engine's form; on the actor's trunk with its number format and slices."""
        engine = EngineConfig(
            lr=self.lr,
            lr_schedule=self.lr_schedule,
            min_lr_ratio=self.min_lr_ratio,
            warmup_steps=self.warmup_steps,
            max_grad_norm=self.max_grad_norm,
            weight_decay=self.weight_decay,
            beta1=self.beta1,
            beta2=self.beta2,
            dtype=self.dtype,
            rounding=self.rounding,
            compile=actor.compile,
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
