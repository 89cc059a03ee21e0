"""The typed configuration. Importing this package imports neither OmegaConf nor YAML, which only loading needs."""

from typing import TYPE_CHECKING

from rlcore.imports import lazy_names

if TYPE_CHECKING:  # the one list of public names: type checkers read it, and `lazy_names` does
    from rlcore.config.engines import EngineConfig as EngineConfig
    from rlcore.config.engines import LoraConfig as LoraConfig
    from rlcore.config.engines import RolloutConfig as RolloutConfig
    from rlcore.config.load import LoadedConfig as LoadedConfig
    from rlcore.config.load import enabled_plugins as enabled_plugins
    from rlcore.config.load import load_config as load_config
    from rlcore.config.names import default_run_name as default_run_name
    from rlcore.config.names import run_directory as run_directory
    from rlcore.config.objective import AlgoConfig as AlgoConfig
    from rlcore.config.objective import ImportanceConfig as ImportanceConfig
    from rlcore.config.objective import KlConfig as KlConfig
    from rlcore.config.objective import RewardConfig as RewardConfig
    from rlcore.config.objective import RewardFunctionConfig as RewardFunctionConfig
    from rlcore.config.options import option as option
    from rlcore.config.sections import CheckpointConfig as CheckpointConfig
    from rlcore.config.sections import ClusterConfig as ClusterConfig
    from rlcore.config.sections import CriticConfig as CriticConfig
    from rlcore.config.sections import DataConfig as DataConfig
    from rlcore.config.sections import EvalConfig as EvalConfig
    from rlcore.config.sections import ModelConfig as ModelConfig
    from rlcore.config.sections import PoolConfig as PoolConfig
    from rlcore.config.sections import ReferenceConfig as ReferenceConfig
    from rlcore.config.sections import RunConfig as RunConfig
    from rlcore.config.sections import ScheduleConfig as ScheduleConfig
    from rlcore.config.sections import SourceConfig as SourceConfig
    from rlcore.config.sections import TrackConfig as TrackConfig
    from rlcore.config.sections import TrainConfig as TrainConfig


__getattr__, __dir__ = lazy_names(__name__, __file__)
