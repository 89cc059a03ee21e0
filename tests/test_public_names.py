"""`from rlcore import X`: public names, imported when they are first used."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import rlcore

ROOT = Path(__file__).parent.parent

PUBLIC = {
    "rlcore": "the names of its __all__",
    "rlcore.contracts": "interfaces, offers and requests",
    "rlcore.config": "the settings of a run",
    "rlcore.types": "the data of a step",
    "rlcore.errors": "errors and the boundary around foreign code",
    "rlcore.imports": "from 'module:attr' to the object",
    "rlcore.aio": "inbox, dispatcher, timers and stopwatch",
    "rlcore.errors.redaction": "secrets and foreign text in errors and logs",
    "rlcore.algo": "estimators, losses, masks and aggregation",
    "rlcore.engines.hf": "the training engine on transformers, for models and losses of a plugin's own",
    "rlcore.cluster.kit": "the parts that clusters are built from",
    "rlcore.testing": "fakes and conformance suites",
}
"""All that plugins and examples import of rlcore; docs/architecture.md says the same."""
PACKAGES = ("rlcore.contracts", "rlcore.algo", "rlcore.testing")
"""Of these every module is public; of other packages only the names in `__all__`."""


def test_every_public_name_exists_and_is_where_type_checkers_look_for_it() -> None:
    tree = ast.parse((ROOT / "rlcore" / "__init__.py").read_text("utf-8"))
    checked = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(checked) == sorted(rlcore.__all__)
    assert len(checked) > 50
    for name, module in checked.items():
        value = getattr(rlcore, name)
        assert not isinstance(value, ModuleType)
        assert getattr(sys.modules[str(module)], name) is value


def test_train_is_the_function_also_after_its_package_was_imported() -> None:
    import rlcore.train
    from rlcore.train import run_training

    assert callable(run_training)
    assert callable(rlcore.train)
    assert rlcore.train is sys.modules["rlcore.train"].train


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rlcore.nothing  # noqa: B018


def test_importing_rlcore_imports_nothing_else() -> None:
    code = "import rlcore, sys; print([m for m in sys.modules if m.startswith('rlcore.')], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.strip() == "[] False", done.stderr


def internal_imports(tree: ast.AST) -> list[tuple[str, int]]:
    """Imports of what is not public, wherever they stand, with their lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names if not is_public(alias.name)]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found += [
                (f"{node.module}.{alias.name}", node.lineno)
                for alias in node.names
                if not is_public(node.module, alias.name)
            ]
    return found


def is_public(module: str, name: str = "") -> bool:
    """False for a module of rlcore that is not in PUBLIC, and for a name that its package does not offer."""
    if module.split(".")[0] != "rlcore":
        return True
    if any(f"{module}.".startswith(f"{package}.") for package in PACKAGES):
        return True
    path = ROOT.joinpath(*module.split("."), name)
    if name and (path.is_dir() or path.with_suffix(".py").is_file()) and name not in exported(module):
        return f"{module}.{name}" in PUBLIC
    offered = exported(module)
    return module in PUBLIC and (not offered or not name or name in offered)


def exported(module: str) -> list[str]:
    """The `__all__` of a public module; empty where it has none."""
    return list(getattr(import_module(module), "__all__", ())) if module in PUBLIC else []


@pytest.mark.slow
def test_plugins_and_examples_import_public_names_only() -> None:
    trees = [*sorted((ROOT / "plugins").glob("*")), ROOT / "examples"]
    for tree in trees:
        is_examples = tree.name == "examples"
        found = [
            f"{path.relative_to(ROOT)}:{line} imports {name}"
            for path in sorted(tree.rglob("*.py"))
            if not {"tests", "build"} & set(path.relative_to(tree).parts) or is_examples
            for name, line in internal_imports(ast.parse(path.read_text("utf-8")))
        ]
        assert found == []


def test_the_check_of_imports_sees_an_internal_module_and_a_name_that_is_not_offered() -> None:
    text = (
        "import rlcore.cluster.child\n"
        "def f():\n    from rlcore.train.step_batcher import x\n"
        "from rlcore import Reward, reward\n"
        "from rlcore.config import RunConfig, load\n"
        "from rlcore.contracts.workers import Worker\n"
    )
    assert sorted(internal_imports(ast.parse(text))) == [
        ("rlcore.cluster.child", 1),
        ("rlcore.config.load", 5),
        ("rlcore.reward", 4),
        ("rlcore.train.step_batcher.x", 3),
    ]


def test_the_list_of_public_modules_is_documented() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## What is public")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(rlcore[a-z.]*?)(?:\.\*)?` \|", text, re.MULTILINE)) == sorted(PUBLIC)
