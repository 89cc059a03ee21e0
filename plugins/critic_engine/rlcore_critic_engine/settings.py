"""The plugin's settings."""

from dataclasses import dataclass
from typing import Literal

from rlcore.config import EngineConfig
from rlcore.config.options import option


@dataclass(frozen=True)
class CriticSettings:
    """The critic and how it learns; `plugins.critic_engine`. Mini-batches and epochs are those of `actor`."""

    path: str = ""
    """Model directory or hub name to start from; empty: `model.path`."""
    backend: str = "hf"
    """How the critic's work is done."""
    lr: float = option(1e-5, at_least=0)
    max_grad_norm: float = option(1.0, above=0)
    weight_decay: float = option(0.0, at_least=0)
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    gradient_checkpointing: bool = False
    micro_batch_tokens: int = option(4096, at_least=1)
    """Tokens, padding included, of one forward and backward pass."""
    value_clip: float = option(0.2, at_least=0)
    """How far a value may move from that of the step's start before its loss stops counting; 0: no clip."""
    actor_starts_after: int = option(0, at_least=0)
    """Steps at the start in which only the critic learns."""

    def engine(self) -> EngineConfig:
        """The settings as the training engine takes them."""
        return EngineConfig(
            lr=self.lr,
            max_grad_norm=self.max_grad_norm,
            weight_decay=self.weight_decay,
            dtype=self.dtype,
            gradient_checkpointing=self.gradient_checkpointing,
            micro_batch_tokens=self.micro_batch_tokens,
        )
