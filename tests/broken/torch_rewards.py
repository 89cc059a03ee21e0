"""A reward function whose module imports torch, or what goes by its name: the real one takes seconds."""

import sys
from types import ModuleType

sys.modules.setdefault("torch", ModuleType("torch"))


def heavy(completions, **columns):
    return [1.0 for _ in completions]
