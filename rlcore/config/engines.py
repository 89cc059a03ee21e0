"""The sections of the engines that sample and that train; the other sections are in `rlcore.config.sections`."""

from dataclasses import dataclass, field
from typing import Literal

from rlcore.config.options import option


@dataclass(frozen=True)
class RolloutConfig:
    """Generation of trajectories in training."""

    agent: str = "single_turn"
    """The agent loop, by name."""
    backend: str = "hf"
    """The rollout engine, by name. hf: embedded in the actor's process; `rlcore plugins` shows those of plugins."""
    replicas: int = option(1, at_least=1)
    """Number of engines; an engine that is embedded in the actor has as many replicas as the actor."""
    pool: str = ""
    """Pool of engines that are not embedded in the actor; empty: the backend's, else `main`."""
    samples_per_prompt: int = option(8, at_least=1)
    """Size of a group."""
    temperature: float = option(1.0, above=0)
    """The policy is softmax(logits / temperature), in training, too."""
    top_p: float = option(1.0, above=0, at_most=1)
    """Only the most probable tokens with this total probability are sampled; below 1 only with `allow_truncation`."""
    top_k: int = option(0, at_least=0)
    """Only this many of the most probable tokens are sampled; 0: all; above 0 only with `allow_truncation`."""
    min_p: float = option(0.0, at_least=0, below=1)
    """Only tokens with at least this share of the highest probability are sampled; above 0 only with
    `allow_truncation`."""
    allow_truncation: bool = False
    """Let top_p, top_k and min_p truncate the distribution in training. The log-prob under the truncated distribution
    is then recorded, and the loss is multiplied by pi_old / mu, which takes a pass. Truncated tokens are never learned
    from."""
    max_tokens: int = option(512, at_least=1)
    """The most tokens of a response; a truncated response usually scores 0. Thinking models need thousands."""
    stop: tuple[str, ...] = ()
    """Strings that end a response when its text holds them; special tokens are not part of the text."""
    max_rows: int = option(64, at_least=1)
    """Rows that are decoded at the same time."""
    deadline_s: float = option(3600.0, above=0)
    """Timeout in seconds without a finished sample while samples are generated; the run stops after that. Time in which
    the actor works does not count."""
    weight_sync: Literal["auto", "disk", "tcp", "shm", "nccl", "ipc"] = "auto"
    """Weight sync from the actor to replicas that hold a copy. disk: through a directory that all of them can read;
    tcp: from a copy in the memory of the actor's process; shm: from such a copy in memory that all of them map, on one
    machine; nccl: from such a copy by broadcast to all replicas, which have other devices than the actor; ipc: from
    the actor's device to the replicas on the same device, without a copy; auto: shm where it is possible and the host
    has the memory, else disk."""
    weights_bucket_mib: int = option(16, used_when="weight_sync in ('nccl', 'ipc')", at_least=1)
    """Size of a bucket of weights; each device needs one. 256 is faster."""
    weights_transport: Literal["nccl", "gloo"] = option("nccl", used_when="weight_sync == 'nccl'")
    """Transport of the broadcasts. nccl: between CUDA devices; gloo: between hosts over TCP, which needs no GPU."""
    weights_deadline_s: float = option(600.0, above=0)
    """Timeout in seconds for a replica to load a version of the weights; it is restarted after that."""
    weights_dir: str = option("", used_when="weight_sync in ('auto', 'disk')")
    """The directory of weights for replicas that hold a copy, which all of them can read; empty: the run directory.
    Several runs may share it. With auto it means disk."""
    on_new_weights: Literal["restart", "continue"] = option("restart", used_when="schedule.max_staleness not in (0, 1)")
    """Samples that are unfinished when the weights change continue with the new ones. restart: their keys and values
    are recomputed first; continue: those of the old weights are kept."""
    warn_logprob_diff: float = option(0.05, above=0)
    """Warn when the log-probs of the actor and of a rollout with a copy of its weights differ by more, on
    average over a step."""
    check_weights_every: int = option(16, at_least=0)
    """After the first two weight syncs, and then after every N-th, each rollout with a copy samples a few tokens, and
    after any other sync one of them in turn. Their log-probs are compared with the actor's, and the run stops if the
    rollout did not load the weights; 0: never."""

    @property
    def truncates(self) -> bool:
        """True if training samples only from a part of the vocabulary."""
        return self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (peft)."""

    enabled: bool = False
    """Train adapters and keep the model's weights unchanged."""
    rank: int = option(16, used_when="enabled == True", at_least=1)
    """Inner dimension of an adapter."""
    alpha: float = option(32.0, used_when="enabled == True", above=0)
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = option(0.0, used_when="enabled == True", at_least=0, below=1)
    """Dropout before an adapter, in training."""
    target_modules: tuple[str, ...] = option(("all-linear",), used_when="enabled == True")
    """Modules that get an adapter, by the end of their names; all-linear: every linear layer but the head, and in
    models with experts those of the attention."""


