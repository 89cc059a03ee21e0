"""Every key of the configuration, with its default. The sections are data; `rlcore.config.load` merges and checks them.

A field whose value matters only under a condition has `used_when`; setting it where it has no effect is an error.
Fields also have the bounds of numbers: `rlcore.config.options`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.config.engines import EngineConfig, RolloutConfig
from rlcore.config.objective import AlgoConfig, RewardConfig
from rlcore.config.options import option
from rlcore.config.stopping import StopConfig

BYTES = "bytes"
"""The value of `model.tokenizer` that picks the tokenizer without files."""


@dataclass(frozen=True)
class ModelConfig:
    """The policy's starting point."""

    path: str = "???"
    """A local model directory or a hub name."""
    revision: str = "main"
    """Branch, tag or commit of a hub name."""
    tokenizer: str = ""
    """Directory or hub name of the tokenizer; empty: that of `model.path`."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """The attention implementation of transformers. The embedded rollout decodes with another one. So do updates with a
    shared prompt (`actor.shared_prefix=tree`), which the planner chooses only with sdpa."""
    chat_template: str = ""
    """A Jinja file that replaces the tokenizer's chat template; empty: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template, such as enable_thinking."""


@dataclass(frozen=True)
class SourceConfig:
    """One source of prompts."""

    path: str = ""
    """A local .jsonl, .json, .parquet or .csv file, or a name for `datasets.load_dataset`: docs/data.md."""
    task: str = ""
    """A `reasoning_gym` task such as chain_sum, instead of `path`."""
    split: str = "train"
    """The split of a dataset. For a reasoning_gym task: train or heldout, disjoint by question text."""
    subset: str = option("", used_when="path != ''")
    """The dataset's configuration name."""
    weight: float = option(1.0, at_least=0)
    """Share of this source in the mixture of training, relative to the others; 0: it is left out."""
    size: int = option(1000, used_when="task != ''", at_least=1)
    """Items of the reasoning_gym task that are generated before the split."""
    seed: int = option(0, used_when="task != ''")
    """Seed of the reasoning_gym task."""
    heldout_frac: float = option(0.2, used_when="task != ''", above=0, below=1)
    """Share of the distinct questions that belongs to the heldout split."""
    keep: str = ""
    """A regular expression: only rows whose question matches are used, before any split; empty: all rows."""
    limit: int = option(0, at_least=0)
    """Use only the first N rows; 0: all."""
    prompt_column: str = ""
    """Column of the prompt, a string or messages; empty: the first of prompt, messages and question. A dotted name is a
    path into a column of objects."""
    answer_column: str = ""
    """Column of the answer, such as reward_model.ground_truth; empty: the first of answer, solution, ground_truth and
    verl's reward_model.ground_truth."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reasoning_gym task or of `load_dataset`."""


@dataclass(frozen=True)
class DataConfig:
    """Training prompts."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Named sources, mixed by weight; at least one."""
    system_prompt: str = ""
    """System message of conversations that have none; empty: none."""
    order: str = "seeded"
    """The order of the training prompts, by name. seeded: sources mixed by weight, each in epochs (see `shuffle`).
    Plugins offer others, such as curricula."""
    shuffle: bool = True
    """Draw a new seeded order in each epoch; orders of plugins may use it, too."""
    solved_at: float = option(1.0, used_when="order != 'seeded'")
    """Least reward of a sample that counts as solved, for orders that use results."""
    max_prompt_tokens: int = option(1024, at_least=1)
    """Longer prompts, chat template and schemas of tools included, are dropped and counted."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy of the KL term."""

    backend: str = option("hf", used_when="algo.kl.placement != 'none'")
    """The engine that computes its log-probs."""
    path: str = option("", used_when="algo.kl.placement != 'none'")
    """Model directory or hub name; empty: `model.path`; for a LoRA actor its weights with the adapter off."""
    micro_batch_tokens: int = option(
        8192, used_when="algo.kl.placement != 'none'", at_least=1, on_cuda="actor.micro_batch_tokens"
    )
    """Tokens, padding included, of one forward pass."""


