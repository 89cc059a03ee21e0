"""Pytest marks for tests that need optional packages."""

from importlib.util import find_spec

import pytest


def needs(module: str, how: str) -> pytest.MarkDecorator:
    """Skips a test if `module` is not installed; the reason is the command that installs it."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} cannot be imported: {how}")
