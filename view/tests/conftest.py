"""Makes the modules shared by tests importable, and defines the fixtures of a browser."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlcore_view import Run, read, write_page

sys.path.insert(0, str(Path(__file__).parent))

from browsing import Show, chromium, settled, until


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile"), "--window-size=1200,900") as driver:
        yield driver


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Opens a run at an address; at the end nothing may have been complained of in the browser's console."""
    page = tmp_path / "page.html"

    def opened(run: Run | Path | list[Run], address: str = "#/") -> None:
        if not page.exists():
            write_page(read(run) if isinstance(run, Path) else run, page)
        browser.get("about:blank")
        browser.get(f"file://{page}{address}")
        until(browser, "document.body.dataset.ready === 'true'")
        settled(browser)

    yield opened
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