@dataclass(frozen=True)
class CriticConfig:
    """The critic."""

    engine: str = "none"
    """The critic engine, by name; none: estimators that need no values."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Overlap of sampling, rewards and updates: docs/schedules.md."""

    max_staleness: int = option(0, at_least=0)
    """The most versions between a sample's oldest token and the update that trains on it; 0: on-policy."""
    stream_minibatches: bool = False
    """Update on groups whose rewards are in while others are pending; otherwise updates wait for all rewards of the
    step."""
    on_stale: Literal["wait", "drop"] = option("wait", used_when="max_staleness != 0")
    """Policy for late rewards. wait: the step waits for them; drop: it continues, and their prompts are discarded."""
    old_logprobs: Literal["recompute", "behaviour"] = "recompute"
    """pi_old of the loss. recompute: the weights at the start of the step; behaviour: the policy that sampled."""


@dataclass(frozen=True)
class PoolConfig:
    """A pool of devices."""

    gpus_per_node: int = option(0, at_least=0)
    """Devices per node; 0: as many as its roles request."""
    nodes: int = option(1, at_least=1)
    """Above 1: the ranks of each role are distributed over this many nodes, evenly and in order; see `placement`."""
    colocates: tuple[str, ...] = ()
    """Pools whose devices this one has: servers there sleep while its roles train. Its size is then theirs."""
    placement: Literal["pack", "spread", "strict_spread", "one_node"] = option(
        "pack", used_when="cluster.backend != 'local'"
    )
    """Placement of ranks with nodes=1. pack: on as few nodes as possible; spread: on as many as possible;
    strict_spread: one rank per node; one_node: all on one node."""
    labels: dict[str, str] = field(default_factory=dict, metadata={"used_when": "cluster.backend != 'local'"})
    """Labels of the nodes that the pool may take, such as {accelerator-type: H100}; or '!H100', 'in(H100, H200)'."""
    resources: dict[str, float] = field(default_factory=dict, metadata={"used_when": "cluster.backend != 'local'"})
    """Custom resources that each rank (with `nodes` above 1: each node) reserves, such as {fast_network: 1}."""


