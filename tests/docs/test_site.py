"""The site that `make docs` builds, in a real browser: readable on any window, and searched without a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import chromium, look, text_of, until, violations

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = ("index", "tutorial", "tutorials/judge", "concepts/plan", "comparison", "metrics", "api", "results/ppo_critic")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with chromium(tmp_path) as driver:
        yield driver


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_a_page_breaks_no_rule_of_accessibility(browser: Any, width: int, theme: str) -> None:
    look(browser, width, theme)
    found = {}
    for page in PAGES:
        browser.get(f"file://{SITE / page}.html")
        # the theme lets the keyboard scroll a block of code when it comes into sight
        found[page] = [line for line in violations(browser) if not line.startswith("scrollable-region-focusable")]
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_no_page_scrolls_sideways_on_a_phone(browser: Any) -> None:
    look(browser, 400, "light")
    wide = []
    for page in PAGES:
        browser.get(f"file://{SITE / page}.html")
        if browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(page)
    assert wide == []


def test_words_are_found_without_a_network(browser: Any) -> None:
    look(browser, 1200, "light")
    browser.get(f"file://{SITE / 'index'}.html")
    browser.find_element("css selector", ".md-search__input").send_keys("staleness")
    until(browser, "document.querySelectorAll('.md-search-result__item').length > 0")
    assert "staleness" in text_of(browser, ".md-search-result__list").lower()
