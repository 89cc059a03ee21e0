"""An rlcore plugin: rewards from services, judges and reward models, in addition to functions."""

from collections.abc import Sequence
from dataclasses import replace

from rlcore import (
    BuildContext,
    Component,
    ConfigSection,
    PoolSpec,
    RewardComponent,
    RewardManager,
    RewardReplica,
    Role,
    RunConfig,
    Scope,
    WorkerClass,
    WorkerRequest,
    hookimpl,
)
from rlcore.contracts.model_files import model_directory, model_shape, num_parameters
from rlcore.contracts.requests import ModelFacts
from rlcore.contracts.reward_models import RewardModel
from rlcore_reward_loop.checks import WHERE, check, check_scores
from rlcore_reward_loop.models.worker import HfReplica
from rlcore_reward_loop.settings import ModelSettings, RewardLoopSettings

NAME = "reward_loop"
MAIN_POOL = WorkerRequest.pool
BYTES = {"float32": 4.0, "bfloat16": 2.0}
"""Bytes per parameter of a model on transformers."""


def requests(config: RunConfig, section: RewardLoopSettings) -> Sequence[WorkerRequest]:
    """The replicas of every reward model, each model a role; they may die and are restarted."""
    check(config, section)
    found = []
    for name, model in section.models.items():
        request = WorkerRequest(
            Role(name, RewardReplica),
            model.backend,
            pool=model.pool,
            replicas=model.replicas,
            ranks=model.nodes,
            gpus=model.gpus / model.nodes if config.cluster.device == "cuda" else 0.0,
            cpus=model.cpus,
            threads=model.threads or config.cluster.threads,
            isolated=True,
            spec=reward_model(section, name),
            settings=f"{WHERE}.models.{name}",
            nodes_key="" if model.backend == "hf" else f"{WHERE}.models.{name}.nodes",
        )
        found.append(computed_here(request, model) if model.backend == "hf" else request)
    return found


def computed_here(request: WorkerRequest, model: ModelSettings) -> WorkerRequest:
    """The request with its ranks and, as far as the model's files are on this machine, facts for its memory."""
    directory, engine = model_directory(model.path), model.engine()
    facts = ModelFacts(num_parameters(directory), model_shape(directory))
    if model.data_parallel > 1:
        check_scores(model.path, directory, request.settings)
    return replace(
        request,
        ranks=model.data_parallel,
        engine=engine,
        trains=False,
        model=facts,
        shared_prefix="planned" if model.context_parallel > 1 else "none",
        bytes_per_parameter=BYTES[model.dtype] / engine.shard_ranks if facts.parameters else 0.0,
    )


def reward_model(section: RewardLoopSettings, name: str) -> RewardModel:
    """An entry of `models` in the form that its replicas receive."""
    model = section.models[name]
    return RewardModel(
        path=model.path,
        tokenizer=model.tokenizer,
        dtype=model.dtype,
        label=model.label,
        activation=model.activation,
        max_tokens=model.max_tokens,
        kinds=frozenset(reward.kind for reward in section.rewards.values() if reward.served_by == name),
        options=dict(model.options),
    )


def parts(config: RunConfig, section: RewardLoopSettings) -> Sequence[RewardComponent]:
    """Every reward of `plugins.reward_loop.rewards`."""
    found = []
    for name, reward in section.rewards.items():
        service = section.services.get(reward.served_by)
        deadline_s = service.deadline_s if service else section.models[reward.served_by].deadline_s
        where = ", ".join(service.urls) if service else reward.served_by
        scope = Scope(reward.scope)
        found.append(RewardComponent(name, reward.weight, scope, deadline_s, reward.kind, where, reward.on_failure))
    return found


def build(context: BuildContext) -> RewardManager:
    """The manager. Imported late: aiohttp takes a quarter of a second to import, and a plan does not need it."""
    from rlcore_reward_loop.manager import RewardLoop

    return RewardLoop(context)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection(NAME, RewardLoopSettings, {"reward.manager": NAME})]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component(NAME, build, requests, parts, uses_reward_functions=True)]


@hookimpl
def rlcore_resource_pools(config: RunConfig, requests: tuple[WorkerRequest, ...]) -> Sequence[PoolSpec]:
    """The pools of reward models; each is as large as its replicas need, unless `cluster.pools` sets its size."""
    pools = {request.pool for request in requests if request.role.interface is RewardReplica}
    return [PoolSpec(pool) for pool in sorted(pools - {MAIN_POOL})]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(RewardReplica, "hf", HfReplica, context_parallel=True),
    ]
