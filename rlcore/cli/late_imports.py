"""Moves heavy imports of a module into its functions: planning loads a plugin in one file without importing torch."""

import ast
from collections.abc import Iterator, Sequence

HEAVY = ("torch", "rlcore.algo")
"""Packages that are torch, or import it."""

Import = ast.Import | ast.ImportFrom


def is_heavy(node: Import) -> bool:
    """True for an import of a heavy package or of a module in it."""
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    return any(f"{name}.".startswith(f"{heavy}.") for name in names for heavy in HEAVY)


def with_late_imports(source: str, late: Sequence[Import]) -> str:
    """The source, with each top-level function importing the names of `late` that it uses, and quoting annotations.

    The import statements at the top stay.
    """
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            body = [statement for statement in _of(late, _names(node.body)) if statement]
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            indent = " " * node.body[0].col_offset
            if body:
                lines[first.lineno - 1 : first.lineno - 1] = [*(f"{indent}{statement}" for statement in body), ""]
            for annotation in sorted(_annotations(node), key=lambda found: found.col_offset, reverse=True):
                if list(_of(late, _names([annotation]))):
                    line, start, end = lines[annotation.lineno - 1], annotation.col_offset, annotation.end_col_offset
                    lines[annotation.lineno - 1] = f'{line[:start]}"{line[start:end]}"{line[end:]}'
    return "\n".join(lines) + "\n"


def _annotations(node: ast.FunctionDef) -> Iterator[ast.expr]:
    """The annotations of a signature; local annotations are never evaluated."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    yield from (argument.annotation for argument in arguments if argument.annotation is not None)
    if node.returns is not None:
        yield node.returns


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that are read, without those of local annotations."""
    found = set[str]()
    for node in nodes:
        skipped = {
            name for inner in ast.walk(node) if isinstance(inner, ast.AnnAssign) for name in ast.walk(inner.annotation)
        }
        for inner in ast.walk(node):
            signature = set[ast.AST]()
            if isinstance(inner, ast.FunctionDef):
                signature = {name for part in _annotations(inner) for name in ast.walk(part)}
            skipped |= signature
        found |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner not in skipped}
    return found


def _of(late: Sequence[Import], names: set[str]) -> Iterator[str]:
    """The statements that import these names."""
    for node in late:
        used = [alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) in names]
        if used and isinstance(node, ast.ImportFrom):
            yield f"from {node.module} import {', '.join(ast.unparse(alias) for alias in used)}"
        elif used:
            yield f"import {', '.join(ast.unparse(alias) for alias in used)}"
