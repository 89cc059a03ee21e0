"""Every page in a real browser: it shows what it should, runs nothing that a model wrote, and opens quickly."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import run_of, sample, spoken, write_rlcore_run
from rlcore_view import Run, read, write_page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
OPENS_IN_S = 20.0
"""Ten times what is wanted of 10 000 samples."""
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

Show = Callable[[Run | Path, str], None]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1200,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver") or "/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """Opens a run at an address; at the end nothing may have been complained of in the browser's console."""
    page = tmp_path / "page.html"

    def opened(run: Run | Path, address: str = "#/") -> None:
        if not page.exists():
            write_page(read(run) if isinstance(run, Path) else run, page)
        browser.get("about:blank")
        browser.get(f"file://{page}{address}")
        until(browser, "document.body.dataset.ready === 'true'")
        settled(browser)

    yield opened
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


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


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("#/", ["reward/mean", "configuration", "plan"]),
        ("#/steps", ["Steps", "mean reward", "50 %"]),
        ("#/step/2", ["Step 2", "length", "reward.right", "sums/1"]),
        ("#/groups?sort=spread", ["sums/0", "spread of the reward"]),
        ("#/group/0", ["0+0=", "sample 1", "4é!1", "The same prompt at other steps"]),
        ("#/prompts", ["sums/0", "mixed"]),
        ("#/sample/1", ["0+1=", "4é!1", "shade by", "everything recorded"]),
        ("#/search?q=4%C3%A9!1", ["4 samples with"]),
        ("#/sample/99", ["there is no such sample"]),
    ],
)
def test_each_page_shows_what_it_is_for(
    browser: Any, show: Show, tmp_path: Path, address: str, words: list[str]
) -> None:
    show(write_rlcore_run(tmp_path / "sums"), address)
    shown = text_of(browser)
    assert [word for word in words if word not in shown] == []


def test_tokens_are_shaded_by_their_numbers(browser: Any, show: Show) -> None:
    tokens = spoken("ab\n", advantage=[1.0, -0.5, 0.0], logprob=[-1.0, -2.0, -0.1])
    show(run_of([sample(tokens=tokens)]), "#/sample/0")
    script = (
        "return [...document.querySelectorAll('.token')].map((token) => [token.textContent, token.style.background])"
    )
    pieces = browser.execute_script(script)
    assert [piece for piece, _ in pieces] == ["a", "b", "↵\n"]
    shades = [shade for _, shade in pieces]
    assert len(set(shades)) == 3
    browser.execute_script(
        "const s = document.querySelector('main select'); s.value = 'logprob'; s.dispatchEvent(new Event('change'))"
    )
    until(browser, "location.hash.includes('shade=logprob')")
    settled(browser)
    assert [shade for _, shade in browser.execute_script(script)] != shades


def test_what_a_model_wrote_is_shown_and_never_run(browser: Any, show: Show) -> None:
    prompt = [{"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"x": HOSTILE}]}]
    tokens = spoken("x", advantage=[1.0])
    samples = [
        sample(1, 0, n, float(n), prompt=prompt, completion=HOSTILE, source=HOSTILE, answer=HOSTILE, tokens=tokens)
        for n in (0, 1)
    ]
    run = Run(HOSTILE, "test", samples, [{"step": 1, HOSTILE: 1.0}], config=HOSTILE, notes=[HOSTILE])
    for address in ("#/", "#/steps", "#/groups", "#/group/0", "#/sample/0", "#/prompts", "#/search?q=%3Cscript"):
        show(run, address)
        assert "owned" not in browser.title.replace("document.title='owned'", "")
        assert browser.execute_script("return document.querySelectorAll('main img, main b b, main script').length") == 0
    show(run, "#/sample/0")
    assert HOSTILE in text_of(browser)


def test_characters_that_hide_or_turn_text_are_shown_by_their_code(browser: Any, show: Show) -> None:
    show(run_of([sample(completion="a\u202eb\x1bc\u200bd")]), "#/sample/0")
    assert "a⟨U+202E⟩b␛c⟨U+200B⟩d" in text_of(browser)


def test_the_keyboard_goes_everywhere(browser: Any, show: Show, tmp_path: Path) -> None:
    show(write_rlcore_run(tmp_path / "sums"), "#/")
    for key, address in (("s", "#/steps"), ("g", "#/groups"), ("p", "#/prompts"), ("o", "#/")):
        press(browser, key)
        assert browser.execute_script("return location.hash") == address
    show(tmp_path / "sums", "#/sample/0")
    press(browser, "j")
    assert browser.execute_script("return location.hash") == "#/sample/1"
    press(browser, "u")
    assert browser.execute_script("return location.hash") == "#/group/0"
    press(browser, "/")
    assert browser.execute_script("return document.activeElement.id") == "search"


def test_a_narrow_window_needs_no_scrolling_sideways(browser: Any, show: Show, tmp_path: Path) -> None:
    browser.set_window_size(500, 900)
    try:
        for address in ("#/", "#/group/0", "#/sample/1", "#/groups"):
            show(write_rlcore_run(tmp_path / address[2:].replace("/", "_")), address)
            assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth"), address
    finally:
        browser.set_window_size(1200, 900)


def test_a_page_of_ten_thousand_samples_opens(browser: Any, show: Show, tmp_path: Path) -> None:
    samples = [
        sample(
            1 + n // 64,
            n // 8 % 500,
            n % 8,
            float(n % 2),
            completion=f"response {n} " * 40,
            tokens=spoken("abc" * 60, advantage=[0.5] * 180),
        )
        for n in range(10_000)
    ]
    page = tmp_path / "large.html"
    write_page(run_of(samples), page)
    begin = time.monotonic()
    browser.get(f"file://{page}")
    until(browser, "document.body.dataset.ready === 'true'")
    assert time.monotonic() - begin < OPENS_IN_S
    assert "10000 samples" in text_of(browser, ".top")
