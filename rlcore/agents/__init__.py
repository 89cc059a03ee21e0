"""Agent loops: the slot's interface and the core's own single-turn loop."""

from rlcore.agents.loop import AgentLoop, RolloutTask

__all__ = ["AgentLoop", "RolloutTask"]
