"""The rules that hold the code together: who may import whom, who may do what, and hooks as they are documented."""

import ast
import inspect
import re
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from rlcore import builtin, hookspecs
from rlcore.hookspecs import HOOK_NAMES

ROOT = Path(__file__).parent.parent
CORE = ROOT / "rlcore"

ORDER = [
    "errors", "redaction", "timers", "types", "child", "workers", "arrival", "config", "plan", "algo", "batch",
    "hookspecs", "actor", "reference", "rollout", "reward", "critic", "agents", "tokens", "data", "checkpoint",
    "metrics", "track",
    "terminal", "machine", "backends", "cluster", "builtin", "plugins", "launch", "schedule", "evaluate", "report",
    "train", "testing", "cli",
]  # fmt: skip
"""A module may import what stands before it."""
HEAVY = {"torch", "transformers", "accelerate", "datasets", "vllm", "ray", "peft"}
HEAVY_OWNERS = {"algo", "batch", "backends", "data", "tokens", "track", "testing"}
TORCH_FREE = [
    "errors", "redaction", "types", "workers", "config", "plan", "hookspecs", "actor", "reference", "rollout", "reward",
    "critic", "agents", "tokens", "data", "track", "child", "machine", "backends.hf", "cluster", "cluster.local",
    "cluster.child", "cluster.generator", "builtin", "plugins", "launch", "testing", "testing.null",
    "testing.conformance", "cli",
]  # fmt: skip


def sources() -> list[Path]:
    """Every module of the core."""
    return sorted(CORE.rglob("*.py"))


def python_files(top: str) -> list[Path]:
    """Every Python file under a directory of the repository, but for what a build left there."""
    return sorted(path for path in (ROOT / top).rglob("*.py") if "build" not in path.parts)


def part_of(path: Path) -> str:
    """The name in ORDER that a file belongs to; '' for the package's own two files."""
    first = path.relative_to(CORE).parts[0].removesuffix(".py")
    return "" if first in ("__init__", "__main__") else first


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text("utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of the parsed file; most of the rules look at all of them."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports(tree: ast.AST) -> tuple[tuple[str, int], ...]:
    """Modules that are imported and where, but for those under `if TYPE_CHECKING`."""
    found: list[tuple[str, int]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            continue  # no statement is in an expression
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.lineno))
            if node.module == "rlcore":
                found += [(f"rlcore.{alias.name}", node.lineno) for alias in node.names]
        waiting += ast.iter_child_nodes(node)
    return tuple(found)


def broken_order(path: Path, tree: ast.AST) -> list[str]:
    """Imports of the file that go against ORDER."""
    mine = part_of(path)
    found = []
    for module, line in imports(tree):
        parts = module.split(".")
        if parts[0] != "rlcore" or len(parts) < 2 or parts[1] == mine or not mine or parts[1] not in ORDER:
            continue
        if ORDER.index(parts[1]) > ORDER.index(mine):
            found.append(f"{path.relative_to(ROOT)}:{line} imports {module}, which stands after {mine}")
    return found


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted({part_of(path) for path in sources()} - {""} - set(ORDER)) == []


def test_a_module_imports_only_what_stands_before_it() -> None:
    assert [each for path in sources() for each in broken_order(path, tree_of(path))] == []


def test_the_order_check_sees_an_import_that_goes_backwards() -> None:
    wrong = ast.parse("def f():\n    from rlcore.launch import launch\n")
    fine = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlcore.launch import launch\n")
    assert broken_order(CORE / "plan" / "make.py", wrong) == [
        "rlcore/plan/make.py:2 imports rlcore.launch, which stands after plan"
    ]
    assert broken_order(CORE / "plan" / "make.py", fine) == []


def test_pluggy_and_package_metadata_are_read_in_one_place() -> None:
    found = {
        (part_of(path), module)
        for path in sources()
        for module, _ in imports(tree_of(path))
        if module.split(".")[0] == "pluggy" or module.startswith("importlib.metadata")
    }
    assert {part for part, module in found if module == "pluggy"} <= {"hookspecs", "plugins"}
    assert {part for part, module in found if module != "pluggy"} <= {"plugins"}


def test_ray_is_imported_by_its_cluster_only() -> None:
    found = [path for path in sources() for module, _ in imports(tree_of(path)) if module.split(".")[0] == "ray"]
    assert [
        path for path in found if path.relative_to(CORE).parts[:2] not in (("cluster", "ray.py"), ("cluster", "ray"))
    ] == []


def test_heavy_libraries_are_imported_by_their_owners_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources()
        if part_of(path) not in HEAVY_OWNERS and path.relative_to(CORE).parts[:2] != ("cluster", "ray")
        for module, line in imports(tree_of(path))
        if module.split(".")[0] in HEAVY
    ]
    assert found == []


