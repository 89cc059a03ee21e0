"""Each page of the viewer meets WCAG 2.1 A and AA as far as axe can tell."""

from pathlib import Path
from typing import Any

import pytest
from browsing import Show, look, violations
from made_runs import write_rlcore_run
from test_view_browser import PATHS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_a_page_breaks_no_rule_of_accessibility(
    browser: Any, show: Show, tmp_path: Path, width: int, theme: str
) -> None:
    look(browser, width, theme)
    run = write_rlcore_run(tmp_path / "sums")
    found = {}
    for path in PATHS:
        show(run, f"#{path}")
        found[path] = violations(browser, "best-practice")
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_page_that_breaks_one_is_noticed(browser: Any, show: Show, tmp_path: Path) -> None:
    show(write_rlcore_run(tmp_path / "sums"))
    browser.execute_script("document.querySelector('main').innerHTML = '<input><button></button>'")
    assert {line.split(":")[0] for line in violations(browser)} >= {"label", "button-name"}
