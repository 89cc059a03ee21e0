"""A pytest plugin that weakens the checks of some modules, one at a time, and finds those that no test misses.

`python -m pytest -p weakened --weaken rlcore/plan/pools.py tests/plan/test_plan_offers.py` runs each test as usual and
notes which checks refused something in it. Then each of these is switched off and the test runs again: one that still
passes does not hold that check. The run fails when a check is held by no test, and names it. Tests marked slow come
last, and only while there is a check that no other test holds.

A check is

* a `raise`, and a `return` of a text in a function that else returns an empty one or None (a clause of an error),
* each alternative of an `or`, or of a negated `and`, above one of these,
* a statement that calls a function `check_...` or `refuse`, and a call of a function of `RETURNED`,
* a `boundary` around foreign code.

Modules are weakened as they are imported, so `-p` comes first. Other processes are not weakened.
"""

import ast
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
imported: set[str] = set()
"""The files of weakened modules that have been imported."""
unreachable: list[str] = []
"""Parts of the names of checks that no test can hold."""
RETURNED = {"awaitable": 1, "plain": 1, "as_stream": 1, "listed": 0}
RETURNED |= {"checked_metrics": 1, "checked_result": 2, "checked_advantages": 1, "checked_selection": 1}
RETURNED |= {"finite_tensor": 1, "per_token": 1}
"""Functions that return one of their arguments, by position, once it has been looked at."""
BOUNDARIES = ("boundary", "_boundary")


def _holds(name: str, found: Any = True, empty: Any = False) -> Any:
    """The result of a check: `empty` when it is switched off."""
    if not found or name == off:
        return empty
    hit.add(name)
    return found


