"""The name of the cache of keys and values in calls of a transformers model."""

import inspect
from typing import Any

RENAMED = "cache"
"""The name since transformers 5.24, as argument and in outputs."""
EARLIER = "past_key_values"


def cache_name(model: Any) -> str:
    """The name of the cache in arguments and outputs of `model`, a model without its head.

    Models whose code is not part of transformers may keep the earlier name, so the model is asked.
    """
    return RENAMED if RENAMED in inspect.signature(model.forward).parameters else EARLIER
