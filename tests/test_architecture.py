"""The rules that hold the code together: who may import whom, and who may do what."""

import ast
import re
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "rlcore"

LAYERS = [
    ["types"], ["errors"], ["imports", "aio"],
    ["config"], ["contracts"], ["plan"],
    ["data", "algo", "agents", "reward"],
    ["cluster", "engines"],
    ["runtime"], ["report"], ["plugins"], ["train"], ["testing"], ["cli"],
]  # fmt: skip
"""A module may import what is in its own room, and in the layers before its own."""
LEVEL = {room: number for number, layer in enumerate(LAYERS) for room in layer}
HEAVY = {"torch", "transformers", "accelerate", "datasets", "vllm", "ray", "peft"}
HEAVY_OWNERS = {"algo", "engines", "data", "report", "testing"}
HEAVY_NAMES = (
    "weights",
    "weight_memory",
    "weight_groups",
    "weight_ipc",
    "weight_stream",
    "reward_models",
    "templates",
    "template_child",
)
HEAVY_CONTRACTS = {("contracts", f"{name}.py") for name in HEAVY_NAMES}
"""Helpers for engines, which import what they need in their functions: TORCH_FREE has them, too."""
TORCH_FREE = [
    "errors", "types", "imports", "aio", "errors.checks.data", "errors.checks.arrays", "config", "contracts",
    "contracts.workers", "contracts.clusters", "contracts.hooks", "contracts.actor", "contracts.reference",
    "contracts.rollout", "contracts.critic", "contracts.agents", "contracts.weights", "contracts.stop_scan",
    "contracts.reward_models", "contracts.sampled_row", "contracts.reward_manager", "contracts.reward_replica",
    "contracts.components", "contracts.tokens", "plan", "data", "data.tokenizer", "agents.single_turn",
    "reward.functions", "cluster.child", "cluster.child_main", "cluster.local", "cluster.kit", "engines.hf",
    "runtime.machine", "runtime.launch", "runtime.rollout_service", "report.core_trackers",
    "plugins.builtin", "plugins.planning", "testing", "testing.null", "testing.conformance", "cli",
]  # fmt: skip


def sources() -> list[Path]:
    """Every module of the core."""
    return sorted(CORE.rglob("*.py"))


def python_files(top: str) -> list[Path]:
    """Every Python file under a directory of the repository, except for what a build left there."""
    return sorted(path for path in (ROOT / top).rglob("*.py") if "build" not in path.parts)


def part_of(path: Path) -> str:
    """The room that a file belongs to; '' for the package's own two files."""
    first = path.relative_to(CORE).parts[0].removesuffix(".py")
    return "" if first in ("__init__", "__main__") else first


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    """They are a million objects, through which the garbage collector would go in every later test."""
    yield
    for kept in (tree_of, nodes_of, imports):
        kept.cache_clear()


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
    """Modules that are imported and where, those under `if TYPE_CHECKING` included: types have a room as well."""
    found: list[tuple[str, int]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr):
            continue  # no statement is in an expression
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        waiting += ast.iter_child_nodes(node)
    return tuple(found)


def broken_order(path: Path, tree: ast.AST) -> list[str]:
    """Imports of the file that go against LAYERS."""
    mine = part_of(path)
    found = set()
    for module, line in imports(tree):
        parts = module.split(".")
        if parts[0] != "rlcore" or len(parts) < 2 or parts[1] == mine or not mine or parts[1] not in LEVEL:
            continue
        if LEVEL[parts[1]] >= LEVEL[mine]:
            found.add(f"{path.relative_to(ROOT)}:{line} imports {parts[1]}, which does not stand before {mine}")
    return sorted(found)


def test_every_room_has_a_layer_and_there_are_few() -> None:
    rooms = {part_of(path) for path in sources()} - {""}
    assert sorted(rooms ^ set(LEVEL)) == []
    assert len([path for path in CORE.iterdir() if path.name != "__pycache__"]) <= 22


@pytest.mark.slow
def test_a_module_imports_only_what_stands_in_the_layers_before_it() -> None:
    assert [line for path in sources() for line in broken_order(path, tree_of(path))] == []


def test_the_layer_check_sees_an_import_that_goes_backwards_or_sideways() -> None:
    wrong = ast.parse("def f():\n    from rlcore.runtime.launch import launch\n")
    typed = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlcore.data import PromptOrder\n")
    assert broken_order(CORE / "plan" / "planner.py", wrong) == [
        "rlcore/plan/planner.py:2 imports runtime, which does not stand before plan"
    ]
    assert broken_order(CORE / "reward" / "stream.py", typed) == [
        "rlcore/reward/stream.py:3 imports data, which does not stand before reward"
    ]


def dotted(path: Path) -> str:
    """The name under which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def needed(tree: ast.AST, known: Container[str]) -> set[str]:
    """The modules that a module imports, by whatever way, under `if TYPE_CHECKING` too; of `known` only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else str(node.module) for name in whole}
    return {name for name in found if name in known}


def circles(trees: dict[str, ast.AST]) -> dict[str, list[str]]:
    """Modules that import each other, with what they import of each other; the package itself left out."""
    needs = {name: needed(tree, trees) - {name, "rlcore"} for name, tree in trees.items()}
    while True:
        used = set().union(*needs.values()) if needs else set()
        ends = {name for name, wanted in needs.items() if not wanted & needs.keys() or name not in used}
        if not ends:
            return {name: sorted(wanted & needs.keys()) for name, wanted in sorted(needs.items())}
        needs = {name: wanted for name, wanted in needs.items() if name not in ends}


