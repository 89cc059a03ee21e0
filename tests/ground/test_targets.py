"""Targets are looked up without importing anything: certain errors are reported, and nothing else."""

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from rlcore.errors.checks.targets import static_problem
from rlcore.testing.packages import importable

SOURCE = """
    import functools
    from json import loads, dumps as to_json

    raise RuntimeError("imported")

    def one(inputs): ...
    def two(a, b=1, *, c=2): ...
    def none(): ...
    def named(inputs, *, other): ...
    def many(*inputs): ...
    async def later(inputs): ...
    def stream(inputs): yield inputs
    def outer(inputs):
        def inner(): yield 1
        return inner
    @functools.cache
    def wrapped(): ...
    def again(): ...
    again = functools.partial(again)
    made = functools.partial(two, 1)
    NUMBER: int = 3
    EMPTY = None
    declared: int
    try:
        import fast as chosen
    except ImportError:
        chosen = None
    if NUMBER:
        def below(inputs): ...
    for looped, (deep, *rest) in []:
        pass
    with open("x") as opened:
        def inside(inputs): ...
    match NUMBER:
        case {"a": matched}:
            pass
    (walrus := one)
    def setter():
        global late
        late = one
    class Thing:
        def method(self): ...
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    with importable(tmp_path / "site") as place:
        yield place


def write(place: Path, name: str, source: str = SOURCE) -> Path:
    """A module below `place`; its packages have no `__init__.py`."""
    path = place / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source), "utf-8")
    return path


MADE = ["looped", "deep", "rest", "opened", "matched"]
"""Names that statements bind to unknown values."""
FINE = ["one", "many", "outer", "wrapped", "again", "made", "chosen", "below", "inside", "walrus", "late", "Thing"]
IMPORTED = ["loads", "to_json"]


@pytest.mark.parametrize("name", FINE + IMPORTED + MADE)
def test_a_name_that_may_be_a_function_is_let_pass(site: Path, name: str) -> None:
    path = write(site, "ref_fine")
    assert static_problem(f"ref_fine:{name}", 1) is None
    assert static_problem(f"{path}:{name}") is None
    assert "ref_fine" not in sys.modules


def test_an_attribute_of_a_class_and_an_async_function_are_let_pass_where_any_callable_is_taken(site: Path) -> None:
    write(site, "ref_dotted")
    for name in ("Thing.method", "later", "stream", "two", "none"):
        assert static_problem(f"ref_dotted:{name}") is None


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("ref_wrong:ona", "module 'ref_wrong' defines no 'ona'; did you mean 'one'?"),
        ("ref_wrong:declared", "defines no 'declared'"),
        ("ref_wrong:NUMBER", "'NUMBER' of module 'ref_wrong' is 3; needs a function"),
        ("ref_wrong:EMPTY", "is None; needs a function"),
        ("ref_wrong:two.three", "needs 'module:attr' or '/abs/file.py:attr'"),
        ("ref_wrong:none", "takes (); needs to take 1 argument by position"),
        ("ref_wrong:named", "takes (inputs, *, other); needs to take 1 argument"),
        ("ref_wrong:later", "is async def; needs a plain function"),
        ("ref_wrong:stream", "is a generator; needs a plain function"),
        ("ref_absent:one", "there is no module 'ref_absent'"),
        ("ref_wrong.below:one", "there is no module 'ref_wrong.below': 'ref_wrong' is not a package"),
        ("ref_space.absent:one", "there is no module 'ref_space.absent'"),
        ("json.absent:one", "there is no module 'json.absent'"),
        ("ref wrong:one", "needs 'module:attr'"),
        ("ref_wrong", "needs 'module:attr'"),
        (":one", "needs 'module:attr'"),
        ("", "found ''"),
        (None, "found None"),
        (len, "found <built-in function len>"),
        ("relative.py:one", "needs an absolute path"),
        ("/no/such/file.py:one", "found no file '/no/such/file.py'"),
    ],
)
def test_what_is_certainly_wrong_is_said(site: Path, reference: object, message: str) -> None:
    write(site, "ref_wrong")
    write(site, "ref_space/here")
    assert message in str(static_problem(reference, 1))
    assert "ref_wrong" not in sys.modules


@pytest.mark.parametrize("source", ["def one(:", "one = 1\n  two = 2", "\0"])
def test_a_file_that_is_not_python_is_refused_with_the_line(site: Path, source: str) -> None:
    path = write(site, "ref_broken", source)
    assert "is not a Python file: " in str(static_problem("ref_broken:one"))
    assert "is not a Python file: " in str(static_problem(f"{path}:one"))


@pytest.mark.parametrize(
    "source",
    [
        "from json import *",
        "def __getattr__(name): ...",
        "globals()['one'] = 1",
        "import sys; sys.modules[__name__].one = 1",
        "exec('def one(x): ...')",
    ],
)
def test_nothing_is_said_of_a_module_that_may_define_names_unseen(site: Path, source: str) -> None:
    write(site, "ref_unseen", source)
    assert static_problem("ref_unseen:one", 1) is None


def test_a_module_in_namespace_packages_is_found_and_its_packages_are_not_imported(site: Path) -> None:
    write(site, "ref_aa/bb/mod")
    assert static_problem("ref_aa.bb.mod:one", 1) is None
    assert "defines no 'gone'" in str(static_problem("ref_aa.bb.mod:gone"))
    assert "there is no module 'ref_aa.bb.other'" in str(static_problem("ref_aa.bb.other:one"))
    assert "ref_aa" not in sys.modules


def test_a_package_that_makes_submodules_itself_is_believed(site: Path) -> None:
    write(site, "ref_lazy/__init__", "import sys\nsys.modules[__name__ + '.made'] = object()")
    assert static_problem("ref_lazy.made:one") is None


LOADED = """
    import functools
    def one(inputs): ...
    def none(): ...
    def named(inputs, *, other): ...
    async def later(inputs): ...
    async def flow(inputs): yield inputs
    def stream(inputs): yield inputs
    @functools.wraps(none)
    def wrapped(*arguments): ...
    made = functools.partial(none)
    NUMBER = 3
"""


def test_a_loaded_module_is_looked_at_as_it_is(site: Path) -> None:
    write(site, "ref_loaded", LOADED)
    __import__("ref_loaded").attached = len
    for name in ("one", "wrapped", "made", "attached"):
        assert static_problem(f"ref_loaded:{name}", 1) is None, name
    for name in ("ona", "NUMBER", "none", "named", "later", "flow", "stream"):
        assert static_problem(f"ref_loaded:{name}", 1), name
    assert "did you mean 'one'?" in str(static_problem("ref_loaded:ona"))


def test_the_functions_of_c_modules_are_let_pass() -> None:
    for reference in ("math:sqrt", "builtins:len", "zlib:crc32", "_testcapi:anything"):
        assert static_problem(reference, 1) is None, reference
