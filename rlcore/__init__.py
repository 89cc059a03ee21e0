"""rlcore: a plugin-oriented RL trainer for language models.

The public names below are imported when they are first used, so that `import rlcore` is immediate.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and `lazy_names` does
    from rlcore.config import EngineConfig as EngineConfig
    from rlcore.config import LoadedConfig as LoadedConfig
    from rlcore.config import RunConfig as RunConfig
    from rlcore.config import load_config as load_config
    from rlcore.config import option as option
    from rlcore.config.providers import ConfigSection as ConfigSection
    from rlcore.contracts.actor import ACTOR as ACTOR
    from rlcore.contracts.actor import ActorWorker as ActorWorker
    from rlcore.contracts.agents import AgentLoop as AgentLoop
    from rlcore.contracts.agents import RolloutTask as RolloutTask
    from rlcore.contracts.children import Child as Child
    from rlcore.contracts.children import ChildPool as ChildPool
    from rlcore.contracts.children import Children as Children
    from rlcore.contracts.components import BuildContext as BuildContext
    from rlcore.contracts.components import Component as Component
    from rlcore.contracts.components import RewardComponent as RewardComponent
    from rlcore.contracts.critic import CriticEngine as CriticEngine
    from rlcore.contracts.critic import CriticWorker as CriticWorker
    from rlcore.contracts.hooks import hookimpl as hookimpl
    from rlcore.contracts.offers import Algorithm as Algorithm
    from rlcore.contracts.offers import AlgorithmKind as AlgorithmKind
    from rlcore.contracts.offers import Need as Need
    from rlcore.contracts.offers import PoolSpec as PoolSpec
    from rlcore.contracts.offers import RewardFunction as RewardFunction
    from rlcore.contracts.offers import Scope as Scope
    from rlcore.contracts.offers import WorkerClass as WorkerClass
    from rlcore.contracts.prompt_orders import PromptOrder as PromptOrder
    from rlcore.contracts.prompt_orders import PromptOrderOffer as PromptOrderOffer
    from rlcore.contracts.prompt_orders import RowResults as RowResults
    from rlcore.contracts.reference import REFERENCE as REFERENCE
    from rlcore.contracts.reference import ReferenceWorker as ReferenceWorker
    from rlcore.contracts.requests import Role as Role
    from rlcore.contracts.requests import WorkerRequest as WorkerRequest
    from rlcore.contracts.reward_manager import RewardManager as RewardManager
    from rlcore.contracts.reward_replica import RawScore as RawScore
    from rlcore.contracts.reward_replica import RewardReplica as RewardReplica
    from rlcore.contracts.reward_replica import ScoreRequest as ScoreRequest
    from rlcore.contracts.rollout import ROLLOUT as ROLLOUT
    from rlcore.contracts.rollout import Generator as Generator
    from rlcore.contracts.rollout import RolloutWorker as RolloutWorker
    from rlcore.contracts.sampled_row import SampledRow as SampledRow
    from rlcore.contracts.scorer import Outcome as Outcome
    from rlcore.contracts.scorer import Scorer as Scorer
    from rlcore.contracts.tokens import Tokens as Tokens
    from rlcore.contracts.tracking import Tracker as Tracker
    from rlcore.contracts.tracking import TrackerOffer as TrackerOffer
    from rlcore.contracts.workers import ReplicaEvent as ReplicaEvent
    from rlcore.contracts.workers import ReplicaHandle as ReplicaHandle
    from rlcore.contracts.workers import Worker as Worker
    from rlcore.contracts.workers import WorkerContext as WorkerContext
    from rlcore.contracts.workers import WorkerGroup as WorkerGroup
    from rlcore.data.batch import collate as collate
    from rlcore.data.tokenizer import load_tokens as load_tokens
    from rlcore.engines.hf import TrainEngine as TrainEngine
    from rlcore.errors import CheckpointError as CheckpointError
    from rlcore.errors import ConfigError as ConfigError
    from rlcore.errors import PlanError as PlanError
    from rlcore.errors import PluginError as PluginError
    from rlcore.errors import RewardError as RewardError
    from rlcore.errors import RlcoreError as RlcoreError
    from rlcore.errors import WorkerError as WorkerError
    from rlcore.plan import RunPlan as RunPlan
    from rlcore.plugins.planning import plan_run as plan_run
    from rlcore.reward.functions import FunctionRewards as FunctionRewards
    from rlcore.reward.functions import GroupFunction as GroupFunction
    from rlcore.train import TrainResult as TrainResult
    from rlcore.train import train as train
    from rlcore.train.api import Evaluation as Evaluation
    from rlcore.train.api import evaluate as evaluate
    from rlcore.train.api import export as export
    from rlcore.train.api import plan as plan
    from rlcore.train.api import resume as resume
    from rlcore.types import Batch as Batch
    from rlcore.types import Completion as Completion
    from rlcore.types import FinishReason as FinishReason
    from rlcore.types import FrozenDict as FrozenDict
    from rlcore.types import GenerateRequest as GenerateRequest
    from rlcore.types import Lane as Lane
    from rlcore.types import Message as Message
    from rlcore.types import Metrics as Metrics
    from rlcore.types import Prompt as Prompt
    from rlcore.types import Reward as Reward
    from rlcore.types import RewardStatus as RewardStatus
    from rlcore.types import Sampling as Sampling
    from rlcore.types import ScoredTrajectory as ScoredTrajectory
    from rlcore.types import Trajectory as Trajectory
    from rlcore.types import TrajectoryId as TrajectoryId
    from rlcore.types import WeightsHandle as WeightsHandle

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    from rlcore.imports import lazy_names  # at first use: `import rlcore` imports nothing else

    return lazy_names(__name__, __file__)[0](name)


def __dir__() -> list[str]:
    from rlcore.imports import lazy_names

    return lazy_names(__name__, __file__)[1]()


class _Package(ModuleType):
    """Keeps `rlcore.train` and `rlcore.plan` the functions: importing packages of these names would bind those."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in ("train", "plan") and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
