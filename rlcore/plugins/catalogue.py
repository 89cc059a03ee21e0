"""The catalogue of plugins, `catalogue.json`: a static file, searched without a network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from rlcore.errors import counted


@dataclass(frozen=True)
class SuiteResult:
    """The outcome of a plugin's tests against its contracts, and of `rlcore plugins --check`."""

    passed: int
    failed: int
    skipped: int
    problems: tuple[str, ...]
    """The problems that the check found."""
    python: str

    @property
    def words(self) -> str:
        """The outcome in a few words: 'passes 12 tests'."""
        if self.problems or self.failed:
            problems = counted(len(self.problems), "problem")
            return f"fails {self.failed} of {counted(self.passed + self.failed, 'test')}, {problems}"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"passes {counted(self.passed, 'test')}{skipped}" if self.passed else f"not run{skipped}"


@dataclass(frozen=True)
class CatalogueEntry:
    """A plugin of the catalogue."""

    plugin: str
    distribution: str
    summary: str
    source: str
    """A directory of the repository, or an address."""
    install: str
    """The command that installs it."""
    needs: str
    """Versions of rlcore that its metadata admits."""
    offers: tuple[str, ...]
    """The offers in the words of `rlcore plugins show`: 'reward function mine'."""
    results: Mapping[str, SuiteResult] = field(default_factory=dict)
    """Results by version of rlcore, for the versions that were tested."""

    def words(self) -> str:
        """The text that a search looks at."""
        return " ".join((self.plugin, self.distribution, self.summary, *self.offers)).lower()


def read_catalogue() -> tuple[CatalogueEntry, ...]:
    """Every entry, by the plugin's name."""
    entries = json.loads(files("rlcore.plugins").joinpath("catalogue.json").read_text("utf-8"))["plugins"]
    return tuple(
        CatalogueEntry(
            plugin=entry["plugin"],
            distribution=entry["distribution"],
            summary=entry["summary"],
            source=entry["source"],
            install=entry["install"],
            needs=entry["needs"],
            offers=tuple(entry["offers"]),
            results={
                version: SuiteResult(**{**result, "problems": tuple(result["problems"])})
                for version, result in entry["results"].items()
            },
        )
        for entry in entries
    )


def search(entries: Sequence[CatalogueEntry], words: Sequence[str]) -> list[CatalogueEntry]:
    """The entries whose text contains every word, also within a longer word; case does not matter."""
    return [entry for entry in entries if all(word.lower() in entry.words() for word in words)]