def loaded_by(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after running some code."""
    text = f"import sys\n{code}\nprint(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def test_what_planning_loads_imports_nothing_heavy() -> None:
    assert loaded_by("import rlcore\n" + "\n".join(f"import rlcore.{name}" for name in TORCH_FREE)) == set()


def test_making_a_plan_imports_nothing_heavy() -> None:
    overrides = ["model.path=none", "data.sources.all.path=p.jsonl", "reward.functions.letters.fn=count_letter"]
    code = f"from rlcore.launch import plan_run\nplan_run([], {overrides!r}, ['null'])"
    assert loaded_by(code) == set()


def test_loading_every_installed_plugin_of_ours_imports_nothing_heavy() -> None:
    ours = {entry.value for entry in entry_points(group="rlcore") if entry.value.startswith("rlcore")}
    assert "rlcore.testing.null" in ours
    assert loaded_by("\n".join(f"import {module}" for module in sorted(ours))) == set()


@pytest.mark.parametrize(
    "pattern",
    [r"\b(rlcore[_-])?(reward|agent)[_-]loop\b", r"\b(rlcore[_-])?critic[_-]engine\b"],
    ids=["loops", "critic"],
)
def test_the_core_names_no_plugin(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def calls(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names of what a file calls."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_only_plan_constructs_plans() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} constructs {name}"
        for path in sources()
        if part_of(path) != "plan"
        for name, line in calls(path)
        if name.split(".")[-1] in ("WorkerPlan", "RunPlan")
    ]
    assert found == []


def test_only_launch_and_clusters_start_processes() -> None:
    starts = re.compile(
        r"(^|\.)(Popen|create_subprocess_exec|create_subprocess_shell|fork|posix_spawn|system|Process)$"
    )
    runs = re.compile(r"^subprocess\.\w+$|^multiprocessing\.")
    found = [
        f"{path.relative_to(ROOT)}:{line} calls {name}"
        for path in sources()
        if part_of(path) not in ("launch", "cluster")
        for name, line in calls(path)
        if starts.search(name) or runs.search(name)
    ]
    assert found == []


def test_there_is_no_assert_and_no_bare_except_in_the_core() -> None:
    found = []
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Assert):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} asserts")
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} excepts everything")
    assert found == []


def broad_handlers(path: Path) -> Iterator[int]:
    """Lines of `except Exception` and `except BaseException`."""
    for node in nodes_of(path):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            names = {ast.unparse(each) for each in getattr(node.type, "elts", [node.type])}
            if names & {"Exception", "BaseException"}:
                yield node.lineno


def test_somebody_elses_exceptions_are_caught_in_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        if part_of(path) != "errors"
        for line in broad_handlers(path)
    ]
    assert found == []


def test_every_file_and_function_is_short() -> None:
    found = []
    everything = [
        path for top in ("rlcore", "plugins", "tests", "benchmarks", "examples") for path in python_files(top)
    ]
    assert len(everything) > len(sources()) + 100
    for path in everything:
        lines = code_lines(path)
        if len(lines) > 300:
            found.append(f"{path.relative_to(ROOT)}: {len(lines)} lines of code")
        for node in nodes_of(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = bisect_right(lines, node.end_lineno or 0) - bisect_left(lines, node.lineno)
                if size > 50:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {size} lines of code")
    assert found == []


def code_lines(path: Path) -> list[int]:
    """Numbers of the lines that are neither blank nor comment nor docstring."""
    text = path.read_text("utf-8").splitlines()
    prose: set[int] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [
        number
        for number, line in enumerate(text, 1)
        if number not in prose and line.strip() and not line.strip().startswith("#")
    ]


def documented() -> dict[str, str]:
    """The signature of each hook in docs/hooks.md."""
    text = (ROOT / "docs" / "hooks.md").read_text("utf-8")
    blocks = re.findall(r"^### (rlcore_\w+)\n\n```python\n(def .+)\n```\n", text, re.MULTILINE)
    return dict(blocks)


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_is_documented_with_its_signature_and_implemented_by_the_core(hook: str) -> None:
    function = getattr(hookspecs, hook)
    parameters = [
        f"{name}: {parameter.annotation}" for name, parameter in inspect.signature(function).parameters.items()
    ]
    returned = inspect.signature(function).return_annotation
    assert documented()[hook] == f"def {hook}({', '.join(parameters)}) -> {returned}"
    assert function.__doc__
    assert hasattr(getattr(builtin, hook), "rlcore_impl")


def test_no_hook_is_documented_that_does_not_exist_and_none_is_more_than_a_declaration() -> None:
    assert sorted(documented()) == sorted(HOOK_NAMES)
    for hook in HOOK_NAMES:
        options = vars(getattr(hookspecs, hook))["rlcore_spec"]
        assert not options["firstresult"]
        assert not options["historic"]
