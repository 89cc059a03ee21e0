"""Everything that modules write to a terminal has gone through the function that makes text displayable."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SAFE = {"displayable", "bounded"}
"""Functions that make text safe; the second one calls the first."""
SAFE_TABLES = {"table"}
"""Makes a table of the command line, whose title, columns and cells are displayable."""
OUTPUTS = re.compile(r"sys\.(__)?std(out|err)|console\.file|proxied_file")
SHOWN_BY_NAME = {"add_column", "add_row", "append_text", "from_markup", "from_ansi", "Panel"}
"""Functions and methods whose positional arguments are shown."""
CHECKED_ELSEWHERE = {
    ("rlcore/cli/plan.py", "table"),  # made by `table`, and an argument
    (
        "rlcore/cluster/forks.py",
        "json.dumps([asdict(ended) for ended in endings])",
    ),  # through a pipe, for the process that started it
    ("plugins/agent_loop/rlcore_agent_loop/tools/mcp_relay.py", "MAX_LINE"),  # read by the controller, into its log
    ("plugins/agent_loop/rlcore_agent_loop/tools/mcp_relay.py", "command"),
    ("plugins/agent_loop/rlcore_agent_loop/tools/mcp_relay.py", "cause.strerror"),
    ("plugins/agent_loop/rlcore_agent_loop/tools/mcp_relay.py", "rest"),
    ("rlcore/train/signals.py", "name_of(signum)"),  # SIGINT or SIGTERM
}
"""Texts of which the search cannot tell that they are safe, by file."""


class Prints(ast.NodeVisitor):
    """Finds texts that a module shows and that are neither constants nor displayable."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self._scopes: list[ast.AST] = [tree]
        self._resolving: set[str] = set()
        self.found: list[tuple[int, str]] = []
        """(line, text) of each."""
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append(node)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Call(self, node: ast.Call) -> None:
        for text in shown_by(node):
            self.found += [(node.lineno, ast.unparse(part)) for part in self._unsafe(text)]
        self.generic_visit(node)

    def _unsafe(self, text: ast.expr) -> Iterator[ast.expr]:
        """The parts of a text that may be foreign."""
        if isinstance(text, ast.JoinedStr):
            for part in text.values:
                if isinstance(part, ast.FormattedValue) and not is_number(part):
                    yield from self._unsafe(part.value)
        elif isinstance(text, (ast.Starred, ast.Subscript)):
            yield from self._unsafe(text.value)
        elif isinstance(text, (ast.IfExp, ast.BinOp)):
            for part in (text.body, text.orelse) if isinstance(text, ast.IfExp) else (text.left, text.right):
                yield from self._unsafe(part)
        elif isinstance(text, (ast.List, ast.Tuple)):
            for part in text.elts:
                yield from self._unsafe(part)
        elif isinstance(text, (ast.ListComp, ast.GeneratorExp)):
            yield from self._unsafe(text.elt)
        elif isinstance(text, ast.Call):
            yield from self._unsafe_call(text)
        elif isinstance(text, ast.Name):
            yield from self._unsafe_name(text)
        elif not isinstance(text, ast.Constant):
            yield text

    def _unsafe_call(self, call: ast.Call) -> Iterator[ast.expr]:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in SAFE | SAFE_TABLES:
            return
        if name in ("Text", "Table", "encode") or name in self._resolving:
            return  # the first two show their arguments, which are looked at there
        if name not in self._functions:
            yield call
            return
        self._resolving.add(name)
        self._scopes.append(self._functions[name])
        nodes = ast.walk(self._functions[name])
        returned = [node.value for node in nodes if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom))]
        if not returned or any(value is None or any(True for _ in self._unsafe(value)) for value in returned):
            yield call
        self._scopes.pop()
        self._resolving.discard(name)

    def _unsafe_name(self, name: ast.Name) -> Iterator[ast.expr]:
        """Safe if all that this function assigns to it is, or all that it iterates over."""
        assigned: list[ast.expr] = []
        for node in ast.walk(self._scopes[-1]):
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == name.id for target in node.targets):
                assigned.append(node.value)
            elif isinstance(node, ast.For) and ast.unparse(node.target) == name.id:
                assigned.append(node.iter)
        if not assigned or any(any(True for _ in self._unsafe(value)) for value in assigned if value is not name):
            yield name


