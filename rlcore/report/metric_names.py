"""The declared metrics, in `metrics.toml` of the core and of each plugin; `docs/metrics.md` is generated from them."""

import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CORE = Path(__file__).with_name("metrics.toml")
HEAD = """# Metrics

For users who look at curves. Each line of `metrics.jsonl` and each tracker has these names. This page is generated from
the declarations of the core and its plugins:
`python -m rlcore.report.metric_names docs/metrics.md plugins/*/*/metrics.toml`.
`<...>` stands for one part of a name. The normal range is a rule of thumb for instruct models; curves count for more
than single steps. A metric over nothing is left out. A metric of updates is the mean over the updates of the step, each
counting alike; one whose name ends in `_max` is the largest. A run warns about values far from normal
([it does not learn](troubleshooting.md#it-does-not-learn)).
"""
ROOMS = {
    "reward": "Rewards",
    "completion": "Responses",
    "policy": "Policy",
    "actor": "Actor",
    "<engine>": "Training engines",
    "critic": "Critic",
    "agent": "Agents",
    "eval": "Evaluation",
    "data": "Data",
    "schedule": "Schedule",
    "time": "Time",
}


@dataclass(frozen=True)
class Metric:
    """One declared metric."""

    name: str
    """The name, with `<...>` for parts that differ between runs, such as the name of a reward function."""
    meaning: str
    unit: str
    normal: str
    """The normal range; empty if there is none."""
    otherwise: str
    """Advice for values outside the normal range; empty if there is none."""

    @property
    def more(self) -> tuple[str, str, str]:
        """Unit, normal range, and the advice otherwise."""
        return self.unit, self.normal, self.otherwise

    def matches(self, name: str) -> bool:
        """True if a logged name belongs to this metric."""
        parts = re.split(r"<[^>]+>", self.name)
        return re.fullmatch("[^/]+".join(map(re.escape, parts)), name) is not None


def declared(files: Iterable[Path]) -> list[Metric]:
    """The metrics of the files, in order; ValueError for a declaration with a field too few or too many."""
    found = []
    for file in files:
        for name, fields in tomllib.loads(file.read_text("utf-8")).items():
            try:
                found.append(Metric(name, **fields))
            except TypeError as error:
                raise ValueError(f"'{file}': {name}: {error}; needs meaning, unit, normal and otherwise") from error
    return found


def undeclared(names: Iterable[str], metrics: Sequence[Metric]) -> list[str]:
    """The names that no declaration matches."""
    return sorted({name for name in names if not any(metric.matches(name) for metric in metrics)})


def page(metrics: Sequence[Metric]) -> str:
    """The page in Markdown, a table per first part of the names; ValueError for a first part without a heading."""
    unknown = sorted({metric.name.split("/")[0] for metric in metrics} - ROOMS.keys())
    if unknown:
        raise ValueError(f"metrics: no heading for {', '.join(unknown)}; needs one in ROOMS")
    tables = []
    for room, title in ROOMS.items():
        rows = [
            f"| `{metric.name}` | {' | '.join(text or '-' for text in (metric.meaning, *metric.more))} |"
            for metric in metrics
            if metric.name.split("/")[0] == room
        ]
        if rows:
            head = ["| name | meaning | unit | normal | otherwise |", "|---|---|---|---|---|"]
            tables.append("\n".join([f"## {title}", "", *head, *rows]))
    return HEAD + "\n" + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(declared([CORE, *map(Path, sys.argv[2:])])), "utf-8")
