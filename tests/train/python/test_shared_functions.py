"""Functions from Python that other processes get: by name, by source, or refused in one line."""

import functools
import linecache
import math
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlcore.errors import ConfigError
from rlcore.imports import import_target
from rlcore.reward.scorers import extract
from rlcore.train.python.shared_functions import SharedFunction, share_function

Score = Callable[..., list[float]]


def shared(function: Any) -> SharedFunction:
    return share_function(function, "reward 'f'")


def refusal(function: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        shared(function)
    text = str(refused.value)
    assert text.startswith("reward 'f': ")
    assert "\n" not in text
    return text


def written(tmp_path: Path, function: Any, name: str = "f.py") -> Score:
    """The function as a child has it: imported from its source, and nothing else."""
    found = shared(function)
    assert found.module == ""
    (tmp_path / name).write_text(found.source)
    score: Score = import_target(f"{tmp_path / name}:{found.name}")
    return score


def cell(code: str, **names: Any) -> dict[str, Any]:
    """Remains of a notebook's cell: names of __main__, with a source that `inspect` finds as IPython's."""
    file = f"<cell {abs(hash(code))}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    space = {"__name__": "__main__", **names}
    exec(compile(code, file, "exec"), space)
    return space


def test_a_function_that_can_be_imported_goes_by_its_name() -> None:
    assert shared(extract) == SharedFunction("extract", "rlcore.reward.scorers")


def test_a_cells_function_goes_by_source_with_all_that_it_refers_to(tmp_path: Path) -> None:
    code = (
        "LIMITS = {'low': [1, 2.5], 'none': None}\n"
        "def scaled(value):\n    return ratio * value\n"
        "class Scale:\n    def __init__(self, by):\n        self.by = by\n"
        "def score(completions, start: 'Tensor' = LIMITS['low'][1], **columns):\n"
        "    return [start + scaled(math.sqrt(len(PATTERN.findall(c)))) * Scale(2).by + float(D(c.count('x')))\n"
        "            for c in completions]\n"
    )
    score = cell(code, math=math, PATTERN=re.compile("[aeiou]", re.IGNORECASE), D=Decimal, ratio=3)["score"]
    there = written(tmp_path, score)
    assert there(["Aaax", "", "xx"]) == score(["Aaax", "", "xx"])
    assert shared(score).reason == "it is defined in __main__"


CLASSES = (
    "import dataclasses, enum, functools, typing\n"
    "@dataclasses.dataclass\n"
    "class Weights:\n    right: float = 1.5\n    words: list[str] = dataclasses.field(default_factory=list)\n"
    "@dataclasses.dataclass\n"
    "class Scale(Weights):\n    shared: typing.ClassVar[int] = 2\n\n    def by(self):\n        return self.right * 2\n"
    "class Verdict(enum.Enum):\n    RIGHT = 0.25\n"
    "class Flag(enum.Flag):\n    ON = 2\n"
    "class Parsed(typing.NamedTuple):\n    value: float\n"
    "class Plain:\n    half = 0.5\n"
    "@functools.total_ordering\n"
    "class Ordered:\n    def __lt__(self, other):\n        return True\n"
    "    def __eq__(self, other):\n        return False\n"
)
USES = (
    "def score(completions, **columns):\n"
    "    kept = Flag.ON.value + Verdict.RIGHT.value + Parsed(8.0).value + Plain.half + (Ordered() > Ordered())\n"
    "    return [Weights().right * 100 + Scale().by() + kept + len(dataclasses.fields(Scale)) for _ in completions]\n"
)


def test_dataclasses_enums_and_named_tuples_of_a_script_go_along(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CLASSES + USES)
    score = import_target(f"{tmp_path / 'script.py'}:score")
    assert written(tmp_path, score)(["a"]) == score(["a"]) == [165.75]


def test_those_of_a_notebook_go_along_as_its_newest_cell_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for number, code in enumerate((CLASSES.replace("1.5", "7.0"), CLASSES, "class Weights:\n  1 +\n", USES)):
        file = f"<ipython-input-{number}-of-classes>"
        monkeypatch.setitem(linecache.cache, file, (len(code), None, code.splitlines(keepends=True), file))
        if "1 +" not in code:
            exec(compile(code, file, "exec"), vars(main))
    assert written(tmp_path, main.score)(["a"]) == main.score(["a"]) == [165.75]


def test_a_class_that_no_cell_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("class Typed:\n    half = 0.5\n", vars(main))
    space = cell("def score(completions, **columns):\n    return [Typed.half]\n", Typed=main.Typed)
    assert "the source of 'Typed' cannot be found" in refusal(space["score"])


def test_decorators_go_along(tmp_path: Path) -> None:
    code = (
        "def twice(function):\n"
        "    @functools.wraps(function)\n"
        "    def doubled(*args, **named):\n        return [2 * x for x in function(*args, **named)]\n"
        "    return doubled\n"
        "@twice\n"
        "def score(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    assert written(tmp_path, cell(code, functools=functools)["score"])(["abc"]) == [6.0]


def test_a_function_in_a_function_takes_plain_values_of_its_closure_along(tmp_path: Path) -> None:
    weight, names = 0.5, ("a", "b")

    def score(completions: list[str], **columns: Any) -> list[float]:
        return [weight * sum(completion.count(name) for name in names) for completion in completions]

    assert written(tmp_path, score)(["abba"]) == [2.0]
    assert shared(score).reason == "it is defined in a function"


def test_a_function_of_a_file_that_no_process_can_import_by_name_goes_by_source(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions, **columns):\n    return [1.5] * len(completions)\n")
    score = import_target(f"{tmp_path / 'mine.py'}:score")
    assert "cannot be imported by name" in shared(score).reason
    assert written(tmp_path, score, "other.py")(["a"]) == [1.5]


def test_recursion_and_names_that_do_not_exist_yet_are_left_to_the_call(tmp_path: Path) -> None:
    space = cell("def depth(completions, n=2, **columns):\n    return depth(completions, n - 1) if n else [later]\n")
    with pytest.raises(NameError, match="later"):
        written(tmp_path, space["depth"])([])


class Model:
    """An object that only this process has."""


def test_a_closure_over_a_model_is_refused_by_the_name_of_the_variable() -> None:
    model = Model()

    def score(completions: list[str], **columns: Any) -> list[float]:
        return [float(id(model)) for _ in completions]

    text = refusal(score)
    assert "function 'score' uses 'model', a Model of" in text
    assert "rewards='rewards.py:score'" in text


def test_what_a_helper_uses_is_looked_at_too() -> None:
    space = cell(
        "def helper():\n    return model\ndef score(completions, **columns):\n    return helper()\n", model=Model()
    )
    assert "function 'helper' uses 'model'" in refusal(space["score"])


def test_values_that_text_does_not_give_back_are_refused() -> None:
    for value in (math.nan, [Model()], "x" * (1 << 20), {"a": object()}):
        space = cell("def score(completions, **columns):\n    return value\n", value=value)
        assert "uses 'value'" in refusal(space["score"])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda completions, **columns: [0.0], "a lambda"),
        (functools.partial(extract, text=""), "found a partial of functools"),
        (Model, "needs a function"),
        (3, "found an int"),
        (print, "found a builtin_function_or_method"),
    ],
)
def test_what_is_no_function_with_a_name_is_refused(function: Any, words: str) -> None:
    assert words in refusal(function)