def shown_by(call: ast.Call) -> list[ast.expr]:
    """The arguments that a call shows on a terminal."""
    name = ast.unparse(call.func)
    receiver, _, method = name.rpartition(".")
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    titles = [keywords[word] for word in ("title", "caption") if word in keywords]
    if method == "print" or (method == "log" and "console" in receiver) or method in SHOWN_BY_NAME:
        return [*call.args, *titles]
    if method in ("Text", "_print_message"):
        return call.args[:1]
    if method == "Table":
        return [*call.args, *titles]
    if method == "TextColumn":
        is_plain = ast.unparse(keywords.get("markup", call)) == "False"
        return [] if is_plain else [call]
    if method == "update" and receiver.endswith("_bar"):
        return [keywords["line"]] if "line" in keywords else []
    if method == "write" and OUTPUTS.search(receiver):
        return call.args
    if name == "os.write" and ast.unparse(call.args[0]) in ("1", "2"):
        text = call.args[1]
        encoded = isinstance(text, ast.Call) and isinstance(text.func, ast.Attribute) and text.func.attr == "encode"
        return [text.func.value] if encoded else [text]  # type: ignore[attr-defined]
    return []


def is_number(part: ast.FormattedValue) -> bool:
    """True for a value with a format that no text has."""
    return part.format_spec is not None and ast.unparse(part.format_spec)[-2] in "dfge%"


def prints_of(path: Path) -> list[tuple[int, str]]:
    """(line, text) of what a module shows and may be foreign."""
    return Prints(ast.parse(path.read_text("utf-8"))).found


@pytest.mark.slow
def test_what_modules_write_to_the_terminal_goes_through_one_function() -> None:
    found = {
        (str(path.relative_to(ROOT)), text)
        for top in ("rlcore", "plugins", "view")
        for path in (ROOT / top).rglob("*.py")
        if not {"tests", "build", "dist"} & {*path.parts}
        for _, text in prints_of(path)
    }
    assert found == CHECKED_ELSEWHERE


SHOWS = """
import sys
def clip(text):
    text = displayable(text)
    return Text(text if len(text) < 9 else text[:9] + " ...")
def raw(text):
    return text
def main(console, name, rows):
    print(name)
    print("a", 1, displayable(name))
    print("a", name)
    sys.stderr.write(name)
    (to or sys.stdout).write(displayable(name) + "\\n")
    console.print(name)
    console.print(Text(displayable(name)), Text(name))
    console.print(f"{name}")
    console.print(f"{displayable(name)} {number:.3f}")
    console.print(table(name, rows, rows))
    console.print(clip(name), raw(name))
    made = Table(title=name)
    made.add_column(name)
    made.add_column(clip(name))
    for column in ("prompt", "reward"):
        made.add_column(column)
    for row in rows:
        made.add_row(*(cell for cell in row))
        made.add_row(*(clip(cell) for cell in row))
    Text().append_text(name)
    TextColumn("{task.fields[line]}")
    TextColumn("{task.fields[line]}", markup=False)
    self._bar.update(1, line=name)
    os.write(2, f"{name}".encode())
    parser._print_message(name, sys.stderr)
"""


def test_the_search_for_prints_finds_them(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SHOWS)
    lines = SHOWS.splitlines()
    found = [lines[line - 1].strip() for line, _ in prints_of(tmp_path / "a.py")]
    assert found == [
        "print(name)",
        'print("a", name)',
        "sys.stderr.write(name)",
        "console.print(name)",
        "console.print(Text(displayable(name)), Text(name))",
        'console.print(f"{name}")',
        "console.print(clip(name), raw(name))",
        "made = Table(title=name)",
        "made.add_column(name)",
        "made.add_row(*(cell for cell in row))",
        "Text().append_text(name)",
        'TextColumn("{task.fields[line]}")',
        "self._bar.update(1, line=name)",
        'os.write(2, f"{name}".encode())',
        "parser._print_message(name, sys.stderr)",
    ]
