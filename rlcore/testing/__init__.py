"""The core's test kit for plugin authors: fakes and conformance checks.

`rlcore.testing.null` is a plugin with a torch-free policy, `ByteTokens` (model.tokenizer=bytes) a tokenizer without
files; `check_plugin` and `check_component` say what breaks a contract.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.conformance import Report, check_component, check_plugin
    from rlcore.testing.prompts import write_prompts

__all__ = ["Report", "check_component", "check_plugin", "write_prompts"]


def __getattr__(name: str) -> Any:
    # Late, because reward children import `rlcore.testing.letters` and need neither configuration nor plugins.
    if name in ("Report", "check_component", "check_plugin"):
        from rlcore.testing import conformance

        return getattr(conformance, name)
    if name == "write_prompts":
        from rlcore.testing.prompts import write_prompts

        return write_prompts
    raise AttributeError(f"module 'rlcore.testing' has no attribute '{name}'")