@dataclass(frozen=True)
class EngineConfig:
    """Training of a model; actor and critic each have such a section."""

    backend: str = "hf"
    """The training engine."""
    lr: float = option(1e-6, above=0)
    """Learning rate of AdamW; with `actor.lora.enabled` the default is 1e-5."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine fall to `min_lr_ratio` of lr, which they would reach one optimizer step
    after the last one."""
    min_lr_ratio: float = option(0.0, used_when="lr_schedule != 'constant'", at_least=0, below=1)
    """Share of lr that the schedule would reach one optimizer step after the last one."""
    warmup_steps: int = option(0, at_least=0)
    """Optimizer steps over which lr grows from 0."""
    max_grad_norm: float = option(1.0, above=0)
    """The gradient is scaled down to this norm."""
    weight_decay: float = option(0.0, at_least=0)
    """Decoupled weight decay of AdamW."""
    beta1: float = option(0.9, at_least=0, below=1)
    """Decay of AdamW's first moment."""
    beta2: float = option(0.999, at_least=0, below=1)
    """Decay of AdamW's second moment."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Number format of weights and activations. bfloat16 and float16 have float32 masters, gradient sums and optimizer
    state; losses, log-probs and softmax are float32. float16 scales its loss so that gradients neither vanish nor
    overflow. The default is bfloat16 on a GPU, and on a CPU that multiplies it where actor and sampler are hf."""
    rounding: Literal["stochastic", "nearest"] = option("stochastic", used_when="dtype in ('bfloat16', 'float16')")
    """Rounding of float32 masters to half-precision weights after an update. stochastic: to either neighbour at random,
    so that weights follow their masters on average; nearest: a weight stays until its master has moved by half a unit
    in the last place. At the learning rates of RL that takes tens of updates."""
    tf32: bool = option(False, used_when="cluster.device == 'cuda'")
    """Multiply float32 matrices on tensor cores, with 10 bits of mantissa: several times as fast, and log-probs of the
    sampler differ from the trainer's by rounding, as they do in half precision."""
    compile: bool = option(False, used_when="cluster.device == 'cuda'")
    """Compute the model's layers through torch.compile, which fuses the operations between matrix products, in updates
    and passes. The first step takes up to a minute longer. The default on a GPU is true where the machine has triton
    and a C compiler."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    offload: bool = option(False, used_when="cluster.device == 'cuda'")
    """Keep optimizer state and unused weights in host memory between the updates of one step and those of the next."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters (peft) instead of all weights."""
    data_parallel: int = option(1, at_least=1)
    """Processes that train together, one device each; groups of `context_parallel` compute the same share of a
    mini-batch."""
    context_parallel: int = option(1, at_least=1, used_when="data_parallel != 1")
    """Neighbouring processes that hold slices of the same sequences, for long ones: each computes every N-th token, and
    in attention its share of the heads. Must divide `data_parallel` and the model's query heads."""
    sharding: Literal["none", "fsdp2"] = option("none", used_when="data_parallel != 1")
    """fsdp2: each rank holds a shard of weights, gradients and optimizer state; none: each holds all of them."""
    dp_replicate: int = option(1, at_least=1, used_when="sharding == 'fsdp2'")
    """Copies of the sharded weights (HSDP), each on the same number of neighbouring ranks. Layers are gathered within a
    copy, and copies exchange the sum of their gradients once per update. Must divide `data_parallel`. If the
    default is the number of nodes, `rlcore plan` says so."""
    minibatch_prompts: int = option(0, at_least=0)
    """Groups per optimizer step; 0: all groups of the step."""
    epochs: int = option(1, at_least=1)
    """Passes over the step's batch."""
    micro_batch_tokens: int = option(2048, at_least=1)
    """Tokens, padding included, of one forward and backward pass. Their activations are most of the memory."""
    shared_prefix: Literal["planned", "tree", "cache", "none"] = "planned"
    """Method of computing a group's prompt once for all its samples; planned: the planner chooses by the model."""
    max_skipped_updates: int = option(3, at_least=1)
    """The run stops after this many updates in a row with a gradient that is not finite."""

    @property
    def shard_ranks(self) -> int:
        """The number of ranks that keep one copy of weights and optimizer state together; 1: each has all of them."""
        return 1 if self.sharding == "none" else max(1, self.data_parallel // self.dp_replicate)

    @property
    def is_half(self) -> bool:
        """True if weights and activations are half precision, with float32 masters."""
        return self.dtype in ("bfloat16", "float16")

    @property
    def repeats_logprobs(self) -> bool:
        """True if the embedded sampler and a whole pass give equal log-probs except for the last digits of float32."""
        return not (self.is_half or (self.tf32 and self.dtype == "float32"))
