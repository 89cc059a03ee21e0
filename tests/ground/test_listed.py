"""A list of a plugin that cannot be read is refused in the plugin's name."""

import pytest

from rlcore.errors import PluginError
from rlcore.errors.checks.data import listed


class Broken(list):
    def __iter__(self):
        raise RuntimeError("no items")


def test_a_list_that_fails_while_it_is_read_names_the_plugin():
    with pytest.raises(PluginError, match=r"mine: hook\(\): RuntimeError: no items"):
        listed(Broken(["x"]), str, "mine: hook()")
