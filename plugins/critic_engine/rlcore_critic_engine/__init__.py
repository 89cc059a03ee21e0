"""An rlcore plugin: a value model on the core's training engine."""

from collections.abc import Sequence

from rlcore import ConfigSection
from rlcore.config import RunConfig
from rlcore.contracts.actor import ACTOR
from rlcore.contracts.components import BuildContext, Component
from rlcore.contracts.critic import CriticEngine, CriticWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.model_files import model_directory, model_shape, num_parameters
from rlcore.contracts.offers import PoolSpec, WorkerClass
from rlcore.contracts.requests import ModelFacts, WorkerRequest
from rlcore.contracts.stored_formats import check_planned
from rlcore.errors import ConfigError
from rlcore_critic_engine.critic import CRITIC, ValueCritic
from rlcore_critic_engine.heads import starting_head
from rlcore_critic_engine.settings import SECTION, CriticSettings
from rlcore_critic_engine.worker import HfCritic

BYTES_PER_PARAMETER = {"float64": 32.0, "float32": 16.0, "bfloat16": 20.0, "float16": 20.0}
"""Bytes per parameter of weights, gradients and Adam's moments; half-precision weights add float32 masters."""
BYTES_OF_WEIGHTS = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
HALF = ("bfloat16", "float16")
POOL = CRITIC.name
"""The pool of a critic with separate devices."""


def requests(config: RunConfig, section: CriticSettings) -> Sequence[WorkerRequest]:
    """One replica: in the actor's pool, in a separate pool, or inside the actor; ConfigError if settings conflict."""
    _check(config, section)
    table = BYTES_OF_WEIGHTS if section.lora.enabled else BYTES_PER_PARAMETER
    on_actor = section.trunk == "actor"
    model = None if on_actor or section.path in ("", config.model.path) else _model(section)
    is_known = model is None or model.parameters is not None
    head = starting_head(config.model, section)
    engine = section.engine(config.actor)
    rounded = f"; dtype={engine.dtype}: rounding={engine.rounding} of its float32 masters" if engine.is_half else ""
    return [
        WorkerRequest(
            CRITIC,
            section.backend,
            pool=POOL if section.own_pool else config.cluster.train_pool,
            ranks=section.data_parallel,
            gpus=1.0 if config.cluster.device == "cuda" and not on_actor else 0.0,
            threads=config.cluster.threads,
            embedded_in=ACTOR if on_actor else None,
            targets={"value_loss": "rlcore_critic_engine.loss:ValueLoss"},
            engine=engine,
            model=model,
            settings=SECTION,
            shared_prefix=section.shared_prefix,
            note=f"the value head starts from: {head.text}{rounded}",
            bytes_per_parameter=table[section.dtype] / _shards(section) if is_known and not on_actor else 0.0,
        )
    ]


def _shards(section: CriticSettings) -> int:
    """Ranks over which weights, gradients and optimizer state are sharded."""
    return 1 if section.sharding == "none" else section.data_parallel


def _model(section: CriticSettings) -> ModelFacts:
    """Facts from the files of the critic's model, if they are on this machine (a hub model's: in the cache).

    ConfigError if it is quantised.
    """
    check_planned(f"{SECTION}.path", section.path, section.revision)
    directory = model_directory(section.path, section.revision)
    return ModelFacts(num_parameters(directory), model_shape(directory))


def _check(config: RunConfig, section: CriticSettings) -> None:
    if section.head == "saved" and not section.path:
        raise ConfigError(
            "plugins.critic_engine.head=saved: plugins.critic_engine.path is empty; needs the directory of a saved "
            "critic, such as runs/NAME/checkpoints/step_N/critic/model, or head=new"
        )
    if section.trunk == "actor" and section.own_pool:
        raise ConfigError(
            "plugins.critic_engine.own_pool=true: the critic lives inside the actor (trunk=actor) and shares its "
            "devices; set own_pool=false or trunk=own"
        )
    if section.trunk == "actor" and config.actor.sharding != "none":
        raise ConfigError(
            f"plugins.critic_engine.trunk=actor: actor.sharding={config.actor.sharding} gives each rank a part of the "
            "policy's weights, and the critic reads whole ones; set trunk=own (with separate ranks and sharding) or "
            "actor.sharding=none"
        )
    if section.trunk == "actor" and section.head == "classifier":
        raise ConfigError(
            "plugins.critic_engine.head=classifier: the critic lives inside the actor (trunk=actor), and a head reads "
            "the hidden states of the classifier that it is saved with; set trunk=own, or head=new"
        )
    if section.trunk == "actor" and section.path and starting_head(config.model, section).kind == "new":
        raise ConfigError(
            f"plugins.critic_engine.path='{section.path}' has no effect: with trunk=actor and a new head nothing is "
            "read from it; leave it out, or set head=saved or trunk=own"
        )
    checkpoints = section.engine(config.actor).gradient_checkpointing
    if section.trunk == "actor" and section.shared_prefix == "cache" and checkpoints:
        raise ConfigError(
            "plugins.critic_engine.shared_prefix=cache: the critic lives inside the actor (trunk=actor), and with "
            "actor.gradient_checkpointing=true transformers drops the cache; choose tree or none, or trunk=own"
        )
    if config.model.attention == "flash_attention_2" and section.trunk == "own" and section.dtype not in HALF:
        raise ConfigError(
            f"plugins.critic_engine.dtype={section.dtype}: model.attention=flash_attention_2 is the critic's attention "
            "too and needs bfloat16 or float16; set plugins.critic_engine.dtype=bfloat16, or model.attention=sdpa or "
            "eager"
        )


def build(context: BuildContext) -> CriticEngine:
    return ValueCritic(context.workers(CRITIC), context.settings(CriticSettings))


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("critic_engine", CriticSettings, {"critic.engine": "critic_engine"})]


@hookimpl
def rlcore_critic_engines() -> Sequence[Component[CriticEngine]]:
    return [Component("critic_engine", build, requests)]


@hookimpl
def rlcore_resource_pools(config: RunConfig, requests: tuple[WorkerRequest, ...]) -> Sequence[PoolSpec]:
    """The critic's own pool, if requested; the request gives its size."""
    own = any(request.role == CRITIC and request.pool == POOL for request in requests)
    return [PoolSpec(POOL)] if own else []


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(CriticWorker, "hf", HfCritic, on_every_rank=True, context_parallel=True)]
