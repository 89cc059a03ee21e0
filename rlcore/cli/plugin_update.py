"""`rlcore plugins new NAME --update`: applies a newer template to a package that an older rlcore made."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlcore import __version__
from rlcore.cli.plugin_package import Offers, PluginPackage, common_texts, filled_texts, package_texts
from rlcore.errors import ConfigError, shown

RECORD = ".rlcore-template.json"
"""File of a package: the kinds of its offers, and the SHA-256 of every file in the last template.

The record of a package that was made from one file also has the summary and the settings of the file's offers. It does
not have the module and its tests, which belong to the author from the beginning.
"""
FROM_FILE = "file"
"""The kind of the offers of a package that was made from one file."""


@dataclass(frozen=True)
class FileUpdate:
    """The decision about one file."""

    name: str
    """Its path in the package."""
    action: str
    """The decision in words, for the user."""
    write: tuple[str, str] | None = None
    """(path in the package, text) to write; None: nothing."""


def write_record(package: PluginPackage, texts: Mapping[str, str]) -> None:
    """Write the record of the files that a template has written."""
    record: dict[str, Any] = {
        "rlcore": __version__,
        "offers": list(package.offers),
        "files": {name: _digest(text) for name, text in sorted(texts.items())},
    }
    if FROM_FILE in package.offers:
        record[FROM_FILE] = package.offers[FROM_FILE]
    (package.directory / RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def update_package(name: str, directory: Path, known: Offers, dry_run: bool) -> list[FileUpdate]:
    """Apply the template of this rlcore to a package; returns the decision about each file.

    A file that the author has not changed is replaced. A changed file stays; if the template has changed it too, the
    template's version is written next to it as FILE.new. ConfigError without a record.
    """
    record = _record(directory, known)
    package = PluginPackage(name, directory, record["offers"])
    texts = template_texts(package)
    updates = list(_updates(directory, record["files"], texts))
    if not dry_run:
        for path, text in [update.write for update in updates if update.write is not None]:
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, "utf-8")
        write_record(package, texts)
    return updates


def template_texts(package: PluginPackage) -> dict[str, str]:
    """The files that a template has for the package, by path."""
    from_file = FROM_FILE in package.offers
    return filled_texts(package, common_texts(package)) if from_file else package_texts(package)


def _updates(directory: Path, written: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[FileUpdate]:
    for name in sorted(written.keys() | texts.keys()):
        path, was = directory / name, written.get(name)
        found = _digest(path.read_text("utf-8")) if path.is_file() else None
        if name not in texts:
            yield FileUpdate(name, "kept: no longer part of the template")
        elif found == _digest(texts[name]):
            yield FileUpdate(name, "up to date")
        elif was == _digest(texts[name]):
            yield FileUpdate(name, "kept: removed by you" if found is None else "kept: changed by you only")
        elif found is None and was is not None:
            yield FileUpdate(name, "kept: removed by you, and changed in the template")
        elif found is None:
            yield FileUpdate(name, "added", (name, texts[name]))
        elif found == was:
            yield FileUpdate(name, "replaced", (name, texts[name]))
        else:
            new = f"{name}.new"
            yield FileUpdate(name, f"kept: changed by you; the template's is {new}", (new, texts[name]))


def _record(directory: Path, known: Offers) -> dict[str, Any]:
    """The offers by kind and the digests of a package."""
    path = directory / RECORD
    if not path.is_file():
        raise ConfigError(
            f"plugins new --update: '{directory}' has no {RECORD}; needs a package that `rlcore plugins new` or "
            "`rlcore plugins package` wrote"
        )
    try:
        record = json.loads(path.read_text("utf-8"))
        kinds, digests = record["offers"], dict(record["files"])
        if FROM_FILE in kinds:
            summary, settings = str(record[FROM_FILE]["summary"]), dict(record[FROM_FILE]["settings"])
            theirs = {kind: {**offer, "settings": {}} for kind, offer in known.items()}
            known = {FROM_FILE: {"summary": summary, "settings": settings}, **theirs}
        sound = set(kinds) <= set(known) and all(isinstance(digest, str) for digest in digests.values())
    except (ValueError, TypeError, KeyError) as cause:
        raise ConfigError(f"plugins new --update: '{path}' is damaged: {shown(cause)}; restore it") from cause
    if not sound:
        raise ConfigError(f"plugins new --update: '{path}' is damaged: offers {shown(kinds)}; restore it")
    return {"offers": {kind: known[kind] for kind in kinds}, "files": digests}


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