def test_a_lambda_that_the_function_uses_is_refused() -> None:
    space = cell("half = lambda x: x / 2\ndef score(completions, **columns):\n    return [half(1)]\n")
    assert "uses 'half', a lambda" in refusal(space["score"])


def test_a_function_without_source_is_refused() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(completions, **columns):\n    return [0.0]\n", space)
    assert "the source of 'score' cannot be found" in refusal(space["score"])


def test_a_function_whose_file_has_other_lines_is_refused() -> None:
    linecache.cache["<string>"] = (1, None, ["import sys\n"], "<string>")  # as `python -c` leaves them from 3.13 on
    try:
        test_a_function_without_source_is_refused()
    finally:
        del linecache.cache["<string>"]


@pytest.mark.parametrize(
    "text",
    [
        "def score(completions, **columns):\n    return [float(len(completions))]\n",
        "def score(completions, **columns):\n    return [1.0]\n",
        "import math\n\n\ndef score(completions, **columns):\n    return [0.0]\n",
        "def score(\n",
    ],
    ids=["code", "constant", "lines", "broken"],
)
def test_a_source_that_was_edited_since_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def score(completions, **columns):\n    return [0.0]\n")
    score = import_target(f"{file}:score")
    file.write_text(text)
    linecache.checkcache(str(file))
    assert "has changed since it was defined" in refusal(score)


def test_a_module_may_be_imported_by_the_same_cell_or_by_another(tmp_path: Path) -> None:
    """From Python 3.12 on, the code of the function differs between the two."""
    score = "def score(completions, **columns):\n    return [math.sqrt(len(c)) for c in completions]\n"
    together = cell(f"import math\n{score}")["score"]
    apart = cell(score, math=math)["score"]
    apart_lines_together = cell(f"import math\n{score}# as IPython compiles it\n")["score"]
    alone: dict[str, Any] = {"math": math}
    exec(compile(f"\n{score}", apart_lines_together.__code__.co_filename, "exec"), alone)
    for number, function in enumerate((together, apart, alone["score"])):
        function.__module__ = "__main__"
        assert written(tmp_path, function, f"imported_{number}.py")(["abcd"]) == [2.0]


def test_one_name_for_two_things_is_refused() -> None:
    one = cell("def helper():\n    return x\n", x=1)["helper"]
    space = cell("def score(completions, **columns):\n    return [helper() + x]\n", x=2, helper=one)
    assert "'x' stands for two different objects" in refusal(space["score"])
