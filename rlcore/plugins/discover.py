"""Finds installed plugins from package metadata alone: nothing here imports a plugin."""

import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlcore import __version__
from rlcore.config.providers import Offer, Provider
from rlcore.contracts.offers import RewardFunction
from rlcore.errors import OfferError, PluginError, boundary, nearest
from rlcore.plan import CORE
from rlcore.plan.catalog import install_hint

GROUP = "rlcore"
REWARDS_GROUP = "rlcore.rewards"
GROUPS = (GROUP, REWARDS_GROUP)


@dataclass(frozen=True)
class InstalledPlugin:
    """An entry point of the group `rlcore`."""

    name: str
    """The name with '_', even if the entry point spells it with '-'."""
    module: str
    provider: Provider
    requires: tuple[str, ...]
    """`Requires-Dist` of its distribution."""


@dataclass(frozen=True)
class _Entry:
    """An entry point with the metadata of its distribution, which is parsed once."""

    point: EntryPoint
    distribution: str
    version: str
    requires: tuple[str, ...]

    def provider(self, name: str, kind: str) -> Provider:
        package = self.point.value.partition(":")[0].partition(".")[0]
        return Provider(name, self.distribution, self.version, kind, package)


def canonical(name: str) -> str:
    """The one spelling of a plugin's name: 'my-plugin' and 'my_plugin' are the same plugin."""
    return name.replace("-", "_")


def _places() -> tuple[tuple[str, int], ...]:
    """sys.path with each directory's time of change, so that metadata is read again after an install or removal."""
    return tuple((place, _changed_at(place)) for place in sys.path)


@lru_cache(maxsize=256)
def _at(place: str, changed_at: int) -> tuple[tuple[str, tuple[_Entry, ...]], ...]:
    """The distributions at one place of sys.path with their entry points.

    Reads one file per distribution, and a second one, with name, version and requirements, if it has plugins.
    """
    return tuple((_normalized(found), _of_groups(found)) for found in distributions(path=[place]))


def _normalized(distribution: Distribution) -> str:
    """The normalized name, from the directory's name as in importlib.metadata: parses no file."""
    return str(getattr(distribution, "_normalized_name", "") or canonicalize_name(distribution.metadata["Name"] or ""))


def _of_groups(distribution: Distribution) -> tuple[_Entry, ...]:
    with suppress(ValueError):  # a foreign file of another encoding
        text = distribution.read_text("entry_points.txt") or ""
        if any(f"[{group}]" in text for group in GROUPS):
            return tuple(_entries(distribution))
    return ()


def _entries(distribution: Distribution) -> Iterator[_Entry]:
    """The entry points of a distribution that has some; PluginError if they cannot be read."""
    name = _normalized(distribution)
    with boundary(f"distribution '{name}': reading its entry_points.txt", PluginError):
        points = [point for point in distribution.entry_points if point.group in GROUPS]
    metadata = distribution.metadata  # each access parses the whole file
    requires = tuple(metadata.get_all("Requires-Dist") or ())
    name, *_ = metadata.get_all("Name") or [name]
    version, *_ = metadata.get_all("Version") or ["without a version"]
    yield from (_Entry(point, name, version, requires) for point in points)


@lru_cache(maxsize=1)
def _by_group(places: tuple[tuple[str, int], ...]) -> dict[str, tuple[_Entry, ...]]:
    """The entry points at these places of sys.path, by group; the first of two distributions of one name counts."""
    first: dict[str, tuple[_Entry, ...]] = {}
    for place in places:
        for name, entries in _at(*place):
            first.setdefault(name, entries)
    everything = [entry for entries in first.values() for entry in entries]
    return {group: tuple(entry for entry in everything if entry.point.group == group) for group in GROUPS}


@lru_cache(maxsize=1)
def _plugins(places: tuple[tuple[str, int], ...]) -> tuple[InstalledPlugin, ...]:
    """The plugins at these places, by name."""
    found = [_plugin(entry) for entry in _by_group(places)[GROUP]]
    return tuple(sorted(found, key=lambda plugin: (plugin.name, plugin.provider.distribution)))


def _changed_at(place: str) -> int:
    """The time of the last change to the directory's entries; importlib's finder checks its cache the same way."""
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return -1


