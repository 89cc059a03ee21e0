"""The core's offers, through the same hooks as those of plugins."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore import __version__
from rlcore.agents.single_turn import build_single_turn
from rlcore.algo.core_offers import OFFERS as ALGORITHMS
from rlcore.cluster.local import LocalCluster
from rlcore.config import RunConfig
from rlcore.config.providers import ConfigSection, Provider
from rlcore.config.schema import hints_of
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.agents import AgentLoop
from rlcore.contracts.clusters import ClusterAbilities, ClusterOffer
from rlcore.contracts.components import Component
from rlcore.contracts.critic import CriticEngine, NoCritic
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.model_files import model_directory, model_shape, num_parameters
from rlcore.contracts.offers import Algorithm, PoolSpec, RewardFunction, WorkerClass
from rlcore.contracts.prompt_orders import PromptOrderOffer
from rlcore.contracts.reference import REFERENCE, ReferenceWorker
from rlcore.contracts.requests import ModelFacts, WorkerRequest
from rlcore.contracts.reward_manager import RewardManager
from rlcore.contracts.rollout import ROLLOUT, RolloutWorker
from rlcore.contracts.tracking import TrackerOffer
from rlcore.data.order import SEEDED
from rlcore.engines.hf.resources import complete_actor, complete_embedded, complete_reference
from rlcore.engines.hf.worker import HfActor, HfReference, HfRollout
from rlcore.plan import CORE
from rlcore.plan.activations import BYTES
from rlcore.plan.memory import training_bytes_per_parameter
from rlcore.report.core_trackers import OFFERS as TRACKERS
from rlcore.reward.functions import build_function_rewards

PROVIDER = Provider(CORE, "rlcore", __version__)
MAIN_POOL = WorkerRequest.pool
SCORERS = ("exact_match", "boxed", "gsm8k", "math_verify", "reasoning_gym", "format_match", "length_penalty")


def core_requests(config: RunConfig, references: Mapping[str, str]) -> Sequence[WorkerRequest]:
    """The core's requests: actor, rollout and, with a KL term, the reference policy.

    `references`: the chosen functions of `algo` by purpose; the actor's request carries them.
    """
    gpus = 1.0 if config.cluster.device == "cuda" else 0.0
    common: dict[str, Any] = {"gpus": gpus, "threads": config.cluster.threads}
    pool = config.cluster.train_pool
    requests = [
        WorkerRequest(
            ACTOR,
            config.actor.backend,
            targets=dict(references),
            bytes_per_parameter=training_bytes_per_parameter(config.actor),
            engine=config.actor,
            shared_prefix=config.actor.shared_prefix,
            ranks=config.actor.data_parallel,
            pool=pool,
            **common,
        ),
        WorkerRequest(
            ROLLOUT,
            config.rollout.backend,
            config.rollout.pool or MAIN_POOL,
            replicas=config.rollout.replicas,
            **common,
        ),
    ]
    if config.algo.kl.placement != "none":
        directory = model_directory(config.reference.path)
        model = ModelFacts(num_parameters(directory), model_shape(directory)) if config.has_other_reference else None
        known = model is None or model.parameters is not None
        reference = WorkerRequest(
            REFERENCE,
            config.reference.backend,
            bytes_per_parameter=float(BYTES[config.actor.dtype]) if known else 0.0,
            model=model,
            settings=ACTOR.name,
            shared_prefix=config.actor.shared_prefix,
            pool=pool,
            **common,
        )
        requests.append(reference)
    return requests


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection(name, section) for name, section in hints_of(RunConfig).items() if name != "plugins"]


@hookimpl
def rlcore_reward_functions() -> Sequence[RewardFunction]:
    return [RewardFunction(name, f"rlcore.reward.scorers:{name}") for name in SCORERS]


@hookimpl
def rlcore_reward_managers() -> Sequence[Component[RewardManager]]:
    return [Component("functions", build_function_rewards, uses_reward_functions=True)]


@hookimpl
def rlcore_critic_engines() -> Sequence[Component[CriticEngine]]:
    return [Component("none", lambda context: NoCritic())]


@hookimpl
def rlcore_agent_loops() -> Sequence[Component[AgentLoop]]:
    return [Component("single_turn", build_single_turn)]


@hookimpl
def rlcore_algorithms() -> Sequence[Algorithm]:
    return ALGORITHMS


@hookimpl
def rlcore_clusters() -> Sequence[ClusterOffer]:
    return [ClusterOffer("local", LocalCluster, lambda config, section: ClusterAbilities(starts_together=True))]


@hookimpl
def rlcore_trackers() -> Sequence[TrackerOffer]:
    return TRACKERS


@hookimpl
def rlcore_prompt_orders() -> Sequence[PromptOrderOffer]:
    return [SEEDED]


@hookimpl
def rlcore_resource_pools(config: RunConfig, requests: tuple[WorkerRequest, ...]) -> Sequence[PoolSpec]:
    """The main pool, and the pool of rollout replicas: `rollout`, or the one that `rollout.pool` names.

    Pools are as large as their roles need, unless `cluster.pools` sets a size. An offer that states another pool for
    its class offers that pool itself.
    """
    ours = {MAIN_POOL, ROLLOUT.name, config.rollout.pool}
    pools = {request.pool for request in requests if request.pool == MAIN_POOL or request.role == ROLLOUT}
    return [PoolSpec(pool) for pool in sorted(pools & ours)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(ActorWorker, "hf", HfActor, complete=complete_actor, context_parallel=True),
        WorkerClass(
            ReferenceWorker,
            "hf",
            HfReference,
            on_every_rank=True,
            complete=complete_reference,
            context_parallel=True,
        ),
        WorkerClass(
            RolloutWorker,
            "hf",
            HfRollout,
            embedded_in=ACTOR,
            on_every_rank=True,
            complete=complete_embedded,
            keeps_cache=True,
        ),
    ]
