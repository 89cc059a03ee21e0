"""Makes the list of public names of docs/api.md from the sources: `python docs/names.py`.

It reads the names of `rlcore` and `rlcore.testing`, and all names with a docstring in the modules of
`rlcore.contracts`. Nothing is imported: a signature is the text of the source, the same on every Python.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlcore.imports import names_for_checkers

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- begin: python docs/names.py -->", "<!-- end: python docs/names.py -->"
PACKAGES = ("rlcore", "rlcore.testing")
"""Packages whose public names are a list in their `__init__.py`."""
CONTRACTS = "rlcore.contracts"

LONG = 160
"""Characters of a signature above which it is shown without types and defaults."""

type_alias = getattr(ast, "TypeAlias", ())
"""The node of a `type` statement; Python 3.11 has none."""


@dataclass(frozen=True)
class Name:
    """A public name as its module defines it; type variables and the like have no summary."""

    name: str
    signature: str
    """Text of the source, on one line."""
    summary: str
    """The docstring up to its first blank line or full stop."""


def defined(module: str) -> dict[str, Name]:
    """The public names that a module defines, in the order of the source."""
    body = ast.parse(source_of(module).read_text("utf-8")).body
    after: list[ast.stmt | None] = [*body[1:], None]
    found = (_name_of(node, following) for node, following in zip(body, after, strict=True))
    return {name.name: name for name in found if name and not name.name.startswith("_")}


def source_of(module: str) -> Path:
    """The file of a module or package of this repository."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def modules_of_contracts() -> Iterator[str]:
    """Every module of rlcore.contracts."""
    for path in sorted(source_of(CONTRACTS).parent.glob("*.py")):
        if path.stem != "__init__":
            yield f"{CONTRACTS}.{path.stem}"


def names_of(package: str) -> list[tuple[str, Name]]:
    """(module, name) of each public name of a package, by name; ValueError for one that its module does not define."""
    found = []
    for name, module in sorted(names_for_checkers(str(source_of(package))).items()):
        found.append((module, defined_in(module, name)))
    return found


def defined_in(module: str, name: str) -> Name:
    """The name, followed through packages that import it from their modules; ValueError where it is not defined."""
    here = defined(module)
    if name in here:
        return here[name]
    for node in ast.walk(ast.parse(source_of(module).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return defined_in(node.module, name)
    raise ValueError(f"{module}: it does not define {name}")


def _name_of(node: ast.stmt, following: ast.stmt | None) -> Name | None:
    """The name that a statement of a module defines; the docstring of a constant is the statement that follows."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        return Name(node.name, f"{word}{node.name}({_arguments(node)}){result}", _summary(ast.get_docstring(node)))
    if isinstance(node, ast.ClassDef):
        return Name(node.name, _class(node), _summary(ast.get_docstring(node)))
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", getattr(node, "name", None))
    if not isinstance(node, (ast.Assign, ast.AnnAssign, type_alias)) or not isinstance(target, ast.Name):
        return None
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return Name(target.id, target.id, _summary(str(following.value.value)))
    return Name(target.id, target.id, "")


def _class(node: ast.ClassDef) -> str:
    """A dataclass with its fields, a class with what its `__init__` takes, others with their base classes."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return f"{node.name}({_arguments(part).partition(', ')[2]})"
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]
        text = ", ".join(ast.unparse(field) for field in fields)
        return f"{node.name}({text if len(text) <= LONG else ', '.join(ast.unparse(field.target) for field in fields)})"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The parameters, by names alone where types and defaults are too long to read."""
    text = ast.unparse(node.args)
    if len(text) <= LONG:
        return text
    bare = copy.deepcopy(node.args)
    for part in ast.walk(bare):
        if isinstance(part, ast.arg):
            part.annotation = None
    bare.defaults, bare.kw_defaults = [], [None for _ in bare.kw_defaults]
    return ast.unparse(bare)


def _summary(docstring: str | None) -> str:
    """The first sentence, on one line."""
    first = " ".join((docstring or "").strip().split("\n\n")[0].split())
    end = first.find(". ")
    return first if end < 0 else first[: end + 1]


def generated() -> str:
    """The list between the marks."""
    lines = [BEGIN, ""]
    for package in PACKAGES:
        lines += [f"### {package}", "", f"`from {package} import ...`", ""]
        lines += [_line(name, module) for module, name in names_of(package)] + [""]
    for module in modules_of_contracts():
        names = [name for name in defined(module).values() if name.summary]
        if names:
            lines += [f"### {module}", "", _summary(ast.get_docstring(ast.parse(source_of(module).read_text("utf-8"))))]
            lines += ["", *(_line(name) for name in names), ""]
    return "\n".join([*lines, END])


def _line(name: Name, module: str = "") -> str:
    home = f" ({module})" if module else ""
    return f"- `{name.signature}`{home}: {name.summary}" if name.summary else f"- `{name.signature}`{home}"


def page(text: str) -> str:
    """The page with the list in it that the sources make."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{generated()}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
