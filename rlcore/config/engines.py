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
    """Engines that generate side by side; of one that is embedded in the actor there are as many as of the actor."""
    pool: str = ""
    """Pool of engines that are not embedded in the actor; empty: as the backend says, else `main`."""
    samples_per_prompt: int = option(8, at_least=1)
    """Size of a group."""
    temperature: float = option(1.0, above=0)
    """The policy is softmax(logits / temperature), in training too."""
    top_p: float = option(1.0, above=0, at_most=1)
    """Only the most probable tokens that together have this share are drawn; below 1 with `allow_truncation` alone."""
    top_k: int = option(0, at_least=0)
    """Only that many of the most probable tokens are drawn; 0: all, above with `allow_truncation` alone."""
    min_p: float = option(0.0, at_least=0, below=1)
    """Only tokens with this share of the highest probability are drawn; above 0 with `allow_truncation` alone."""
    allow_truncation: bool = False
    """Let top_p, top_k and min_p cut off tokens in training. What a token was drawn from is then recorded with the mass
    that was kept, and its loss multiplied by pi_old / mu, which takes a pass; what is cut off is never learned from."""
    max_tokens: int = option(512, at_least=1)
    """Tokens of a response, at most; one that is cut off usually scores 0. Thinking models need thousands."""
    stop: tuple[str, ...] = ()
    """Strings that end a response when its text holds them; special tokens are not part of the text."""
    max_rows: int = option(64, at_least=1)
    """Rows that are decoded at once."""
    deadline_s: float = option(3600.0, above=0)
    """Seconds the generation of one step may take before the run stops and says so."""
    weight_sync: Literal["disk", "tcp", "shm"] = "disk"
    """The way of the actor's weights to replicas that hold a copy. disk: through a directory that all of them see; tcp:
    from a copy in the memory of the actor's process; shm: from such a copy through shared memory, on one machine."""
    weights_bucket_mib: int = option(16, used_when="weight_sync == 'shm'", at_least=1)
    """Size of the pieces in which weights go through shared memory; two of them are taken for each process of a
    replica while it loads weights."""
    weights_dir: str = option("", used_when="weight_sync == 'disk'")
    """The directory of weights for replicas that hold a copy, which all of them see; empty: the run directory."""
    on_new_weights: Literal["restart", "continue"] = option("restart", used_when="schedule.max_staleness not in (0, 1)")
    """Samples that are unfinished when the weights change go on with the new ones. restart: their keys and values are
    computed again first; continue: those of the old weights are kept."""
    warn_logprob_diff: float = option(0.05, above=0)
    """Warn when log-probs of the actor and of a rollout with a copy of its weights differ by more in a step's mean."""
    check_weights_every: int = option(16, at_least=0)
    """After the first two hand-overs of weights, and every so many, each rollout with a copy samples a few tokens whose
    log-probs are compared with the actor's, and the run stops where it did not take the weights; 0: never."""

    @property
    def truncates(self) -> bool:
        """True if training draws tokens from a part of the vocabulary only."""
        return self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (peft)."""

    enabled: bool = False
    """Train adapters and leave the model's own weights as they are."""
    rank: int = option(16, used_when="enabled == True", at_least=1)
    """Inner dimension of an adapter."""
    alpha: float = option(32.0, used_when="enabled == True", above=0)
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = option(0.0, used_when="enabled == True", at_least=0, below=1)
    """Dropout before an adapter, in training."""
    target_modules: tuple[str, ...] = option(("all-linear",), used_when="enabled == True")
    """Modules that get an adapter, by the end of their names; all-linear: every linear layer but the head."""


@dataclass(frozen=True)
class EngineConfig:
    """Training of a model; actor and critic have one section each."""

    backend: str = "hf"
    """The training engine."""
    lr: float = option(1e-6, above=0)
    """Learning rate of AdamW; with `actor.lora.enabled` the default is 1e-5."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine end at 0 with the last optimizer step."""
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
    overflow."""
    rounding: Literal["stochastic", "nearest"] = option("stochastic", used_when="dtype in ('bfloat16', 'float16')")
    """Rounding of float32 masters to half-precision weights after an update. stochastic: to either neighbour at random,
    so that weights follow their masters on average; nearest: a weight stays until its master has moved by half a unit
    in the last place, which takes tens of updates at the learning rates of RL."""
    tf32: bool = option(False, used_when="cluster.device == 'cuda'")
    """Multiply float32 matrices on tensor cores, with 10 bits of mantissa: several times as fast, and log-probs of the
    sampler differ from the trainer's by rounding, as they do in half precision."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    offload: bool = option(False, used_when="cluster.device == 'cuda'")
    """Keep optimizer state, and weights that nothing inside this role uses, in host memory between the updates of one
    step and those of the next."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters (peft) instead of all weights."""
    data_parallel: int = option(1, at_least=1)
    """Processes that train together, one device each; `context_parallel` of them on each share of a mini-batch."""
    context_parallel: int = option(1, at_least=1, used_when="data_parallel != 1")
    """Neighbours among these processes that hold slices of the same sequences, for long ones: each computes every so
    many tokens, and in attention its share of the heads; divides `data_parallel` and the model's heads of queries."""
    sharding: Literal["none", "fsdp2"] = option("none", used_when="data_parallel != 1")
    """fsdp2: each rank keeps a part of weights, gradients and optimizer state; none: each keeps all of them."""
    dp_replicate: int = option(1, at_least=1, used_when="sharding == 'fsdp2'")
    """Copies of the sharded weights (HSDP), each on as many neighbouring ranks: layers are gathered within a copy, and
    copies exchange the sum of their gradients once per update; divides `data_parallel`. `rlcore plan` says where the
    default is the number of nodes."""
    minibatch_prompts: int = option(0, at_least=0)
    """Groups of one optimizer step; 0: all of the step."""
    epochs: int = option(1, at_least=1)
    """Passes over the step's batch."""
    micro_batch_tokens: int = option(2048, at_least=1)
    """Tokens, padding included, of one forward and backward pass: what they leave behind is most of the memory."""
    shared_prefix: Literal["planned", "tree", "cache", "none"] = "planned"
    """Way to compute the prompt of a group once for all its samples; planned: as `rlcore plan` says for the model."""
    max_skipped_updates: int = option(3, at_least=1)
    """The run stops when this many updates in a row had a gradient that is not finite."""

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
