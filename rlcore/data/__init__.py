"""Prompts: read from their sources, checked, and issued in a seeded order that a checkpoint can continue anywhere."""

from rlcore.data.order import PromptOrder
from rlcore.data.read_prompts import load_prompts
from rlcore.data.select import filter_long, refuse_overlap

__all__ = ["PromptOrder", "filter_long", "load_prompts", "refuse_overlap"]
