"""Chromium for tests of pages, what they do in it, and what axe finds."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlcore_view import Run

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WCAG = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
Show = Callable[[Run | Path | list[Run], str], None]


@contextmanager
def chromium(profile: Path, *arguments: str) -> Iterator[Any]:
    """A headless browser with an empty profile; its console is kept."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver") or "/usr/bin/chromedriver"))
    driver.set_script_timeout(120)
    try:
        yield driver
    finally:
        driver.quit()


def look(browser: Any, width: int, theme: str) -> None:
    """Shows pages in a window this wide, `light` or `dark`."""
    browser.set_window_size(width, 900)
    preference = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})


def violations(browser: Any, *more: str) -> list[str]:
    """A line per rule of WCAG and element of the page that breaks it, as axe finds them; `more` tags of rules."""
    browser.execute_script(files("selenium_axe_python").joinpath("axe-core", "axe.min.js").read_text("utf-8"))
    options = "{runOnly: arguments[0], resultTypes: ['violations']}"  # on large pages a fraction of the time
    script = f"const done = arguments[1]; axe.run(document, {options}).then(done)"
    found = browser.execute_async_script(script, [*WCAG, *more])["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


def until(browser: Any, condition: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not browser.execute_script(f"return {condition}"):
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def settled(browser: Any) -> None:
    until(browser, "document.querySelector('main').getAttribute('aria-busy') === 'false'")


def text_of(browser: Any, selector: str = "main") -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def press(browser: Any, key: str) -> None:
    before = browser.execute_script("return location.hash")
    browser.switch_to.active_element.send_keys(key)
    if key != "/":
        until(browser, f"location.hash !== '{before}'")
        settled(browser)
