"""An rlcore plugin: rollout replicas, reward models and judges on vLLM. Importing it does not import vllm."""

from collections.abc import Sequence

from rlcore import ConfigSection, RewardReplica, RolloutWorker, WorkerClass, hookimpl
from rlcore_vllm.replica import VllmReplica
from rlcore_vllm.replica_resources import complete_replica
from rlcore_vllm.resources import complete_rollout
from rlcore_vllm.rollout import VllmRollout
from rlcore_vllm.settings import VllmSettings

NAME = "vllm"


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection(NAME, VllmSettings)]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(
            RolloutWorker,
            NAME,
            VllmRollout,
            isolated=True,
            complete=complete_rollout,
            keeps_cache=True,
            weight_sync=frozenset({"disk", "ipc", "nccl", "shm", "tcp"}),
        ),
        WorkerClass(RewardReplica, NAME, VllmReplica, isolated=True, complete=complete_replica),
    ]
