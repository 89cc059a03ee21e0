"""rlcore: a plugin-oriented RL trainer for language models."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
