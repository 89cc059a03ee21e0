"""Text that is not YAML, in files and in values of overrides: the error has the place, and a remedy that fits."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlcore.config import load_config
from rlcore.errors import ConfigError


def error_of(*overrides: str, files: Sequence[Path] = ()) -> str:
    """The one line that loading ends with."""
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides, ())
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


FLOW = "separate its entries by one comma each, and close it"
COLUMN = "keys of one section begin in the same column"
ESCAPE = r"a backslash in double quotes begins an escape: use single quotes, or write \\"
NOT_YAML = {
    "train: {seed: 1 epochs: 2}": ("1, column 23: ", f"; the '{{' of line 1, column 8, is open there: {FLOW}"),
    "train: {seed: 1\nactor:\n  lr: 1": ("2, column 6: ", f"; the '{{' of line 1, column 8, is open there: {FLOW}"),
    "a: {b: [1, 2}": ("1, column 13: ", f"; the '[' of line 1, column 8, is open there: {FLOW}"),
    "a: {b: 1,, c: 2}": ("1, column 10: ", "; entries of {...} and [...] are separated by one comma each"),
    "a: {b: 1}}": ("1, column 10: ", "; the '}' closes nothing: leave it out, or open it"),
    "a: {b: 1, b: 2}": ("1, column 11: found duplicate key b", "; a section has each of its keys once"),
    "a: {b: 'c}\nd: 1": ("1, column 8: the quote ' is not closed", ', in "a: {b: \'c}"'),
    "a: 'b\n---\n'": ("1, column 4: the quote ' is not closed", ', in "a: \'b"'),
    'a: {b: "\\d+"}': ("1, column ", f"; {ESCAPE}"),
    'a: "\\xyz"': ("1, column ", f', in a: "\\xyz"; {ESCAPE}'),
    "a: 'it's'": (
        "1, column 8: ",
        "; the quote before it ends the text: write '' for a ' in single quotes, or use the other quotes",
    ),
    "a: {b: @c}": ("1, column 8: ", "; put a text that begins with '@' in quotes"),
    "a: b: c": ("1, column 5: ", "; put a text with ': ' in it in quotes"),
    "a:\n  b: 1\n c: 2": ("3, column 2: ", f"in ' c: 2', below '  b: 1'; {COLUMN}"),
    "a: 1\n  b: 2": ("2, column 4: ", COLUMN),
    "a:\n\tb: 1": ("2, column 1: ", "found a tab; indent with spaces"),
}


@pytest.mark.parametrize("text", NOT_YAML)
def test_what_is_not_yaml_is_an_error_with_its_place_and_a_remedy_that_fits(tmp_path: Path, text: str) -> None:
    place, remedy = NOT_YAML[text]
    message = error_of(files=[written(tmp_path / "c.yaml", text)])
    assert f": not valid YAML in line {place}" in message
    assert message.endswith(remedy)


@pytest.mark.parametrize(
    ("override", "place", "remedy"),
    [
        (r'a="\d+"', 2, f'found unknown escape character, in "\\d+"; {ESCAPE}'),
        (r'rollout.stop=["\d"]', 3, ESCAPE),
        ("a=[1, 2]]", 7, "the ']' closes nothing: leave it out, or open it"),
        (
            "a='it's'",
            5,
            "; the quote before it ends the text: write '' for a ' in single quotes, or use the other quotes",
        ),
        ('a="x', 1, """the quote " is not closed, in '"x'"""),
        ("a=[@x]", 2, "; put a text that begins with '@' in quotes"),
    ],
)
def test_an_override_that_is_not_yaml_is_an_error_with_its_place_and_a_remedy(
    override: str, place: int, remedy: str
) -> None:
    message = error_of(override)
    assert message.startswith(f"override '{override}': its value is not valid YAML in line 1, column {place}: ")
    assert message.endswith(remedy)