def installed() -> tuple[InstalledPlugin, ...]:
    """Every installed plugin by name, enabled or not; a name may occur twice. Imports none of them."""
    return _plugins(_places())


def _plugin(entry: _Entry) -> InstalledPlugin:
    name = canonical(entry.point.name)
    return InstalledPlugin(name, entry.point.value, entry.provider(name, "plugin"), entry.requires)


def entry_point_rewards() -> tuple[Offer[RewardFunction], ...]:
    """Entry points of the group `rlcore.rewards` as offers, without those that name no function. Loads none of them."""
    offers = []
    found = _by_group(_places())[REWARDS_GROUP]
    for entry in sorted(found, key=lambda entry: (entry.point.name, entry.point.value)):
        with suppress(OfferError):  # the run may not use that distribution
            function = RewardFunction(entry.point.name, entry.point.value)
            offers.append(Offer(function, entry.provider(entry.point.name, "entry point")))
    return tuple(offers)


def rewards_of(distribution: str) -> tuple[Offer[RewardFunction], ...]:
    """The entry points of `entry_point_rewards` of one distribution; PluginError for one that names no function."""
    offers = []
    for entry in _by_group(_places())[REWARDS_GROUP]:
        provider = entry.provider(entry.point.name, "entry point")
        if provider.distribution == distribution:
            with boundary(str(provider), PluginError):
                offers.append(Offer(RewardFunction(entry.point.name, entry.point.value), provider))
    return tuple(offers)


def find(name: str) -> InstalledPlugin:
    """The one installed plugin of that name; PluginError if there is none, or two, or it is for another rlcore."""
    everything = installed()
    found = [plugin for plugin in everything if plugin.name == canonical(name)]
    check_not_core(canonical(name), [plugin.provider.distribution for plugin in found])
    if len(found) > 1:
        raise PluginError(
            f"plugin '{canonical(name)}': two distributions provide it, "
            f"{' and '.join(str(plugin.provider) for plugin in found)}; uninstall one of them"
        )
    if not found:
        hint = install_hint(canonical(name)) or _install_from_here(canonical(name))
        raise PluginError(
            f"plugin '{name}' is not installed; {nearest(canonical(name), [plugin.name for plugin in everything])}"
            + (hint and f"; {hint}")
        )
    check_api(found[0])
    return found[0]


def _install_from_here(name: str) -> str:
    """The command that installs the plugin, if its project is in the working directory or one level below; else ''."""
    for project in (Path("pyproject.toml"), *sorted(Path().glob("*/pyproject.toml"))):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # another project, of any content
            points = tomllib.loads(project.read_text("utf-8"))["project"]["entry-points"][GROUP]
            if name in map(canonical, points):
                where = f"./{project.parent}" if project.parent.name else "."
                return f"its project is here: `pip install -e {where}`"
    return ""


def check_not_core(name: str, places: Sequence[str]) -> None:
    """PluginError for a plugin that has rlcore's own name; `places` are the distributions or file that have it."""
    if name == CORE:
        whose = f"plugin '{CORE}'{' of ' if places else ''}{' and '.join(places)}"
        raise PluginError(
            f"{whose}: the name belongs to rlcore itself, whose offers need no enabling; leave it out, or give the "
            "plugin another name"
        )


def check_api(plugin: InstalledPlugin) -> None:
    """PluginError unless the distribution's `Requires-Dist: rlcore` admits this rlcore. Imports nothing."""
    if canonicalize_name(plugin.provider.distribution) == "rlcore":
        return
    ranges = []
    for line in plugin.requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as cause:
            raise PluginError(f"{plugin.provider}: its metadata has the malformed Requires-Dist '{line}'") from cause
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and canonicalize_name(requirement.name) == "rlcore":
            ranges.append(requirement.specifier)
    if not ranges:
        raise PluginError(
            f"{plugin.provider}: its metadata does not say which rlcore it needs; "
            f"it needs Requires-Dist: rlcore with a range that admits {__version__}"
        )
    for span in ranges:
        if not span.contains(__version__, prereleases=True):
            raise PluginError(
                f"{plugin.provider}: needs rlcore{span}, this is rlcore {__version__}; install a matching version"
            )
