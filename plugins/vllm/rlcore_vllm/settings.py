"""The plugin's settings, `plugins.vllm`: rollout replicas on vLLM. Reward models have theirs where they are defined."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.config import option

SAMPLES = "rollout.backend == 'vllm'"


@dataclass(frozen=True)
class VllmSettings:
    """Rollout replicas on vLLM, each an engine with a copy of the weights."""

    dtype: Literal["actor", "float32", "bfloat16", "float16"] = option("actor", used_when=SAMPLES)
    """Number format of weights and activations; actor: `actor.dtype`."""
    tensor_parallel: int = option(1, used_when=SAMPLES, at_least=1)
    """Devices that share one replica's weights."""
    nodes: int = option(1, used_when=SAMPLES, at_least=1)
    """Nodes over which the devices of a replica are spread evenly, for a model that needs more than one. The sums after
    each layer then cross the network."""
    max_model_len: int = option(0, used_when=SAMPLES, at_least=0)
    """Most tokens of prompt and response together. 0: what the model allows; on a GPU, what prompts and responses of a
    run with single_turn can have, if less. A smaller value takes less memory, and on a CPU, where a prompt is computed
    in one piece, less time to warm up a compiled model."""
    kv_cache_gib: float = option(1.0, used_when="cluster.device == 'cpu'", above=0)
    """Host memory for a replica's KV cache; must fit one sequence of `max_model_len`."""
    gpu_memory_frac: float = option(0.9, used_when="cluster.device == 'cuda'", above=0, at_most=1)
    """Share of its devices' memory that a replica takes, weights included."""
    enforce_eager: bool = option(False, used_when=SAMPLES)
    """Skip compilation: the engine starts in seconds instead of minutes but decodes more slowly."""
    lora: Literal["merged", "adapter"] = option("merged", used_when="actor.lora.enabled == True")
    """The weights that a LoRA actor hands over. merged: all weights, with the adapter added; adapter: only the adapter,
    a few per cent of the bytes, which vLLM applies at each layer, at some cost per token."""
    options: dict[str, Any] = field(default_factory=dict, metadata={"used_when": SAMPLES})
    """Further arguments of vLLM's AsyncEngineArgs."""
