"""The page of the command line says what the parsers of the commands say."""

import argparse
import importlib.util
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from rlcore.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def maker() -> ModuleType:
    """The script of docs/ that makes the page."""
    spec = importlib.util.spec_from_file_location("make_commands", ROOT / "docs" / "commands.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("docs/commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = maker()
PARSERS = MAKER.parsers()


def test_the_page_says_what_the_parsers_say() -> None:
    assert MAKER.PAGE.read_text("utf-8") == MAKER.page(), "run: python docs/commands.py"


def test_every_command_and_subcommand_is_on_the_page() -> None:
    assert set(COMMANDS) <= set(PARSERS)
    assert {"plugins new", "plugins show", "view find", "view diff"} <= set(PARSERS)
    assert set(MAKER.EXAMPLES) == set(PARSERS)
    assert set(MAKER.CODES) <= set(PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_an_example_is_parsed_by_its_command(name: str) -> None:
    program, *words = shlex.split(MAKER.EXAMPLES[name])
    own = name.split()
    assert (program, words[: len(own)]) == ("rlcore", own)
    arguments = words[len(own) :]
    if name == "view":  # its parser wants the name of the subcommand, which `main` puts there
        arguments = ["page", *arguments]
    parser = PARSERS[name]
    parser.exit_on_error = False
    parse = parser.parse_args if name.startswith("view") else parser.parse_intermixed_args
    assert parse(arguments)


@pytest.mark.parametrize("name", PARSERS)
def test_every_argument_has_a_help_text(name: str) -> None:
    assert [MAKER.argument_words(action) for action in MAKER.shown(PARSERS[name]) if not action.help] == []


def test_an_argument_is_one_row() -> None:
    parser = argparse.ArgumentParser()
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--format", choices=("a", "b"), default="a", help="a <kind> | another")
    either.add_argument("--plain", action="store_true", help="no format")
    parser.add_argument("--port", type=int, required=True, help="of the server")
    rows = [MAKER.row(parser, action) for action in MAKER.shown(parser)]
    assert rows == [
        "| `--format {a,b}` | `a` | a &lt;kind> \\| another; not with `--plain` |",
        "| `--plain` |  | no format; not with `--format` |",
        "| `--port PORT` | required | of the server |",
    ]


def test_a_command_that_parses_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="parses no arguments"):
        MAKER.parser_of(lambda _arguments: 0)
