"""Chromium for tests of pages, and what they do in it."""

import time
from collections.abc import Callable
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
Show = Callable[[Run | Path | list[Run], str], None]


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
