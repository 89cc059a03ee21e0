"""Runs over seeds and values of keys, each in a process, several at a time, with one table of results.

`<train.dir>/<name>/` has a directory per run, its output as `<run>.out`, and `sweep.json` with the state of each. The
same sweep started again continues: finished runs are kept, others are resumed or started, and new cells are added. It
is refused where a run has results of other settings, because one table would have both.
"""

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlcore.cluster.own_command import OwnCommands
from rlcore.config.layers import read_file
from rlcore.config.names import check_name
from rlcore.errors import ConfigError, describe, nearest
from rlcore.report.files import write_atomically
from rlcore.report.metrics import has_results, read
from rlcore.runtime.machine_share import MachineShare
from rlcore.train import checkpoint

SWEEP = "sweep.json"
LAST_STEPS = 5
"""Training steps at the end of a run over which a metric of training is averaged."""
INTERRUPTED = (130, 143)
"""Exit codes of runs that a signal ended."""
SET_BY_SWEEP = {"train.seed": "--seeds", "train.name": "--name", "train.dir": "an override train.dir=..."}
"""Keys that a sweep sets for each run, and the options that they follow."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str
    overrides: tuple[str, ...]
    group: str
    """Its values without the seed: runs of one group differ by the seed alone."""
    left_out: tuple[str, ...] = ()
    """Plugins of --plugin that its plan does not use."""
    state: str = "waiting"
    """waiting, done or failed."""
    error: str = ""


@dataclass(frozen=True)
class Group:
    """Runs that differ by the seed alone."""

    name: str
    values: tuple[float, ...]
    """The metric of each run that is done."""
    num_failed: int

    @property
    def mean(self) -> float:
        """NaN without a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation of the runs; NaN of fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds of '0..4' (both ends) or '0,3,7'; ConfigError for any other text, and for one that comes twice."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    seeds: Sequence[int] = ()
    if match:
        seeds = range(int(match[1]), int(match[2]) + 1)
    elif re.fullmatch(r"\d+(,\d+)*", text):
        seeds = [int(seed) for seed in text.split(",")]
    if not seeds or len(seeds) > 1000 or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds: found '{text}'; needs different seeds such as 0..4 or 0,3,7")
    return tuple(seeds)


def parse_values(text: str) -> tuple[str, tuple[str, ...]]:
    """Key and values of 'actor.lr=1e-5,3e-5'; commas in brackets or quotes belong to a value, an apostrophe in a word
    opens no quote."""
    key, equals, values = text.partition("=")
    found = tuple(
        value.strip() for value in re.findall(r"(?:\[[^\]]*\]|(?<!\w)\"[^\"]*\"|(?<!\w)'[^']*'|[^,])+", values)
    )
    if not equals or not key.strip() or not found or not all(found) or len(set(found)) < len(found):
        raise ConfigError(f"--set: found '{text}'; needs a key with different values, such as actor.lr=1e-5,3e-5")
    return key.strip(), found


def cells_of(seeds: Sequence[int], settings: Sequence[tuple[str, Sequence[str]]]) -> tuple[Cell, ...]:
    """A cell for each combination of values and each seed, named after them."""
    if twice := [key for key, _ in settings if [other for other, _ in settings].count(key) > 1]:
        raise ConfigError(f"--set: {twice[0]} is set twice; needs one --set for a key, with all of its values")
    for key, option in SET_BY_SWEEP.items():
        if key in dict(settings):
            raise ConfigError(f"--set: found {key}, which a sweep sets for each run; use {option}")
    cells = []
    names_of_keys = [_short_name(key, [other for other, _ in settings]) for key, _ in settings]
    for values in itertools.product(*(values for _, values in settings)):
        pairs = [f"{key}={value}" for (key, _), value in zip(settings, values, strict=True)]
        for seed in seeds:
            parts = [f"{key}-{value}" for key, value in zip(names_of_keys, values, strict=True)]
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join([*parts, f"seed-{seed}"])).strip("-._")
            cells.append(Cell(name, (*pairs, f"train.seed={seed}"), " ".join(pairs) or "all"))
    names = [cell.name for cell in cells]
    for cell in cells:
        check_name("--set", cell.name, "a run", dots=True)
        if names.count(cell.name) > 1:
            raise ConfigError(
                f"--set: two runs would be named '{cell.name}'; needs values that differ in letters or digits"
            )
    return tuple(cells)


