"""Fixtures of every test: nothing is left running, and nothing heavy is imported without need."""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlcore.plan.cpu_products import MAX_ISA
from rlcore.testing.here import letters_here, rewards_here
from rlcore.testing.leaks import leaks

SUITES = ("fault", "real", "gpu")
"""Directories that hold nothing but tests of the mark of that name."""
MARKS = (*SUITES, "browser", "slow")
"""A file with tests of one of these names it: see `MarkedFiles`."""

# Importing the tests and what they test makes objects that stay.
gc.set_threshold(20_000, 20, 20)

# Their asserts count under `python -O`, too, and show what they compared.
pytest.register_assert_rewrite("gpu_machines", "planned_machines")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with leaks():
        yield


@pytest.fixture(autouse=True)
def _the_letters_need_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that are killed, hang or die are for tests with a mark, and for other reward functions."""
    if any(request.node.get_closest_marker(mark) for mark in SUITES):
        yield
    else:
        with letters_here():
            yield


@pytest.fixture
def rewards_in_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reward functions need no process, for tests of what is made of scores; those with a mark have real processes."""
    with nullcontext() if any(request.node.get_closest_marker(mark) for mark in SUITES) else rewards_here():
        yield


class MarkedFiles:
    """With `-m MARK`, files that do not name the mark are passed over: importing them all takes longer than most tests.

    So a mark that a test has from elsewhere is an error, in every run that collects the test.
    """

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        mark = config.option.markexpr
        if mark in MARKS and collection_path.suffix == ".py" and not names_mark(collection_path, mark):
            return True
        return None

    @pytest.hookimpl(tryfirst=True)  # before those of other marks are deselected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {(test.path, mark) for test in items for mark in MARKS if test.get_closest_marker(mark)}
        for path, mark in sorted(found):
            if not names_mark(path, mark):
                raise pytest.UsageError(
                    f"{path}: has tests of the mark '{mark}' and does not name it, so `-m {mark}` would not find them; "
                    f"needs pytest.mark.{mark} in its text"
                )


def pytest_collection_finish() -> None:
    """Modules stay until the end, so the garbage collector need not walk them in every test."""
    gc.collect()
    gc.freeze()


def names_mark(path: Path, mark: str) -> bool:
    """True if the text of a file has `mark.NAME`."""
    return f"mark.{mark}" in path.read_text("utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Tests that do not need a GPU see none, and no CPU multiplies bfloat16, so that defaults are the same on every
    machine; ONEDNN_MAX_CPU_ISA=DEFAULT in the environment lifts the latter."""
    config.pluginmanager.register(MarkedFiles())
    if "not gpu" in config.option.markexpr or config.option.markexpr == "slow":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault(MAX_ISA, "AVX512_CORE_VNNI")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A directory whose tests would all be deselected: each worker would import it, and what it imports."""
    suite = collection_path.name
    if collection_path.parent == Path(__file__).parent and suite in SUITES:
        return True if f"not {suite}" in config.option.markexpr else None
    return None
