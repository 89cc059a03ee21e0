"""Checks the settings that place a pool on nodes."""

import re
from collections.abc import Mapping
from typing import get_args, get_type_hints

from rlcore.config.sections import PoolConfig
from rlcore.errors.checks.data import is_finite

PLACEMENTS: tuple[str, ...] = get_args(get_type_hints(PoolConfig)["placement"])
RESERVED = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources that every cluster has: a pool's amount follows from its roles."""

_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_KEY = re.compile(rf"(?:[a-zA-Z0-9][a-zA-Z0-9_.-]{{0,252}}/)?{_NAME}")
_VALUE = re.compile(rf"!?{_NAME}|!?in\({_NAME}(?:, ?{_NAME})*\)")


def placement_problem(placement: object, labels: object, resources: object) -> str:
    """The first problem of these settings, in words that name the field; empty: none."""
    if placement not in PLACEMENTS:
        return f"placement is {placement!r:.80}; choose from: {', '.join(PLACEMENTS)}"
    return _labels_problem(labels) or _resources_problem(resources)


def _labels_problem(labels: object) -> str:
    if not isinstance(labels, Mapping):
        return f"labels is {labels!r:.80}; needs a mapping of label to value"
    for key, value in labels.items():
        if not (isinstance(key, str) and _KEY.fullmatch(key)):
            return f"labels has the key {key!r:.80}; needs a label of nodes, such as 'accelerator-type'"
        if not (isinstance(value, str) and _VALUE.fullmatch(value)):
            return f"labels['{key}'] is {value!r:.80}; needs a text such as 'H100', '!H100' or 'in(H100, H200)'"
    return ""


def _resources_problem(resources: object) -> str:
    if not isinstance(resources, Mapping):
        return f"resources is {resources!r:.80}; needs a mapping of custom resource to amount"
    for name, amount in resources.items():
        if not (isinstance(name, str) and name) or name in RESERVED:
            return f"resources has the key {name!r:.80}; needs the name of a custom resource"
        if not (is_finite(amount) and amount > 0):
            return f"resources['{name}'] is {amount!r:.80}; needs a number above 0"
        if amount > 1 and amount != int(amount):
            return f"resources['{name}'] is {amount:g}; above 1 it needs a whole number"
    return ""
