"""`from rlcore import X`: public names, imported when they are first used."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rlcore

ROOT = Path(__file__).parent.parent


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
