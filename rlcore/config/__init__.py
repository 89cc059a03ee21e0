"""The typed configuration."""

from rlcore.config.engines import EngineConfig, LoraConfig, RolloutConfig
from rlcore.config.load import LoadedConfig, enabled_plugins, load_config
from rlcore.config.names import default_run_name, run_directory
from rlcore.config.objective import AlgoConfig, ImportanceConfig, KlConfig, RewardConfig, RewardFunctionConfig
from rlcore.config.options import option
from rlcore.config.sections import (
    CheckpointConfig,
    ClusterConfig,
    CriticConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    PoolConfig,
    ReferenceConfig,
    RunConfig,
    ScheduleConfig,
    SourceConfig,
    TrackConfig,
    TrainConfig,
)

__all__ = [
    "AlgoConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "ImportanceConfig",
    "KlConfig",
    "LoadedConfig",
    "LoraConfig",
    "ModelConfig",
    "PoolConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrackConfig",
    "TrainConfig",
    "default_run_name",
    "enabled_plugins",
    "load_config",
    "option",
    "run_directory",
]
