"""A worker, component or cluster reads its plugin's settings as their class, or says which it found."""

from dataclasses import dataclass

import pytest

from rlcore.contracts.plugin_settings import settings_as
from rlcore.errors import PluginError
from rlcore.testing.null import NullSection


@dataclass(frozen=True)
class Settings:
    devices: int = 2


@dataclass(frozen=True)
class More(Settings):
    more: int = 3


def test_settings_are_read_as_their_class_or_one_that_it_derives_from() -> None:
    assert settings_as("critic[0.0]", More(), Settings).devices == 2
    assert settings_as("critic[0.0]", More(), More).more == 3


@pytest.mark.parametrize(
    ("section", "found"),
    [
        (None, "no settings"),
        (NullSection(), "settings of class NullSection"),
        ({"devices": 2}, "settings of class dict"),
    ],
)
def test_settings_of_another_class_are_refused_in_one_line(section: object, found: str) -> None:
    with pytest.raises(PluginError) as caught:
        settings_as("critic[0.0]", section, Settings)
    needed = "needs Settings; offer ConfigSection(name, Settings)"
    assert str(caught.value) == f"critic[0.0]: found {found}; {needed}"