def _short_name(key: str, keys: Sequence[str]) -> str:
    """The end of the key, with as many of its parts as no other key ends with."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        end = ".".join(parts[-depth:])
        if not any(other != key and f".{other}".endswith(f".{end}") for other in keys):
            return end
    return key


def _digests(settings: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of the values of each configuration file, by path; comments do not count."""
    files = [setting for setting in settings if "=" not in setting and Path(setting).is_file()]
    values = {file: json.dumps(read_file(Path(file)).values, sort_keys=True, default=str) for file in files}
    return {file: sha256(text.encode("utf-8", "replace")).hexdigest() for file, text in values.items()}


def _options(plugins: Sequence[str]) -> list[str]:
    return [word for plugin in plugins for word in ("--plugin", plugin)]


class Sweep:
    """The cells of a sweep, with their states on disk."""

    def __init__(
        self, directory: Path, settings: Sequence[str], cells: Sequence[Cell], plugins: Sequence[str] = ()
    ) -> None:
        """`settings` are files and overrides that all runs have, `plugins` values of --plugin.

        ConfigError when the directory has others.
        """
        self.directory, self._settings, self._plugins = directory, tuple(settings), tuple(plugins)
        self._arguments = (*self._settings, *_options(plugins))
        before = self._read()
        if before is not None and tuple(before["arguments"]) != self._arguments:
            raise ConfigError(
                f"--name: '{directory}' is a sweep of other settings ({' '.join(before['arguments'])}); choose another "
                "name"
            )
        known = {} if before is None else {saved["name"]: saved for saved in before["cells"]}
        self._files = _digests(self._settings)
        self._check_results(cells, known, {} if before is None else before["files"])
        names = {cell.name for cell in cells}
        self._others = [saved for name, saved in known.items() if name not in names]
        self.cells = [
            replace(cell, state=known[cell.name]["state"], error=known[cell.name]["error"])
            if self._has_result(cell, known)
            else cell
            for cell in cells
        ]

    def _has_result(self, cell: Cell, known: Mapping[str, Mapping[str, Any]]) -> bool:
        """True if the cell has ended with these overrides, and its results are still there."""
        was = known.get(cell.name, {})
        is_there = was.get("state") != "done" or has_results(self.directory / cell.name)
        return is_there and was.get("overrides") == list(cell.overrides)

    def _check_results(
        self, cells: Sequence[Cell], known: Mapping[str, Mapping[str, Any]], files: Mapping[str, str]
    ) -> None:
        """ConfigError for results of other settings: of a cell, and of a file that has changed since."""
        for cell in cells:
            was = known.get(cell.name, {}).get("overrides")
            if was != list(cell.overrides) and has_results(self.directory / cell.name):
                found = f"results of {' '.join(was)}" if was else f"results that its {SWEEP} does not know"
                raise ConfigError(
                    f"--name: '{self.directory / cell.name}' has {found}, not of {' '.join(cell.overrides)}; choose "
                    "another name"
                )
        changed = [file for file, digest in files.items() if self._files.get(file) != digest]
        if changed and any(has_results(self.directory / name) for name in known):
            raise ConfigError(
                f"--name: '{self.directory}' has results of '{changed[0]}' before it was changed; choose another name, "
                "or restore the file"
            )

    def run(self, say: Callable[[str], None], shares: Sequence[MachineShare] = (MachineShare(),)) -> int:
        """Take the runs that are not done, one at a time on each share of the machine.

        Returns the exit code of a signal that arrived or ended a run, after all started runs have ended; else 0.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write()  # also a sweep that is killed in its first run knows the settings of its results
        total, ended, code = len(self.cells), 0, 0
        for cell in self.cells:
            if cell.state == "done":
                ended += 1
                say(f"{ended}/{total} {cell.name}: done already")
        waiting = [cell for cell in self.cells if cell.state != "done"]
        free, taken = list(shares), dict[str, MachineShare]()
        with OwnCommands() as commands:
            while waiting or commands.running:
                while waiting and free:
                    cell = waiting.pop(0)
                    taken[cell.name] = free.pop(0)
                    with taken[cell.name].confined():
                        commands.start(cell.name, self._command(cell), self._output(cell.name))
                event = commands.next_end()
                if event is None:
                    code, waiting = 128 + (commands.signum or 0), []
                    if commands.running:
                        say(f"ending {' and '.join(commands.running)}; a second Ctrl-C does so at once")
                elif event[1] in INTERRUPTED:
                    code, waiting = code or event[1], []
                else:
                    ended += 1
                    free.append(taken[event[0]])
                    say(f"{ended}/{total} {event[0]}: {self._note(*event) or 'done'}")
        return code

    def groups(self, metric: str) -> list[Group]:
        """The runs by group, in order, with their values of the metric."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.group, []).append(cell)
        return [
            Group(
                name,
                tuple(value for cell in cells if not math.isnan(value := self._value(cell, metric))),
                sum(cell.state == "failed" for cell in cells),
            )
            for name, cells in found.items()
        ]

    def metric(self, chosen: str = "") -> str:
        """`chosen`; without it the mean of the first held-out source that a run has, else reward/mean.

        ConfigError if there are metrics, and none is `chosen`.
        """
        records = [record for cell in self.cells for record in read(self.directory / cell.name)]
        names = list(dict.fromkeys(name for record in records for name in record))
        if chosen and names and chosen not in names:
            raise ConfigError(f"--metric: no run has '{chosen}'; {nearest(chosen, names)}")
        return chosen or next((name for name in names if re.fullmatch(r"eval/[^/]+/mean", name)), "reward/mean")

    def _value(self, cell: Cell, metric: str) -> float:
        """The last value of an evaluation, the mean of the last steps of training; NaN where there is none."""
        values = [record[metric] for record in read(self.directory / cell.name) if metric in record]
        if cell.state != "done" or not values:
            return math.nan
        return values[-1] if metric.startswith("eval/") else statistics.fmean(values[-LAST_STEPS:])

    def _command(self, cell: Cell) -> list[str]:
        """Arguments of the run, which continues where it was begun."""
        run_dir = self.directory / cell.name
        begun = has_results(run_dir)
        place = (f"train.dir={json.dumps(str(self.directory), ensure_ascii=False)}", f"train.name={cell.name}")
        resume = ["--resume", *(() if checkpoint.survey(run_dir).newest else ("--from-start",))] if begun else []
        plugins = [plugin for plugin in self._plugins if plugin not in cell.left_out]
        return ["train", *self._settings, *cell.overrides, *place, *_options(plugins), *resume]

    def _output(self, name: str) -> Path:
        return self.directory / f"{name}.out"

    def _note(self, name: str, code: int) -> str:
        """Keep the end of a run with this exit code; the last line of its errors, '' without any."""
        error = ""
        if code:
            lines = self._output(name).read_text("utf-8", "replace").splitlines()
            errors = [line.removeprefix("rlcore: ") for line in lines if line.startswith("rlcore: ")]
            error = (errors or [f"ended with exit code {code}"])[-1]
        place = next(place for place, cell in enumerate(self.cells) if cell.name == name)
        self.cells[place] = replace(self.cells[place], state="failed" if code else "done", error=error)
        self._write()
        return error

    def _read(self) -> Mapping[str, Any] | None:
        path = self.directory / SWEEP
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_bytes())
            cells = [dict(cell) for cell in saved["cells"]]
            return {"arguments": list(saved["arguments"]), "files": dict(saved.get("files", {})), "cells": cells}
        except (ValueError, KeyError, TypeError) as cause:
            raise ConfigError(
                f"'{path}' cannot be read ({describe(cause)}); remove it, or choose another --name"
            ) from cause

    def _write(self) -> None:
        cells = [*self._others, *(asdict(cell) for cell in self.cells)]
        saved = {"arguments": self._arguments, "files": self._files, "cells": cells}
        write_atomically(self.directory / SWEEP, (json.dumps(saved, indent=1) + "\n").encode())
