"""The plugin is made of public names of rlcore, and of no other plugin."""

import ast
from pathlib import Path

import rlcore_vllm

import rlcore

PUBLIC = ("rlcore.contracts.", "rlcore.config", "rlcore.errors", "rlcore.types")
"""Modules that a plugin may import, beside the names of `rlcore.__all__`."""


def imports(text: str) -> list[str]:
    """Every rlcore module or name that a file imports, wherever the import stands."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0].startswith("rlcore") and name.split(".")[0] != "rlcore_vllm"]


def is_public(name: str) -> bool:
    """True for a name of `rlcore.__all__`, and for what is in a public module."""
    return name.startswith(PUBLIC) or name.removeprefix("rlcore.") in rlcore.__all__


def test_the_plugin_imports_public_names_only() -> None:
    files = sorted(Path(rlcore_vllm.__file__).parent.rglob("*.py"))
    assert len(files) > 10
    assert [
        (file.name, name) for file in files for name in imports(file.read_text("utf-8")) if not is_public(name)
    ] == []


def test_the_check_sees_an_internal_module_inside_a_function_and_another_plugin() -> None:
    text = "def f():\n    from rlcore.cluster import child\nimport rlcore_reward_loop\nfrom rlcore import Tokens\n"
    assert [name for name in imports(text) if not is_public(name)] == ["rlcore_reward_loop", "rlcore.cluster.child"]