@pytest.mark.slow
def test_no_modules_import_each_other_not_even_for_their_types() -> None:
    everything: dict[str, ast.AST] = {dotted(path): tree_of(path) for path in sources()}
    del everything["rlcore"]
    assert circles(everything) == {}


def test_the_circle_check_sees_one_that_is_there_for_types_only() -> None:
    there = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlcore.b import B\n"
    back = "def f():\n    from rlcore import a\n"
    trees: dict[str, ast.AST] = {
        "rlcore.a": ast.parse(there),
        "rlcore.b": ast.parse(back),
        "rlcore.c": ast.parse(there),
    }
    assert circles(trees) == {"rlcore.a": ["rlcore.b"], "rlcore.b": ["rlcore.a"]}


def test_pluggy_and_package_metadata_are_read_in_one_place() -> None:
    found = {
        (part_of(path), module)
        for path in sources()
        for module, _ in imports(tree_of(path))
        if module.split(".")[0] == "pluggy" or module.startswith("importlib.metadata")
    }
    assert {part for part, module in found if module == "pluggy"} <= {"contracts", "plugins"}
    assert {part for part, module in found if module != "pluggy"} <= {"plugins"}


def test_heavy_libraries_are_imported_by_their_owners_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources()
        if part_of(path) not in HEAVY_OWNERS and path.relative_to(CORE).parts[:2] not in HEAVY_CONTRACTS
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


@pytest.mark.slow
def test_what_planning_loads_imports_nothing_heavy() -> None:
    assert loaded_by("import rlcore\n" + "\n".join(f"import rlcore.{name}" for name in TORCH_FREE)) == set()


@pytest.mark.slow
def test_making_a_plan_imports_nothing_heavy() -> None:
    overrides = ["model.path=none", "data.sources.all.path=p.jsonl", "reward.functions.letters.fn=count_letter"]
    code = f"from rlcore.plugins.planning import plan_run\nplan_run([], {overrides!r}, ['null'])"
    assert loaded_by(code) == set()


@pytest.mark.slow
def test_loading_every_installed_plugin_of_ours_imports_nothing_heavy() -> None:
    ours = {entry.value for entry in entry_points(group="rlcore") if entry.value.startswith("rlcore")}
    assert "rlcore.testing.null" in ours
    assert loaded_by("\n".join(f"import {module}" for module in sorted(ours))) == set()


@pytest.mark.parametrize(
    "pattern",
    [
        r"\b(rlcore[_-])?(reward|agent)[_-]loop\b",
        r"\b(rlcore[_-])?critic[_-]engine\b",
        r"(?i)vllm",
        r"(?i)(\b|_)ray(\b|_)",
    ],
    ids=["loops", "critic", "vllm", "ray"],
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


@pytest.mark.slow
def test_only_plan_constructs_plans() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} constructs {name}"
        for path in sources()
        if part_of(path) != "plan"
        for name, line in calls(path)
        if name.split(".")[-1] in ("WorkerPlan", "RunPlan")
    ]
    assert found == []


@pytest.mark.slow
def test_only_clusters_and_chat_templates_start_processes() -> None:
    starts = re.compile(
        r"(^|\.)(Popen|create_subprocess_exec|create_subprocess_shell|fork|posix_spawn|system|Process)$"
    )
    runs = re.compile(r"^subprocess\.\w+$|^multiprocessing\.")
    found = [
        f"{path.relative_to(ROOT)}:{line} calls {name}"
        for path in sources()
        if part_of(path) != "cluster" and dotted(path) != "rlcore.contracts.templates"
        for name, line in calls(path)
        if starts.search(name) or runs.search(name)
    ]
    assert found == []


@pytest.mark.slow
def test_no_public_class_has_the_name_of_another() -> None:
    homes: dict[str, list[str]] = {}
    for path in [*sources(), *(path for path in python_files("plugins") if "tests" not in path.parts)]:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


MIRRORS = {
    frozenset({"contracts", "testing/suites"}), frozenset({"engines/hf/train", "testing/suites"}),
    frozenset({"contracts", "plan"}), frozenset({"plan", "runtime"}), frozenset({"plan", "engines/hf/train"}),
}  # fmt: skip
"""Pairs of rooms whose modules may have one name: an interface and its suite; an interface and the plan of its offers;
what the plan chooses and what carries it out."""


def test_a_module_has_the_name_of_another_only_where_it_mirrors_it() -> None:
    """So a line of a traceback names one file: 'contracts/actor.py' and 'testing/suites/actor.py' say one thing."""
    rooms: dict[str, list[str]] = {}
    for path in sources():
        if not path.name.startswith("__"):
            rooms.setdefault(path.name, []).append(path.parent.relative_to(CORE).as_posix())
    twice = {name: where for name, where in rooms.items() if len(where) > 1 and frozenset(where) not in MIRRORS}
    assert not twice, twice


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
            names = {ast.unparse(elt) for elt in getattr(node.type, "elts", [node.type])}
            if names & {"Exception", "BaseException"}:
                yield node.lineno


def test_exceptions_of_foreign_code_are_caught_in_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        if path != CORE / "errors" / "__init__.py"
        for line in broad_handlers(path)
    ]
    assert found == []


ROOMS = ("rlcore", "plugins", "view", "tests", "benchmarks", "examples", "docs")


@pytest.mark.slow
def test_every_file_and_function_is_short() -> None:
    found = []
    everything = [path for top in ROOMS for path in python_files(top)]
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