@dataclass(frozen=True)
class ClusterConfig:
    """Devices, pools and processes of workers."""

    backend: str = "local"
    """The cluster, by name. local: workers are threads and child processes of this machine; those of plugins: `rlcore
    plugins`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of workers. auto: cuda if this machine has a GPU and torch is built for CUDA, else cpu. On cuda other
    defaults apply, which `rlcore plan` shows with their reasons: docs/gpu.md."""
    threads: int = option(0, at_least=0)
    """Compute threads per process of a worker. 0: one per core; the ranks and replicas of a role share the cores.
    Separate samplers share them with reward models, and with the actor if `schedule.max_staleness` lets them work while
    it trains. On cuda all processes share them."""
    peak_tflops: float = option(0.0, at_least=0)
    """Peak TFLOP/s of a worker's device, from a data sheet or a measured matrix product, for time/mfu; 0: not
    logged."""
    in_process: bool = option(False, used_when="backend == 'local'")
    """For debugging: isolated workers and those on GPUs run as threads, too."""
    max_restarts: int = option(3, at_least=0)
    """The most restarts of an `isolated` replica; the count is reset after ten minutes of service."""
    start_s: float = option(1800.0, above=0)
    """Timeout in seconds of a worker's set-up, of building a component and of starting it."""
    stuck_s: float = option(600.0, above=0)
    """Seconds after which an unfinished call of a component or worker is reported, and again after each such period."""
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    """Pools by name; they win over pools of plugins."""
    layout: Literal["planned", "colocated", "split"] = "planned"
    """The devices of roles that serve (rollout, judges). colocated: those of the actor; split: others, in separate
    pools; planned: split if the machine has devices for all, else colocated; `pools`, `train_pool` and `rollout.pool`
    win if they are set. `rlcore plan` shows it with its reason."""
    train_pool: str = "main"
    """The pool of actor, reference and critic."""


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    name: str = ""
    """Directory of the run below `train.dir`; empty: the config's stem and the UTC time."""
    dir: str = "runs"
    """Parent of all run directories."""
    seed: int = option(0, at_least=0)
    """Seed of data order, sampling and initialisation."""
    max_steps: int = option(0, at_least=0)
    """Steps; 0: `train.epochs` decides."""
    epochs: int = option(1, used_when="max_steps == 0", at_least=1)
    """Passes over the training prompts."""
    prompts_per_step: int = option(8, at_least=1)
    """Groups of a step; a step has this many times `rollout.samples_per_prompt` samples."""
    log_completions_every: int = option(10, at_least=0)
    """Steps between tables of completions on the terminal and in trackers; 0: never."""
    log_completions: int = option(2, used_when="log_completions_every != 0", at_least=1)
    """Rows of such a table."""
    record_tokens: Literal["all", "sampled", "none"] = "sampled"
    """Tokens that `<run>/tokens/` keeps with log-probs and advantages: all, those that the policy sampled, or none."""
    stop: StopConfig = field(default_factory=StopConfig)
    """Early stopping by a metric."""

    record_trace: Literal["all", "steps", "none"] = "all"
    """Contents of `<run>/trace.json`. all; steps: phases and calls of workers, without samples; none."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Named sources of held-out prompts; empty: no evaluation."""
    every_steps: int = option(0, used_when="sources != {}", at_least=0)
    """Steps between evaluations; 0: none between start and end."""
    at_start: bool = option(True, used_when="sources != {}")
    """Evaluate before the first step."""
    at_end: bool = option(True, used_when="sources != {}")
    """Evaluate after the last step."""
    samples_per_prompt: int = option(1, used_when="sources != {}", at_least=1)
    """k of pass@k and maj@k."""
    temperature: float = option(0.0, used_when="sources != {}", at_least=0)
    """0: greedy."""
    top_p: float = option(1.0, used_when="sources != {}", above=0, at_most=1)
    """Sample from the smallest set of tokens with this total probability."""
    top_k: int = option(0, used_when="sources != {}", at_least=0)
    """Sample from this many of the most probable tokens; 0: all."""
    min_p: float = option(0.0, used_when="sources != {}", at_least=0, below=1)
    """Leave out tokens with less than this share of the highest probability."""
    max_tokens: int = option(0, used_when="sources != {}", at_least=0)
    """0: `rollout.max_tokens`."""
    pass_threshold: float = option(1.0, used_when="sources != {}")
    """A sample passes when its reward is at least this."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Contents and times of checkpoints."""

    every_steps: int = option(50, at_least=0)
    """Steps between checkpoints; 0: only at the end and on a signal."""
    keep: int = option(2, at_least=0)
    """Number of newest checkpoints to keep; 0: all."""
    at_end: bool = True
    """Save after the last step."""
    best: str = ""
    """A metric of evaluations, such as eval/heldout/mean: the checkpoint with the best value is kept in addition to the
    newest ones, and named in checkpoints/best; empty: only the newest are kept."""
    best_mode: Literal["max", "min"] = option("max", used_when="best != ''")
    """max: higher is better; min: lower is."""
    on_signal: Literal["now", "finish_step"] = "now"
    """Reaction to SIGTERM and Ctrl-C. now: end on the last published step; finish_step: end after the current step."""
    shutdown_s: float = option(8.0, at_least=0)
    """Seconds that a save on a signal may take; a save that is expected to take longer is not started."""


@dataclass(frozen=True)
class TrackConfig:
    """Trackers in addition to metrics.jsonl, which is always written."""

    to: tuple[str, ...] = ()
    """Trackers that also get every metric: tensorboard, wandb, mlflow, trackio, and those of plugins."""
    project: str = option("rlcore", used_when="to != ()")
    """Name of the project in the trackers."""
    open_telemetry: bool = False
    """Send the spans of `train.record_trace` to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names."""


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run, one section per field."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy's starting point."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training prompts."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation of trajectories in training."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards, and the policy for failures."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """The algorithm."""
    actor: EngineConfig = field(default_factory=EngineConfig)
    """Training of the policy."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The frozen policy of the KL term."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Overlap of sampling, rewards and updates."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Devices, pools and processes of workers."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The run."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Contents and times of checkpoints."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Trackers in addition to metrics.jsonl."""
    plugins: dict[str, Any] = field(default_factory=dict)
    """Settings of the enabled plugins; a section enables its plugin."""

    @property
    def has_other_reference(self) -> bool:
        """True if `reference.path` names another model than `model.path`."""
        return self.reference.path not in ("", self.model.path)
