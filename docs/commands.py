"""Makes the page of the command line from the parsers of the commands: `python docs/commands.py`.

A command's parser is the one that it would parse its arguments with: it is taken from a call of the command, which goes
no further. Examples and exit codes are below; a test parses each example with its command's parser.
"""

import argparse
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from rlcore.cli import BUG, COMMANDS, ERROR, INTERRUPTED, MODULES
from rlcore.cli.arguments import Parser
from rlcore.cli.plugins import SUBCOMMANDS

PAGE = Path(__file__).resolve().parent / "cli.md"
VIEW = "view"
"""The command of another distribution, whose parser has parsers of subcommands."""

EXAMPLES = {
    "init": "rlcore init mytask",
    "train": "rlcore train config.yaml --plugin digit_sum actor.lr=1e-5 train.name=sums",
    "plan": "rlcore plan config.yaml --on 8xH100-80GB",
    "config": "rlcore config actor.lr",
    "resume": "rlcore resume runs/sums train.max_steps=200",
    "eval": "rlcore eval --checkpoint runs/sums --json",
    "chat": "rlcore chat runs/sums --temperature 0",
    "sweep": "rlcore sweep config.yaml --seeds 0..2 --set actor.lr=1e-5,3e-5",
    "export": "rlcore export runs/sums exported --form merged",
    "where": "rlcore where runs/sums",
    "view": "rlcore view runs/sums",
    "view page": "rlcore view page runs/sums runs/other --out compared.html",
    "view find": "rlcore view find runs/sums 'reward < 0.1 and truncated' --limit 5",
    "view diagnose": "rlcore view diagnose runs/sums",
    "view diff": "rlcore view diff runs/sums runs/other --prompt 17",
    "runs": "rlcore runs --json",
    "plugins": "rlcore plugins --check digit_sum",
    "plugins new": "rlcore plugins new mine --offers reward",
    "plugins package": "rlcore plugins package mine.py",
    "plugins search": "rlcore plugins search judge",
    "plugins show": "rlcore plugins show digit_sum",
}

SIGNALS = "143 or 130: SIGTERM or Ctrl-C ended it cleanly, and it can be resumed"
CODES = {
    "train": SIGNALS,
    "resume": SIGNALS,
    "sweep": "2: a run failed; 143 or 130: a signal ended it, and the same command continues",
    "view find": "1: no sample matches",
    "plugins": "2: a plugin has a problem",
}
"""Exit codes that mean more than the table at the top of the page says."""


class _Taken(BaseException):
    """Carries the parser of a command out of its call."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _take(parser: argparse.ArgumentParser, *_arguments: object, **_options: object) -> NoReturn:
    raise _Taken(parser)


def parser_of(run: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """The parser that a command calls; RuntimeError for one that ends without."""
    with patch.object(Parser, "parse", _take), patch.object(argparse.ArgumentParser, "parse_args", _take):
        try:
            run([])
        except _Taken as taken:
            return taken.parser
    raise RuntimeError(f"{run.__module__}: it parses no arguments")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command and subcommand in the order of `rlcore --help`, with its parser."""
    found = {}
    for name in COMMANDS:
        found[name] = parser_of(import_module(f"rlcore.cli.{MODULES.get(name, name)}").run)
        if name == VIEW:
            (inner,) = (action for action in found[name]._actions if isinstance(action, argparse._SubParsersAction))
            found |= {f"{name} {word}": parser for word, parser in inner.choices.items()}
            summaries = {choice.dest: choice.help for choice in inner._choices_actions}
            for word, parser in inner.choices.items():
                parser.description = parser.description or _sentence(str(summaries[word]))
        if name == "plugins":
            found |= {f"{name} {word}": parser_of(import_module(SUBCOMMANDS[word]).run) for word in SUBCOMMANDS}
    return found


def page() -> str:
    """The whole page."""
    lines = [
        "# Command line",
        "",
        "For users who look for a command or an option. `rlcore COMMAND --help` says the same in a terminal. Files,",
        "values (`key=value`) and options may be in any order; values win over files, later ones over earlier ones.",
        "They add to mappings of named entries: `eval.sources={}` empties one, and `eval.sources.held=null` removes an",
        "entry. This page is made by `python docs/commands.py`.",
        "",
        "| exit code | means |",
        "|---|---|",
        "| 0 | the command did what it was asked to do |",
        f"| {ERROR} | an error, in one line on stderr that says what to change; wrong arguments, too |",
        f"| {BUG} | a bug, with a traceback, or `sys.exit()` in code that rlcore called |",
        f"| {INTERRUPTED} | Ctrl-C |",
        "",
        "Codes that mean more are with their command.",
    ]
    for name, parser in parsers().items():
        lines += section(name, parser)
    return "\n".join(lines) + "\n"


def section(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """The lines of one command: what it does, an example, its arguments, its exit codes."""
    what = parser.description or _sentence(COMMANDS[name])
    lines = ["", f"{'###' if ' ' in name else '##'} rlcore {name}", "", _escaped(what)]
    lines += ["", "```text", EXAMPLES[name], "```"]
    rows = [row(parser, action) for action in shown(parser)]
    if rows:
        lines += ["", "| argument | default | meaning |", "|---|---|---|", *rows]
    if name in CODES:
        lines += ["", f"Exit code {CODES[name]}."]
    return lines


def shown(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of a command but --help, those without a name first."""
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    actions = [action for action in actions if not isinstance(action, argparse._SubParsersAction)]
    yield from sorted(actions, key=lambda action: bool(action.option_strings))


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """One argument as a row of the table."""
    others = [
        other.option_strings[0]
        for group in parser._mutually_exclusive_groups
        if action in group._group_actions
        for other in group._group_actions
        if other is not action
    ]
    meaning = _escaped(action.help or "")
    meaning += f"; not with `{'`, `'.join(others)}`" if others else ""
    return f"| {argument_words(action)} | {default_words(action)} | {meaning} |"


def argument_words(action: argparse.Action) -> str:
    """Name and value as they are written, such as `--checkpoint PATH`; `...` where there may be several."""
    value = value_name(action)
    name = action.option_strings[0] if action.option_strings else ""
    more = " ..." if action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction) else ""
    text = " ".join(part for part in (name, value) if part) + more
    return f"`{text}`".replace("|", "\\|")


def value_name(action: argparse.Action) -> str:
    """Placeholder for the value of an argument; "" for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def default_words(action: argparse.Action) -> str:
    """The default; "required" without one, "" where leaving it out is the default."""
    if action.required and action.nargs != "*":
        return "required"
    if action.nargs == 0 or action.default in (None, "", []):
        return ""
    return f"`{action.default}`"


def _escaped(text: str) -> str:
    """The text as Markdown shows it, in a table, too."""
    return text.replace("<", "&lt;").replace("|", "\\|")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