def _called(name: str, position: int | None, check: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """The result of a call of a check: the argument at `position` when it is switched off."""
    if name == off:
        return None if position is None else arguments[position]
    with _noted(name):
        return check(*arguments, **named)


@contextmanager
def _noted(name: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        hit.add(name)
        raise


class _Around:
    """A boundary that lets everything pass when it is switched off."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self.inner = name, inner

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *ended: Any) -> Any:
        if self.name == off:
            return None
        with _noted(self.name):
            return self.inner.__exit__(*ended)


SWITCHES = {"_weakened_holds": _holds, "_weakened_called": _called, "_weakened_around": _Around}


class Weakener(ast.NodeTransformer):
    """Puts a switch into every check of a module."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.texts: list[tuple[str | None, ...]] = [()]

    def switch(self, node: ast.expr | ast.stmt, what: str, by: str = "_weakened_holds") -> ast.Call:
        """The call that stands for the check; its further arguments are to be put in."""
        name, number = f"{self.path}:{node.lineno} {what}", 1
        while name in CHECKS:
            name, number = f"{self.path}:{node.lineno} {what} {number + 1}", number + 1
        CHECKS[name] = False
        return ast.Call(ast.Name(by, ast.Load()), [ast.Constant(name)], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.texts.append(_empty_of(node))
        self.generic_visit(node)
        self.texts.pop()
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        last = node.body[-1]
        if isinstance(last, ast.Raise) or _is_refusal(last) or (isinstance(last, ast.Return) and self.is_clause(last)):
            node.test = self.alternatives(node.test, top=True)
        self.generic_visit(node)
        return node

    def alternatives(self, node: ast.expr, *, top: bool = False) -> ast.expr:
        """A condition, each of whose alternatives has a switch; one that is all of it has that of the statement."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            node.values = [self.alternatives(value) for value in node.values]
        elif isinstance(node, ast.BoolOp) and top:
            node.values = [self.alternatives(value, top=True) for value in node.values]
        elif _is_negated_and(node):
            node.operand.values = [  # type: ignore[attr-defined]
                ast.UnaryOp(ast.Not(), self.alternatives(ast.copy_location(ast.UnaryOp(ast.Not(), value), value)))
                for value in node.operand.values  # type: ignore[attr-defined]
            ]
        elif isinstance(node, ast.NamedExpr) and isinstance(node.value, ast.BoolOp):
            node.value = self.alternatives(node.value, top=True)
        elif not top:
            call = self.switch(node, f"if {ast.unparse(node):.60}")
            call.args.append(node)
            return call
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if _is_refusal(node) and isinstance(node.value, ast.Call):
            node.value = self.called(node.value, None)
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (position := RETURNED.get(_name_of(node.func))) is not None and len(node.args) > position:
            node = self.called(node, position)
        self.generic_visit(node)
        return node

    def called(self, node: ast.Call, position: int | None) -> ast.Call:
        call = self.switch(node, f"{ast.unparse(node):.60}", "_weakened_called")
        call.args += [ast.Constant(position), node.func, *node.args]
        call.keywords = node.keywords
        return call

    def visit_withitem(self, node: ast.withitem) -> ast.AST:
        expr = node.context_expr
        if isinstance(expr, ast.Call) and _name_of(expr.func) in BOUNDARIES:
            call = self.switch(expr, f"with {ast.unparse(expr):.60}", "_weakened_around")
            call.args.append(expr)
            node.context_expr = call
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if node.exc is None:
            return node
        return ast.If(self.switch(node, f"{ast.unparse(node):.60}"), [node], [])

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self.is_clause(node) and node.value is not None:
            call = self.switch(node, f"{ast.unparse(node):.60}")
            call.args += [node.value, ast.Constant(self.texts[-1][0])]
            node.value = call
        self.generic_visit(node)
        return node

    def is_clause(self, node: ast.Return) -> bool:
        """True if it returns what may be a text that is not empty, where texts are returned."""
        return bool(self.texts[-1]) and not _is_empty(node.value)


def _empty_of(node: ast.FunctionDef) -> tuple[str | None, ...]:
    """The result of a function of texts when nothing is wrong; () for another function."""
    declared = ast.unparse(node.returns) if node.returns else ""
    if declared not in ("str", "str | None"):
        return ()
    children = (child.value for child in ast.walk(node) if isinstance(child, ast.Return))
    values = [part for value in children for part in (ast.walk(value) if isinstance(value, ast.IfExp) else [value])]
    if declared == "str":
        return ("",) if any(map(_is_empty, values)) else ()
    return (None,)


def _is_empty(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in ("", None)


def _is_negated_and(node: ast.expr) -> bool:
    operand = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None
    return isinstance(operand, ast.BoolOp) and isinstance(operand.op, ast.And)


def _is_refusal(node: ast.stmt) -> bool:
    """True for a statement that calls a check."""
    name = _name_of(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
    return name.lstrip("_").startswith("check_") or name == "refuse"


def _name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        imported.add(str(path))
        tree = Weakener(_short(path)).visit(ast.parse(data, str(path)))
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)  # never from a file of bytecode

    def exec_module(self, module: Any) -> None:
        module.__dict__.update(SWITCHES)
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
    parser.addoption("--unreachable", action="append", default=[], help="a part of the name of a check not to report")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    paths = [Path(name).absolute() for name in early_config.known_args_namespace.weaken]
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise pytest.UsageError(f"--weaken names no file: {', '.join(missing)}")
    loaded = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) in {*map(str, paths)}]
    if loaded:
        raise pytest.UsageError(f"imported before they could be weakened: {', '.join(loaded)}")
    unreachable[:] = early_config.known_args_namespace.unreachable
    sys.meta_path.insert(0, _Finder(paths))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _free() -> list[str]:
    """The checks that are held by no test so far and could be."""
    return [name for name, held in CHECKS.items() if not held and not any(text in name for text in unreachable)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_slow)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run the test, and once more without each check that refused something in it and is not known to be held."""
    global off
    if _is_slow(item) and not _free() and len(imported) == len(set(item.config.option.weaken)):
        return True
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
    free = _free()
    terminalreporter.write_line(f"{len(CHECKS)} checks, {len(free)} of them held by no test")
    for name in free:
        terminalreporter.write_line(f"FREE {name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == 0 and _free():
        session.exitstatus = 1
