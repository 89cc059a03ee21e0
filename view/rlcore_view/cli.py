"""The command `rlcore-view`, also `rlcore view`."""

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rlcore_view import compare, query
from rlcore_view.file_memory import FileMemory
from rlcore_view.model import Run, Sample, ViewError
from rlcore_view.readers import read
from rlcore_view.redaction import clipped, displayable, redact
from rlcore_view.serve import Editions, server_of
from rlcore_view.watch import diagnose, watched
from rlcore_view.write_page import left_out_names, write_page

COMMANDS = ("page", "find", "diagnose", "diff")
_PROMPTS = 20
"""Most prompts that `diff` prints; --json prints all."""
_RUN = "a run, of rlcore or of another trainer"


def main(arguments: Sequence[str] | None = None, prog: str = "rlcore-view") -> int:
    """Run the command. Returns 2, with one line on stderr, if it fails. `PATH...` alone means `page PATH...`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        words.insert(0, "page")
    parsed = _parser(prog).parse_args(words)
    try:
        return int(parsed.command(parsed))
    except ViewError as error:
        _say(f"rlcore-view: {error}", sys.stderr)
        return 2
    except PermissionError as error:
        _say(f"rlcore-view: '{error.filename}': it may not be read by this user", sys.stderr)
        return 2
    except BrokenPipeError:  # a reader such as `head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show arguments without secrets and control characters."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        for line in (message or "").splitlines():
            _say(line, sys.stderr)
        raise SystemExit(status)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description="Show runs of RL trainers as one HTML file.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    page = commands.add_parser("page", help="write the HTML file (the default: rlcore-view PATH...)")
    page.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a run of rlcore, or what TRL, verl, prime-rl, verifiers, tinker-cookbook, open-instruct or inspect wrote",
    )
    page.add_argument(
        "--out",
        type=Path,
        help="the file to write; the first PATH's name with .html in the current directory if left out",
    )
    page.add_argument(
        "--max-mb", type=float, default=100.0, help="leave texts out above this size, extremes last (100)"
    )
    page.add_argument("--serve", action="store_true", help="serve the page on this machine and follow the run")
    page.add_argument("--port", type=int, default=0, help="the port of --serve; a free one if left out")
    page.set_defaults(command=_page)
    find = commands.add_parser("find", help="print the samples for which an expression is true")
    find.add_argument("path", type=Path, metavar="PATH", help=_RUN)
    find.add_argument("expression", help="such as 'reward < 0.1 and truncated'")
    find.add_argument("--json", action="store_true", help="a JSON object per line, with the whole text")
    find.add_argument("--limit", type=int, default=0, help="at most this many; 0: all")
    find.set_defaults(command=_find)
    reasons = commands.add_parser("diagnose", help="say why nothing is learned, if the data shows it")
    reasons.add_argument("path", type=Path, metavar="PATH", help=_RUN)
    reasons.add_argument("--json", action="store_true", help="print JSON")
    reasons.set_defaults(command=_diagnose)
    differ = commands.add_parser("diff", help="compare two runs: settings, metrics, prompts; or one prompt's samples")
    differ.add_argument("a", type=Path, metavar="A", help=_RUN)
    differ.add_argument("b", type=Path, metavar="B", help="the run that is compared with it")
    differ.add_argument("--prompt", default="", help="its name, or an end of it such as 17")
    differ.add_argument("--step", type=int, help="the step of both runs; the last with the prompt if left out")
    differ.add_argument("--json", action="store_true", help="print JSON")
    differ.set_defaults(command=_diff)
    return parser


def _page(parsed: argparse.Namespace) -> int:
    paths: list[Path] = parsed.paths
    if not 0 <= parsed.max_mb < math.inf:
        raise ViewError(f"--max-mb: found {parsed.max_mb:g}; needs a number of megabytes, 0 or more")
    if parsed.serve:
        return _serve(paths, parsed.port, parsed.max_mb)
    runs = _read_all(paths)
    out: Path = parsed.out or Path(f"{paths[0].resolve().name}.html")
    if out.exists() and not out.is_file():  # it is replaced, which for root would be a device such as /dev/null
        raise ViewError(f"'{out}': it is not a regular file; choose another with --out")
    try:
        write_page(runs, out, parsed.max_mb)
    except OSError as error:
        raise ViewError(
            f"'{out}': it cannot be written: {error.strerror or error}; choose another with --out"
        ) from error
    for run in runs:
        _say(f"{run.format}: {len(run.samples)} samples of {run.num_steps} steps in {out}")
        for line in left_out_names(run):
            _say(line if len(runs) == 1 else f"{run.name}: {line}")
        for finding in diagnose(run):
            _say(str(finding) if len(runs) == 1 else f"{run.name}: {finding}")
    return 0


def _serve(paths: Sequence[Path], port: int, max_mb: float) -> int:
    memory = FileMemory()

    def runs() -> list[Run]:
        return _named(paths, [read(path, memory) for path in paths])

    runs()  # a path that cannot be read ends the command
    editions = Editions(paths, runs, max_mb)
    server, address = server_of(editions, port)
    with server:
        _say(f"{address} follows {', '.join(map(str, paths))}; Ctrl-C ends it")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def _diff(parsed: argparse.Namespace) -> int:
    runs = _read_all([parsed.a, parsed.b])
    if parsed.prompt:
        found = _prompt_diff(runs, compare.prompt_named(runs, parsed.prompt), parsed.step)
        lines = _prompt_lines(found)
    else:
        found = dict(compare.summary(*runs))
        lines = _summary_lines(found)
    for line in [json.dumps(found)] if parsed.json else lines:
        _say(line)
    return 0


def _prompt_diff(runs: Sequence[Run], prompt: str, step: int | None) -> dict[str, object]:
    groups = [compare.last_group(run, prompt, step) for run in runs]
    missing = [run.name for run, group in zip(runs, groups, strict=True) if not group]
    if missing:
        raise ViewError(f"'{prompt}': {missing[0]} has no samples of it in step {step}; leave --step out")
    sides = [
        {"name": run.name, "step": group[0].step, "samples": [_record(sample) for sample in group]}
        for run, group in zip(runs, groups, strict=True)
    ]
    best = [redact(group[0].text()) for group in groups]
    return {"prompt": prompt, "runs": sides, "best": compare.marked(*best)}


def _prompt_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [found["prompt"]]
    for side in found["runs"]:
        scores = " ".join(_number(sample["reward"]) for sample in side["samples"])
        lines.append(f"{side['name']}, step {side['step']}: rewards {scores}")
    return [*lines, "best answer, {+only in the second+}, [-only in the first-]:", *found["best"].splitlines()]


def _summary_lines(found: Mapping[str, Any]) -> list[str]:
    first, second = found["runs"]
    lines = [f"a: {first}", f"b: {second}"]
    lines += [f"{row['key']}: {row['a']} | {row['b']}" for row in found["config"]]
    metrics = {name: row for name, row in found["metrics"].items() if row["a"] != row["b"]}
    lines += [f"{name}: {_number(row['a'])} | {_number(row['b'])}" for name, row in metrics.items()]
    prompts = found["prompts"]
    lines.append(f"{len(prompts)} prompts of both, mean reward, largest difference first")
    lines += [
        f"  {clipped(row['prompt'], 80)}: {_number(row['a'])} | {_number(row['b'])}" for row in prompts[:_PROMPTS]
    ]
    if other := found["other_questions"]:
        lines.append(f"{other} prompts of the same name are other questions in each run, and left out")
    return lines


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _find(parsed: argparse.Namespace) -> int:
    if parsed.limit < 0:
        raise ViewError(f"--limit: found {parsed.limit}; needs 0 or more")
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
    return _read_all([path])[0]


def _read_all(paths: Sequence[Path]) -> list[Run]:
    """The runs, each with a different name; ViewError for one without samples and metrics."""
    runs = [read(path) for path in paths]
    for path, run in zip(paths, runs, strict=True):
        if not run.samples and not run.metrics:
            raise ViewError(f"'{path}': there are no samples yet; take a step first")
    return _named(paths, runs)


def _named(paths: Sequence[Path], runs: Sequence[Run]) -> list[Run]:
    """The runs, named by as much of their paths as distinguishes them."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return list(runs)
    parts = [path.resolve().parts for path in paths]
    for length in range(2, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            break
    else:  # the same path twice
        return [replace(run, name=f"{run.name} ({number})") for number, run in enumerate(runs, 1)]
    shared = 0
    while len({name.split("/")[-1 - shared] for name in names}) == 1 and all(
        name.count("/") > shared for name in names
    ):
        shared += 1
    named = [name.rsplit("/", shared)[0] if shared else name for name in names]
    return [replace(run, name=name) for run, name in zip(runs, named, strict=True)]


def _say(text: str, to: TextIO | None = None) -> None:
    """Print a line without secrets and terminal control characters."""
    (to or sys.stdout).write(displayable(text) + "\n")


def _record(sample: Sample) -> dict[str, object]:
    shown: dict[str, Any] = {name: value(sample) for name, value in query.FIELDS.items() if name != "score"}
    texts = {name: redact(shown[name]) for name in ("text", "response")}
    return {**shown, **texts, "components": dict(sample.components)}


def _line(sample: Sample) -> str:
    score = "none" if sample.score is None else f"{sample.score:g}"
    text = clipped(sample.text(), 120)
    return f"step {sample.step} {clipped(sample.prompt_id, 80)} sample {sample.sample}: reward {score}: {text}"
