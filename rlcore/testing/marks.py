"""Marks of tests that need what is not installed everywhere; for pytest."""

from importlib.util import find_spec

import pytest


def needs(module: str, how: str) -> pytest.MarkDecorator:
    """Skips a test where `module` is not installed, and says how it gets there."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} cannot be imported: {how}")
