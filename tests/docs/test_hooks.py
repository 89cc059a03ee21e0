"""docs/hooks.md has every hook, with the signature of the code."""

import inspect
import re
from pathlib import Path

import pytest

from rlcore.contracts import hooks as hookspecs
from rlcore.contracts.hooks import HOOK_NAMES
from rlcore.plugins import builtin

ROOT = Path(__file__).parents[2]


def documented() -> dict[str, str]:
    """The signature of each hook in docs/hooks.md."""
    text = (ROOT / "docs" / "hooks.md").read_text("utf-8")
    blocks = re.findall(r"^### (rlcore_\w+)\n\n```python\n(def .+)\n```\n", text, re.MULTILINE)
    return dict(blocks)


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_is_documented_with_its_signature_and_implemented_by_the_core(hook: str) -> None:
    function = getattr(hookspecs, hook)
    parameters = [
        f"{name}: {parameter.annotation}" for name, parameter in inspect.signature(function).parameters.items()
    ]
    returned = inspect.signature(function).return_annotation
    assert documented()[hook] == f"def {hook}({', '.join(parameters)}) -> {returned}"
    assert function.__doc__
    assert hasattr(getattr(builtin, hook), "rlcore_impl")


@pytest.mark.slow
def test_no_hook_is_documented_that_does_not_exist_and_none_is_more_than_a_declaration() -> None:
    assert sorted(documented()) == sorted(HOOK_NAMES)
    for hook in HOOK_NAMES:
        options = vars(getattr(hookspecs, hook))["rlcore_spec"]
        assert not options["firstresult"]
        assert not options["historic"]
