"""docs/api.md names every public name, with the signature and the first sentence that the source has."""

import importlib.util
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def maker() -> ModuleType:
    """The script of docs/ that makes the list."""
    spec = importlib.util.spec_from_file_location("make_names", ROOT / "docs" / "names.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("docs/names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = maker()
MODULES = list(MAKER.modules_of_contracts())


@pytest.mark.slow
def test_the_page_says_what_the_sources_say() -> None:
    text = MAKER.PAGE.read_text("utf-8")
    assert text == MAKER.page(text), "run: python docs/names.py"


@pytest.mark.slow
@pytest.mark.parametrize("package", MAKER.PACKAGES)
def test_every_name_of_a_package_is_listed_and_says_what_it_is(package: str) -> None:
    listed = {name.name: name.summary for _, name in MAKER.names_of(package)}
    assert sorted(listed) == sorted(import_module(package).__all__)
    assert [name for name, summary in listed.items() if not summary] == []


def test_every_module_of_contracts_is_listed() -> None:
    text = MAKER.PAGE.read_text("utf-8")
    assert len(MODULES) > 20
    silent = [module for module in MODULES if not any(name.summary for name in MAKER.defined(module).values())]
    assert [module for module in MODULES if f"### {module}\n" not in text] == silent == []


@pytest.mark.parametrize("module", MODULES)
def test_what_is_listed_of_a_module_is_what_it_defines(module: str) -> None:
    here = import_module(module)
    assert [name for name in MAKER.defined(module) if not hasattr(here, name)] == []
    public = [name for name, value in vars(here).items() if getattr(value, "__module__", "") == module]
    ours = [name for name in public if isinstance(getattr(here, name), type) and not name.startswith("_")]
    assert [name for name in ours if name not in MAKER.defined(module)] == []


def test_signatures_are_those_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ", ".join(f"field_{number}: int = {number}" for number in range(20))
    (tmp_path / "x.py").write_text(
        '"""A module."""\n'
        "SIZE = 3\n"
        '"""Bytes of a page. Not more."""\n'
        "bare = 1\n"
        "def _hidden(): ...\n"
        'def f(a: int, *, b: str = "") -> float:\n    """Adds\n    them. Again."""\n'
        f'def g({many}) -> None:\n    """Has many."""\n'
        'class C(Exception):\n    """An error"""\n'
        'class D:\n    """Made."""\n    def __init__(self, size: int) -> None: ...\n'
        '@dataclass(frozen=True)\nclass E:\n    """Holds."""\n    size: int = 0\n'
    )
    monkeypatch.setattr(MAKER, "ROOT", tmp_path)
    assert [(name.signature, name.summary) for name in MAKER.defined("x").values()] == [
        ("SIZE", "Bytes of a page."),
        ("bare", ""),
        ("f(a: int, *, b: str='') -> float", "Adds them."),
        (f"g({', '.join(f'field_{number}' for number in range(20))}) -> None", "Has many."),
        ("class C(Exception)", "An error"),
        ("D(size: int)", "Made."),
        ("E(size: int = 0)", "Holds."),
    ]


def test_a_name_that_its_module_does_not_define_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rlcore\.types: it does not define nothing"):
        MAKER.defined_in("rlcore.types", "nothing")
