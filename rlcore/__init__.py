"""rlcore: a plugin-oriented RL trainer for language models.

The public names below are imported when they are first used, so that `import rlcore` is immediate.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.actor import ACTOR, ActorWorker
    from rlcore.agents import AgentLoop, RolloutTask
    from rlcore.backends.hf import TrainEngine
    from rlcore.config import EngineConfig, LoadedConfig, RunConfig, load_config, option
    from rlcore.critic import CriticEngine, CriticWorker
    from rlcore.errors import (
        CheckpointError,
        ConfigError,
        PlanError,
        PluginError,
        RewardError,
        RlcoreError,
        WorkerError,
    )
    from rlcore.hookspecs import hookimpl
    from rlcore.launch import plan_run
    from rlcore.plan import (
        Algorithm,
        AlgorithmKind,
        BuildContext,
        Component,
        ConfigSection,
        Need,
        PoolSpec,
        RewardFunction,
        RewardPart,
        Role,
        RunPlan,
        Scope,
        WorkerClass,
        WorkerRequest,
    )
    from rlcore.reference import REFERENCE, ReferenceWorker
    from rlcore.reward import RawScore, RewardManager, RewardReplica, ScoreRequest
    from rlcore.rollout import ROLLOUT, Generator, RolloutWorker
    from rlcore.tokens import Tokens
    from rlcore.train import TrainResult, train
    from rlcore.types import (
        Batch,
        Completion,
        Finish,
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
        Scored,
        Trajectory,
        TrajectoryId,
        WeightsHandle,
    )
    from rlcore.workers import Child, Children, ReplicaEvent, ReplicaHandle, Worker, WorkerContext, WorkerGroup

__version__ = "0.1.0"

_MODULES = {
    "rlcore.actor": (
        "ACTOR",
        "ActorWorker",
    ),
    "rlcore.agents": (
        "AgentLoop",
        "RolloutTask",
    ),
    "rlcore.backends.hf": ("TrainEngine",),
    "rlcore.config": (
        "EngineConfig",
        "LoadedConfig",
        "RunConfig",
        "load_config",
        "option",
    ),
    "rlcore.critic": (
        "CriticEngine",
        "CriticWorker",
    ),
    "rlcore.errors": (
        "CheckpointError",
        "ConfigError",
        "PlanError",
        "PluginError",
        "RewardError",
        "RlcoreError",
        "WorkerError",
    ),
    "rlcore.hookspecs": ("hookimpl",),
    "rlcore.launch": ("plan_run",),
    "rlcore.plan": (
        "Algorithm",
        "AlgorithmKind",
        "BuildContext",
        "Component",
        "ConfigSection",
        "Need",
        "PoolSpec",
        "RewardFunction",
        "RewardPart",
        "Role",
        "RunPlan",
        "Scope",
        "WorkerClass",
        "WorkerRequest",
    ),
    "rlcore.reference": (
        "REFERENCE",
        "ReferenceWorker",
    ),
    "rlcore.reward": (
        "RawScore",
        "RewardManager",
        "RewardReplica",
        "ScoreRequest",
    ),
    "rlcore.rollout": (
        "ROLLOUT",
        "Generator",
        "RolloutWorker",
    ),
    "rlcore.tokens": ("Tokens",),
    "rlcore.train": (
        "TrainResult",
        "train",
    ),
    "rlcore.types": (
        "Batch",
        "Completion",
        "Finish",
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
        "Scored",
        "Trajectory",
        "TrajectoryId",
        "WeightsHandle",
    ),
    "rlcore.workers": (
        "Child",
        "Children",
        "ReplicaEvent",
        "ReplicaHandle",
        "Worker",
        "WorkerContext",
        "WorkerGroup",
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
    "Finish",
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
    "RewardError",
    "RewardFunction",
    "RewardManager",
    "RewardPart",
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
    "Scored",
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
