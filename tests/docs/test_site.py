"""The site that `make docs` builds, in a real browser: readable on any window, and searched without a network."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import chromium, look, text_of, until, violations

SITE = Path(__file__).parents[2] / "build" / "site"
EVERY_PAGE = sorted(page for page in SITE.rglob("*.html") if page.name != "404.html")  # which only a server shows
PAGES = ("index", "tutorial", "tutorials/judge", "concepts/plan", "comparison", "metrics", "faq", "results/ppo_critic")

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _site_is_built() -> None:
    if not SITE.is_dir():
        pytest.fail(f"{SITE} does not exist; `make docs` builds it", pytrace=False)


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
        found[page] = violations(browser)
    assert {page: lines for page, lines in found.items() if lines} == {}


@pytest.mark.timeout(900)  # the page of names takes a minute on a machine with other work
@pytest.mark.parametrize(("width", "theme", "first"), [(400, "light", 0), (1200, "dark", 1)])
def test_every_page_breaks_no_rule_of_accessibility(browser: Any, width: int, theme: str, first: int) -> None:
    """Half of the pages on a phone in light colours, the other half in a wide window in dark ones."""
    look(browser, width, theme)
    pages, found = EVERY_PAGE[first::2], {}
    assert len(pages) > 40
    for page in pages:
        browser.get(f"file://{page}")
        if browser.execute_script("return document.documentElement.scrollWidth > window.innerWidth"):
            found[page.name] = ["scrolls sideways"]
        if lines := violations(browser):
            found[page.name] = lines
    assert found == {}


def test_every_key_of_the_configuration_has_an_anchor() -> None:
    text = (SITE / "configuration.html").read_text("utf-8")
    anchors = set(re.findall(r'<h[23] id="([^"]+)"', text))
    assert len(anchors) > 200
    assert {"actor.lr", "data.sources.name.path", "reward.functions.name.fn", "algo.kl.coef"} <= anchors
    reference = (Path(__file__).parents[2] / "examples" / "reference.yaml").read_text("utf-8")
    keys = re.findall(r"^ +(?:# )?(\w+):", reference, re.MULTILINE)
    assert [key for key in keys if not any(anchor.endswith(f".{key}") for anchor in anchors)] == []


def test_names_in_tables_break_at_punctuation_except_in_the_first_column() -> None:
    text = (SITE / "metrics.html").read_text("utf-8")
    assert "<code>algo.<wbr>dynamic_<wbr>sampling</code>" in text
    assert "<tr>\n<td><code>reward/zero_std_frac</code></td>" in text
    assert "<wbr>" not in text.split("<table>")[0]


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
