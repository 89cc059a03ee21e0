"""Docstrings, comments and pages state first, without the tics of a translated text."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

TICS = {
    "clause": re.compile(r'^ *"""(What|Which|Whether|Where|When|Who|Whose|Why|How|As) ', re.MULTILINE),
    "person": re.compile(r"\b(no|some|any|every)body\b|\bwhoever\b", re.IGNORECASE),
    "is no": re.compile(r"(?<!here )\b(is|are|was|were) no\b(?! (more|longer)\b)"),
    "anew": re.compile(r"\banew\b"),
    "one a": re.compile(r"\bone an? (token|sample|step|row)\b"),
    "a for per": re.compile(
        r"\b(tokens|samples|prompts|updates|steps|calls|rows|bytes|seconds|FLOPs|\d s"
        r"|one (advantage|answer|call|line|object|pass|prompt|row|sample|turn|weight)) an? "
        r"(token|sample|prompt|step|row|parameter|second|minute|micro-batch|mini-batch|trajectory|turn|call|line)\b"
        r"(?! (may|can|holds|sees|has|is))"
    ),
    "mend": re.compile(r"\bmend(?:s|ed|ing)? "),
    "in the mean": re.compile(r"\bin the mean\b"),
    "in good order": re.compile(r"\bin good order\b"),
    "held against": re.compile(r"\bheld against\b"),
    "needed is": re.compile(r"\bneeded is\b(?! None)|; [^;\n]{1,60} (is|are) needed['\"{;]"),
    "of its own": re.compile(r"\bof\s+(?:its|their|our)(?:\s|#)+own\b"),
}
DOCUMENT_TICS = {
    "beside": re.compile(r"(?<!`)\bbeside\b"),
    "goes on": re.compile(r"\bgo(?:es)? on\b"),
    "is told": re.compile(r"\b(?:is|are|was|were|be) told\b"),
    "under way": re.compile(r"\bunder way\b"),
    "all the same": re.compile(r"\ball the same\b"),
}
"""By name: what the test finds, in any line of a file, texts for users included.

A clause is a docstring that is a subordinate clause: it does not say what the thing is or does. Documents, and the
words of `WORDED` packages, do not contain `DOCUMENT_TICS` either.
"""
WORDED = (
    "rlcore",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "plugins").glob("*/rlcore_*")),
    "view/rlcore_view",
)
"""Packages whose strings and comments have no tic of documents."""
LISTS = ("test_prose.py", "test_words.py")
ROOMS = ("rlcore", "plugins", "view", "tests", "benchmarks", "examples", "docs")


def tics(path: Path, kinds: dict[str, re.Pattern[str]] = TICS) -> list[str]:
    """The tics of a file by name, one entry per occurrence."""
    text = path.read_text("utf-8")
    return [name for name, tic in kinds.items() for _ in tic.finditer(text)]


def words_of(path: Path) -> str:
    """The strings and comments of a Python file, without its names."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    return "\n".join(token.string for token in tokens if token.type in kinds)


def texts(room: str) -> list[Path]:
    """The files of a directory, except for builds, records of runs, and the two files that list tics."""
    everything = [path for kind in ("*.py", "*.md") for path in (ROOT / room).rglob(kind)]
    return [path for path in everything if not {"build", "results", *LISTS} & set(path.parts)]


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_no_text_has_a_tic(room: str) -> None:
    assert [(name, str(path.relative_to(ROOT))) for path in texts(room) for name in tics(path)] == []


def test_no_document_has_a_tic_of_documents() -> None:
    documents = [path for path in (*texts("docs"), *ROOT.glob("*.md")) if path.suffix == ".md"]
    assert len(documents) > 40
    assert [(name, path.name) for path in documents for name in tics(path, DOCUMENT_TICS)] == []


@pytest.mark.slow
@pytest.mark.parametrize("room", WORDED)
def test_no_words_of_code_have_a_tic_of_documents(room: str) -> None:
    paths = texts(room)
    assert paths
    found = [(name, path.name) for path in paths for name, tic in DOCUMENT_TICS.items() if tic.search(words_of(path))]
    assert found == []


def other_files() -> list[Path]:
    """The files that are neither Python nor Markdown: templates, tables, settings, scripts and pages."""
    kinds = ("*.txt", "*.toml", "*.yaml", "*.js", "*.css")
    paths = [path for room in (*ROOMS, "requirements") for kind in kinds for path in (ROOT / room).rglob(kind)]
    paths += [path for name in ("Makefile", "*.toml", "*.yml", ".ci/run", ".github/*/*") for path in ROOT.glob(name)]
    return [path for path in paths if not {"build", "results"} & set(path.parts)]


def test_no_template_table_or_script_has_a_tic() -> None:
    """The templates of `rlcore init` and `rlcore plugins new`, the texts of metrics, examples, the Makefile, pages."""
    paths = other_files()
    assert len(paths) > 100
    assert [(name, str(path.relative_to(ROOT))) for path in paths for name in tics(path, TICS | DOCUMENT_TICS)] == []


def test_words_of_code_are_strings_and_comments(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("beside = 1  # a comment\nx = 'a text'\n")
    assert words_of(tmp_path / "x.py") == "# a comment\n'a text'"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("It stands beside the file.", "beside"),
        ("The run goes on.", "goes on"),
        ("Workers are told so.", "is told"),
        ("calls under way", "under way"),
        ("It works all the same.", "all the same"),
    ],
)
def test_a_tic_of_documents_is_found(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "x.md").write_text(text)
    assert tics(tmp_path / "x.md", DOCUMENT_TICS) == [name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('def f():\n    """What a row holds."""', "clause"),
        ('SIZE = 3\n"""How many rows there are."""', "clause"),
        ("# nobody waits", "person"),
        ("x = 'it is no number'", "is no"),
        ("# is made anew", "anew"),
        ("# one a token", "one a"),
        ("# a pool of their own", "of its own"),
        ("# mend the reward", "mend"),
        ("x = 'found 1, needed is 2'", "needed is"),
        ("x = 'found 1; a 2 is needed'", "needed is"),
        ("# 16 tokens in the mean", "in the mean"),
        ("# ends in good order", "in good order"),
        ("# is held against its interface", "held against"),
        ("# bytes a parameter", "a for per"),
        ("# one prompt a step", "a for per"),
    ],
)
def test_a_tic_is_found_wherever_it_occurs(tmp_path: Path, text: str, name: str) -> None:
    """In a docstring, behind a field, in a comment and in a text for users."""
    (tmp_path / "x.py").write_text(text)
    assert tics(tmp_path / "x.py") == [name]


def test_plain_sentences_are_not_tics(tmp_path: Path) -> None:
    """Words that begin like one, and `there is no`."""
    (tmp_path / "x.py").write_text('"""Asks for rows. There is no row, and there is no more left: what, how."""')
    assert tics(tmp_path / "x.py") == []
