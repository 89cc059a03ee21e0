"""The vLLM backend: rollout replicas with a copy of the weights of their own. Importing this imports no vllm."""

from rlcore.engines.vllm.worker import VllmRollout

__all__ = ["VllmRollout"]
