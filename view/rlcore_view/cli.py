"""The command `rlcore-view`, also `rlcore view`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rlcore_view import query
from rlcore_view.model import Run, Sample, ViewError
from rlcore_view.readers import read
from rlcore_view.redaction import redact
from rlcore_view.watch import diagnose, watched
from rlcore_view.write_page import write_page

COMMANDS = ("page", "find", "diagnose")


def main(arguments: Sequence[str] | None = None, prog: str = "rlcore-view") -> int:
    """Run the command; 2 and one line on stderr where it cannot. `PATH...` alone means `page PATH...`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in COMMANDS and not given[0].startswith("-"):
        given.insert(0, "page")
    parsed = _parser(prog).parse_args(given)
    try:
        return int(parsed.command(parsed))
    except ViewError as error:
        _say(f"rlcore-view: {error}", sys.stderr)
        return 2


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Show runs of RL trainers as one HTML file.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    page = commands.add_parser("page", help="write the HTML file (the default: rlcore-view PATH)")
    page.add_argument(
        "path", type=Path, metavar="PATH", help="a run directory or file of rlcore, TRL, verl or messages"
    )
    page.add_argument(
        "--out", type=Path, help="the file to write; PATH's name with .html in the current directory if left out"
    )
    page.add_argument(
        "--max-mb", type=float, default=100.0, help="leave texts out above this size, extremes last (100)"
    )
    page.set_defaults(command=_page)
    find = commands.add_parser("find", help="print the samples for which an expression is true")
    find.add_argument("path", type=Path, metavar="PATH")
    find.add_argument("expression", help="such as 'reward < 0.1 and truncated'")
    find.add_argument("--json", action="store_true", help="a JSON object per line, with the whole text")
    find.add_argument("--limit", type=int, default=0, help="at most this many; 0: all")
    find.set_defaults(command=_find)
    told = commands.add_parser("diagnose", help="say why nothing is learned, if the data shows it")
    told.add_argument("path", type=Path, metavar="PATH")
    told.add_argument("--json", action="store_true")
    told.set_defaults(command=_diagnose)
    return parser


def _page(parsed: argparse.Namespace) -> int:
    run = _read(parsed.path)
    out: Path = parsed.out or Path(f"{parsed.path.resolve().name}.html")
    try:
        write_page(run, out, parsed.max_mb)
    except OSError as error:
        raise ViewError(
            f"'{out}': it cannot be written: {error.strerror or error}; choose another with --out"
        ) from error
    _say(f"{run.format}: {len(run.samples)} samples of {len({sample.step for sample in run.samples})} steps in {out}")
    for finding in diagnose(run):
        _say(str(finding))
    return 0


def _find(parsed: argparse.Namespace) -> int:
    test = query.parse(parsed.expression)
    found = [sample for sample in _read(parsed.path).samples if test(sample)]
    for sample in found[: parsed.limit or None]:
        _say(json.dumps(_record(sample)) if parsed.json else _line(sample))
    return 0 if found else 1


def _diagnose(parsed: argparse.Namespace) -> int:
    watch = watched(_read(parsed.path))
    if parsed.json:
        _say(json.dumps([asdict(finding) for finding in watch.findings()]))
    else:
        for line in watch.last_words() or ["nothing found"]:
            _say(line)
    return 0


def _read(path: Path) -> Run:
    run = read(path)
    if not run.samples and not run.metrics:
        raise ViewError(f"'{path}': there are no samples yet; take a step first")
    return run


def _say(text: str, to: TextIO | None = None) -> None:
    """Print a line without secrets and without characters that would steer a terminal."""
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in redact(text)
    )
    (to or sys.stdout).write(shown + "\n")


def _record(sample: Sample) -> dict[str, object]:
    shown = {name: value(sample) for name, value in query.FIELDS.items() if name != "score"}
    return {**shown, "text": redact(sample.text()), "components": dict(sample.components)}


def _line(sample: Sample) -> str:
    score = "none" if sample.score is None else f"{sample.score:g}"
    text = redact(sample.text())[:120]
    return f"step {sample.step} {sample.prompt_id[:80]} sample {sample.sample}: reward {score}: {text}"
