"""The tensors in a model's files, compared with those that the model has."""

import re
from collections.abc import Mapping
from typing import Any

from rlcore.errors import ConfigError

_BUFFERS = r"(^|\.)(inv_freq|position_ids|masked_bias|attn\.bias)$"
BUFFER = re.compile(_BUFFERS)
"""Tensors in files of older releases that models now compute themselves."""
OTHER_HEAD = re.compile(rf"{_BUFFERS}|^(lm_head|embed_out|score|classifier|summary|v_head|value_head)\.")
"""The same, and the layers that a value model replaces by its own."""


def check_tensors(where: str, model: str, loaded: Mapping[str, Any], *, new_head: bool) -> None:
    """ConfigError unless the files hold exactly the model's tensors; tied ones may be stored once or twice.

    `loaded`: transformers' loading info, including mismatched shapes if these were ignored. Known buffers are ignored
    and, with `new_head`, the saved head.
    """
    for name, found, needed in sorted(loaded.get("mismatched_keys", ())):
        raise ConfigError(
            f"{where}: its files hold '{name}' with the shape {list(found)}, and the {model} of its config.json has "
            f"{list(needed)}; needs files that belong to its config.json"
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ConfigError(
            f"{where}: its files lack {len(missing)} of the weights of a {model}, {missing[0]} among them; needs a "
            "model that was saved whole"
        )
    passed_over = OTHER_HEAD if new_head else BUFFER
    unexpected = sorted(name for name in loaded["unexpected_keys"] if not passed_over.search(name))
    if unexpected:
        named = ", ".join(unexpected[:3]) + (", ..." if len(unexpected) > 3 else "")
        raise ConfigError(
            f"{where}: its files hold {len(unexpected)} tensors that a {model} does not have: {named}; needs files "
            "that belong to its config.json"
        )
