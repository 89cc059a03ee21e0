"""Plugins in one file: `rlcore plugins new NAME --file` writes one, `rlcore plugins package FILE` packages it."""

import ast
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlcore.cli.arguments import Parser
from rlcore.cli.file_offers import used_offers
from rlcore.cli.late_imports import is_heavy, with_late_imports
from rlcore.cli.plugin_package import (
    TRIAL_ENVIRONMENT,
    TRY,
    Offers,
    PluginPackage,
    check_name,
    declared_hooks,
    filled_texts,
    free_place,
    new_directory,
    plugins_of,
    show_commands,
    template,
    try_package,
    write_texts,
)
from rlcore.cli.plugin_trial import run_trial
from rlcore.cli.plugin_update import template_texts, write_record
from rlcore.errors import ConfigError

API_LINE = re.compile(r"^RLCORE_API\b.*\n+", re.MULTILINE)


def write_file(name: str, into: Path, offers: Offers) -> None:
    """Write NAME.py with an example of each kind, check it, train with it, and print the commands."""
    path = free_place(into, f"{name}.py")
    path.write_text(file_text(name, offers), "utf-8")
    check = ["rlcore", "plugins", "--check", f"{name}.py"]
    enabled = [word for plugin in (*plugins_of(offers), f"{name}.py") for word in ("--plugin", plugin)]
    train = ["rlcore", "train", *enabled, *_overrides(name, offers)]
    with TemporaryDirectory(prefix="rlcore-new-") as runs:
        commands = [check, [*train, f"train.dir={runs}"]]
        took_s = run_trial(str(path), str(into), commands, TRIAL_ENVIRONMENT)
    show_commands(path, [shlex.join(check), shlex.join(train), f"rlcore plugins package {name}.py"], 2, took_s)


def file_text(name: str, offers: Offers) -> str:
    """The module: the contents of a package's files, one after another, and the hooks."""
    statements = ["from collections.abc import Sequence", "from rlcore.contracts.hooks import hookimpl"]
    heavy, bodies = list[str](), []
    for kind, offer in offers.items():
        source = template(f"{kind}.py.txt")
        tree = ast.parse(source)
        found = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        late = [node for node in found if is_heavy(node)]
        statements += [ast.unparse(node) for node in found if node not in late] + list(offer.get("imports", ()))
        heavy += [ast.unparse(node) for node in late]
        last = max((node.end_lineno or 0 for node in [tree.body[0], *found]), default=0)
        bodies.append("\n".join(with_late_imports(source, late).splitlines()[last:]).strip())
    if heavy:
        statements.append("from typing import TYPE_CHECKING")
    lines = _joined(line for line in statements if "@name@" not in line)
    standard = [line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names]
    others = [line for line in lines if line not in standard]
    for_checkers = "\n".join(["if TYPE_CHECKING:", *(f"    {line}" for line in _joined(heavy))]) if heavy else ""
    hooks = re.sub(r'"rlcore_@name@\.\w+:(\w+)"', r'f"{__file__}:\1"', "\n".join(declared_hooks(offers)).strip())
    head = f'"""An rlcore plugin in one file: {", ".join(offer["summary"] for offer in offers.values())}."""'
    parts = [head, "\n".join(standard), "\n".join(others), for_checkers, 'RLCORE_API = "1"']
    top = "\n\n".join(part for part in parts if part)
    return (top + "\n\n\n" + "\n\n\n".join([*bodies, hooks]) + "\n").replace("@name@", name)


def _joined(statements: Iterable[str]) -> list[str]:
    """Import statements, one per module, `import x` first."""
    plain, names = set[str](), dict[str, set[str]]()
    for statement in statements:
        words = statement.split(" import ")
        if len(words) == 1:
            plain.add(statement)
        else:
            names.setdefault(words[0], set()).update(words[1].split(", "))
    joined = [f"{module} import {', '.join(sorted(found))}" for module, found in sorted(names.items())]
    return [*sorted(plain), *joined]


def _overrides(name: str, offers: Offers) -> list[str]:
    """The settings of a run with the offers, without a file of prompts."""
    settings: dict[str, Any] = dict(TRY)
    settings["data.sources.train.path"] = str(files("rlcore.testing").joinpath("null_prompts.jsonl"))
    for offer in offers.values():
        settings |= offer["settings"]
    texts = {key: f"[{','.join(value)}]" if isinstance(value, list) else value for key, value in settings.items()}
    lines = [f"{key}={value}" for key, value in texts.items()]
    return [re.sub(r"rlcore_@name@\.\w+:", "@name@.py:", line).replace("@name@", name) for line in lines]


def run(arguments: Sequence[str]) -> int:
    """Write the package of a plugin in one file, run its commands, and print them."""
    parser = Parser("plugins package", "Make a package of a plugin in one file, with a test per offer.")
    parser.add_argument("file", metavar="FILE", help="a .py file that `--plugin FILE` enables; it is not changed")
    parser.add_argument("--into", default=".", metavar="PATH", help="directory to write rlcore-NAME into")
    parsed = parser.parse(arguments)
    file = Path(parsed.file)
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"plugins package: '{file}' is not a .py file; needs a plugin in one file")
    check_name(file.stem)
    directory = new_directory(file.stem, Path(parsed.into))
    offers, tests = used_offers(file)
    package = PluginPackage(file.stem, directory, offers)
    module = f"rlcore_{file.stem}"
    own = {
        f"{module}/__init__.py": packaged(file.read_text("utf-8"), file.stem),
        f"tests/test_{file.stem}.py": tests,
    }
    texts = template_texts(package)
    write_texts(package, texts | filled_texts(package, own))
    write_record(package, texts)
    took_s = try_package(package)
    show_commands(package.directory, package.commands, 3, took_s)
    return 0


def packaged(source: str, name: str) -> str:
    """The source as the module of a package: without RLCORE_API, and targets in it name the module."""
    here = rf"\{{__file__\}}|(?:[^\"'\s]*/)?{name}\.py|{name}|rlcore_file_{name}"
    return re.sub(rf"f?([\"'])(?:{here}):([\w.]+)\1", rf'"rlcore_{name}:\2"', API_LINE.sub("", source))
