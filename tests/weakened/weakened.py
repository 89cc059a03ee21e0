"""A pytest plugin that weakens the checks of some modules, one at a time, and finds those that no test misses.

`python -m pytest -p weakened --weaken rlcore/plan/pools.py tests/plan/test_plan_offers.py` runs each test as usual and
notes which checks refused something in it. Then each of these is switched off and the test runs again: one that still
passes does not hold that check. The run fails when a check is held by no test, and names it.

A check is a `raise`, a `return` of a text in a function that else returns an empty one (a clause of an error), and
each alternative of an `or` above one of these. Modules are weakened as they are imported, so `-p` comes first. Other
processes are not weakened.
"""

import ast
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

CHECKS: dict[str, bool] = {}
"""By name ('file:line what'): whether a test has been seen to fail without it."""
hit: set[str] = set()
"""Checks that have refused something since this was emptied."""
off = ""
"""The check that is switched off."""


def _holds(name: str, found: Any = True) -> Any:
    """The result of a check: False when it is switched off."""
    if not found or name == off:
        return False
    hit.add(name)
    return found


class Weakener(ast.NodeTransformer):
    """Puts a switch into every check of a module."""

    def __init__(self, path: str) -> None:
        self.path, self.texts = path, [False]

    def switch(self, node: ast.expr | ast.stmt, what: str) -> ast.expr:
        """The expression that says whether the check holds; its argument is to be put in."""
        name, number = f"{self.path}:{node.lineno} {what}", 1
        while name in CHECKS:
            name, number = f"{self.path}:{node.lineno} {what} {number + 1}", number + 1
        CHECKS[name] = False
        return ast.Call(ast.Name("_holds", ast.Load()), [ast.Constant(name)], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        empty = any(isinstance(child, ast.Return) and _is_empty(child.value) for child in ast.walk(node))
        self.texts.append(empty)
        self.generic_visit(node)
        self.texts.pop()
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        last = node.body[-1]
        refuses = isinstance(last, ast.Raise) or (isinstance(last, ast.Return) and self.is_clause(last))
        if refuses and isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
            node.test.values = [self.alternative(value) for value in node.test.values]
        self.generic_visit(node)
        return node

    def alternative(self, node: ast.expr) -> ast.expr:
        call = self.switch(node, f"if {ast.unparse(node):.60}")
        assert isinstance(call, ast.Call)
        call.args.append(node)
        return call

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if node.exc is None:
            return node
        return ast.If(self.switch(node, f"{ast.unparse(node):.60}"), [node], [])

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if not self.is_clause(node) or node.value is None:
            return node
        node.value = ast.IfExp(self.switch(node, f"{ast.unparse(node):.60}"), node.value, ast.Constant(""))
        return node

    def is_clause(self, node: ast.Return) -> bool:
        """True if it returns a text that is not empty, where texts are returned."""
        text = isinstance(node.value, ast.JoinedStr) or (isinstance(node.value, ast.Constant) and node.value.value)
        return self.texts[-1] and bool(text)


def _is_empty(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == ""


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = Weakener(_short(path)).visit(ast.parse(data, str(path)))
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never from a file of bytecode

    def exec_module(self, module: Any) -> None:
        module.__dict__["_holds"] = _holds
        super().exec_module(module)


class _Finder:
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = {str(path) for path in paths}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin not in self.paths:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def _short(path: Any) -> str:
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weaken", action="append", default=[], help="a module whose checks are weakened")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    paths = [Path(name).absolute() for name in early_config.known_args_namespace.weaken]
    loaded = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) in {*map(str, paths)}]
    if loaded:
        raise pytest.UsageError(f"imported before they could be weakened: {', '.join(loaded)}")
    sys.meta_path.insert(0, _Finder(paths))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run the test, and once more without each check that refused something in it and is not known to be held."""
    global off
    hit.clear()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    passed = not any(report.failed for report in runtestprotocol(item, nextitem=nextitem))
    for name in sorted(line for line in hit if not CHECKS[line]) if passed else ():
        off = name
        try:
            item._initrequest()  # type: ignore[attr-defined]
            CHECKS[name] = any(report.failed for report in runtestprotocol(item, log=False, nextitem=nextitem))
        finally:
            off = ""
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    free = [name for name, held in CHECKS.items() if not held]
    terminalreporter.write_line(f"{len(CHECKS)} checks, {len(free)} of them held by no test")
    for name in free:
        terminalreporter.write_line(f"FREE {name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and not all(CHECKS.values()):
        session.exitstatus = 1
