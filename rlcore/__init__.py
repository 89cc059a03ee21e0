"""rlcore: a plugin-oriented RL trainer for language models.

The public names below are imported when they are first used, so that `import rlcore` is immediate.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.config import EngineConfig, LoadedConfig, RunConfig, load_config, option
    from rlcore.config.offers import ConfigSection
    from rlcore.contracts.actor import ACTOR, ActorWorker
    from rlcore.contracts.agents import AgentLoop, RolloutTask
    from rlcore.contracts.components import BuildContext, Component, RewardComponent
    from rlcore.contracts.critic import CriticEngine, CriticWorker
    from rlcore.contracts.hooks import hookimpl
    from rlcore.contracts.offers import Algorithm, AlgorithmKind, Need, PoolSpec, RewardFunction, Scope, WorkerClass
    from rlcore.contracts.reference import REFERENCE, ReferenceWorker
    from rlcore.contracts.requests import Role, WorkerRequest
    from rlcore.contracts.reward_manager import RewardManager
    from rlcore.contracts.reward_replica import RawScore, RewardReplica, ScoreRequest
    from rlcore.contracts.rollout import ROLLOUT, Generator, RolloutWorker
    from rlcore.contracts.tokens import Tokens
    from rlcore.contracts.workers import (
        Child,
        Children,
        ReplicaEvent,
        ReplicaHandle,
        Worker,
        WorkerContext,
        WorkerGroup,
    )
    from rlcore.data.tokens import load_tokens
    from rlcore.engines.hf import TrainEngine
    from rlcore.errors import (
        CheckpointError,
        ConfigError,
        PlanError,
        PluginError,
        RewardError,
        RlcoreError,
        WorkerError,
    )
    from rlcore.plan import RunPlan
    from rlcore.plugins.planning import plan_run
    from rlcore.train import TrainResult, train
    from rlcore.types import (
        Batch,
        Completion,
        FinishReason,
        FrozenDict,
        GenerateRequest,
        Lane,
        Message,
        Metrics,
        Prompt,
        Ref,
        Reward,
        RewardStatus,
        Sampling,
        ScoredTrajectory,
        Trajectory,
        TrajectoryId,
        WeightsHandle,
    )

__version__ = "0.1.0"

_MODULES = {
    "rlcore.config": ("EngineConfig", "LoadedConfig", "RunConfig", "load_config", "option"),
    "rlcore.config.offers": ("ConfigSection",),
    "rlcore.contracts.actor": ("ACTOR", "ActorWorker"),
    "rlcore.contracts.agents": ("AgentLoop", "RolloutTask"),
    "rlcore.contracts.components": ("BuildContext", "Component", "RewardComponent"),
    "rlcore.contracts.critic": ("CriticEngine", "CriticWorker"),
    "rlcore.contracts.hooks": ("hookimpl",),
    "rlcore.contracts.offers": (
        "Algorithm",
        "AlgorithmKind",
        "Need",
        "PoolSpec",
        "RewardFunction",
        "Scope",
        "WorkerClass",
    ),
    "rlcore.contracts.reference": ("REFERENCE", "ReferenceWorker"),
    "rlcore.contracts.requests": ("Role", "WorkerRequest"),
    "rlcore.contracts.reward_manager": ("RewardManager",),
    "rlcore.contracts.reward_replica": ("RawScore", "RewardReplica", "ScoreRequest"),
    "rlcore.contracts.rollout": ("Generator", "ROLLOUT", "RolloutWorker"),
    "rlcore.contracts.tokens": ("Tokens",),
    "rlcore.contracts.workers": (
        "Child",
        "Children",
        "ReplicaEvent",
        "ReplicaHandle",
        "Worker",
        "WorkerContext",
        "WorkerGroup",
    ),
    "rlcore.data.tokens": ("load_tokens",),
    "rlcore.engines.hf": ("TrainEngine",),
    "rlcore.errors": (
        "CheckpointError",
        "ConfigError",
        "PlanError",
        "PluginError",
        "RewardError",
        "RlcoreError",
        "WorkerError",
    ),
    "rlcore.plan": ("RunPlan",),
    "rlcore.plugins.planning": ("plan_run",),
    "rlcore.train": ("TrainResult", "train"),
    "rlcore.types": (
        "Batch",
        "Completion",
        "FinishReason",
        "FrozenDict",
        "GenerateRequest",
        "Lane",
        "Message",
        "Metrics",
        "Prompt",
        "Ref",
        "Reward",
        "RewardStatus",
        "Sampling",
        "ScoredTrajectory",
        "Trajectory",
        "TrajectoryId",
        "WeightsHandle",
    ),
}
"""Where each public name lives."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ACTOR",
    "REFERENCE",
    "ROLLOUT",
    "ActorWorker",
    "AgentLoop",
    "Algorithm",
    "AlgorithmKind",
    "Batch",
    "BuildContext",
    "CheckpointError",
    "Child",
    "Children",
    "Completion",
    "Component",
    "ConfigError",
    "ConfigSection",
    "CriticEngine",
    "CriticWorker",
    "EngineConfig",
    "FinishReason",
    "FrozenDict",
    "GenerateRequest",
    "Generator",
    "Lane",
    "LoadedConfig",
    "Message",
    "Metrics",
    "Need",
    "PlanError",
    "PluginError",
    "PoolSpec",
    "Prompt",
    "RawScore",
    "Ref",
    "ReferenceWorker",
    "ReplicaEvent",
    "ReplicaHandle",
    "Reward",
    "RewardComponent",
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "RewardReplica",
    "RewardStatus",
    "RlcoreError",
    "Role",
    "RolloutTask",
    "RolloutWorker",
    "RunConfig",
    "RunPlan",
    "Sampling",
    "Scope",
    "ScoreRequest",
    "ScoredTrajectory",
    "Tokens",
    "TrainEngine",
    "TrainResult",
    "Trajectory",
    "TrajectoryId",
    "WeightsHandle",
    "Worker",
    "WorkerClass",
    "WorkerContext",
    "WorkerError",
    "WorkerGroup",
    "WorkerRequest",
    "hookimpl",
    "load_config",
    "load_tokens",
    "option",
    "plan_run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlcore' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


class _Package(ModuleType):
    """Keeps `rlcore.train` the function: importing the package of that name would bind the package over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
