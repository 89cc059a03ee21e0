"""Metadata of other distributions that is damaged: it ends no command that does not need it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.errors import PluginError
from rlcore.plugins import installed
from rlcore.testing.packages import importable


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


def write_metadata(site: Path, entry_points: bytes, metadata: str = "Name: odd\nVersion: 1.0\n") -> None:
    directory = site / "odd-1.0.dist-info"
    directory.mkdir()
    (directory / "entry_points.txt").write_bytes(entry_points)
    (directory / "METADATA").write_text(metadata)


@pytest.mark.parametrize("entry_points", [b"[console_scripts]\nfoo\n", b"\xff\xfe[", b""])
def test_damaged_entry_points_of_another_kind_are_not_read(site: Path, entry_points: bytes) -> None:
    write_metadata(site, entry_points)
    assert "odd" not in {plugin.provider.distribution for plugin in installed()}


def test_damaged_entry_points_of_a_plugin_name_its_distribution(site: Path) -> None:
    write_metadata(site, b"[rlcore]\nfoo\n")
    with pytest.raises(PluginError, match=r"^distribution 'odd': reading its entry_points\.txt: TypeError"):
        installed()


def test_a_plugin_whose_metadata_has_no_name_is_that_of_its_directory(site: Path) -> None:
    write_metadata(site, b"[rlcore]\nodd = odd\n", metadata="Metadata-Version: 2.1\n")
    (found,) = [plugin for plugin in installed() if plugin.name == "odd"]
    assert (found.provider.distribution, found.provider.version) == ("odd", "without a version")
