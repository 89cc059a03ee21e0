"""Every page in a real browser: it shows what it should, runs nothing that a model wrote, and opens quickly."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import run_of, sample, spoken, write_rlcore_run
from rlcore_view import Run, query, read, write_page
from rlcore_view.model import Event
from rlcore_view.serve import Editions, server_of

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

PATHS = (
    "/",
    "/steps",
    "/step/1",
    "/groups",
    "/group/0",
    "/prompts",
    "/prompt/0",
    "/samples",
    "/sample/0",
    "/timeline",
    "/config",
    "/search?q=%3Cscript",
    "/compare",
    "/compare/0",
)

Show = Callable[[Run | Path | list[Run], str], None]


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

    def opened(run: Run | Path | list[Run], address: str = "#/") -> None:
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
        ("#/", ["reward/mean", "last reward", "best reward"]),
        ("#/config", ["actor.lr", "1.0e-05", "the whole plan"]),
        ("#/config?q=nothing", ["0 of 1 keys"]),
        ("#/steps", ["Steps", "mean reward", "50 %", "components of the reward, stacked"]),
        ("#/step/2", ["Step 2", "length", "reward.right", "sums/1"]),
        ("#/groups?sort=spread", ["sums/0", "spread of the reward"]),
        ("#/group/0", ["0+0=", "sample 1", "4é!1", "The same prompt at other steps"]),
        ("#/prompts", ["sums/0", "mixed"]),
        ("#/prompts?kind=always&sort=best", ["no prompts", "always: 0"]),
        ("#/prompt/1", ["sums/1", "step 2"]),
        ("#/samples", ["8 of 8 samples"]),
        ("#/samples?where=reward+%3E+0.5+and+not+failed+and+reward.right+%3D%3D+1&sort=-length", ["4 of 8 samples"]),
        ("#/samples?where=%27sums%2F1%27+in+prompt+or+-1+%3C+advantage+%3C+0", ["6 of 8 samples"]),
        ("#/samples?where=rewards+%3C+1", ["“rewards” is not known here; choose from reward, score"]),
        ("#/samples?where=%28reward+%3C", ["the expression ends too early"]),
        ("#/timeline?step=2", ["version 1", "This run recorded no times"]),
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


@pytest.mark.parametrize(
    ("shade", "words"), [("entropy", "darkest 2.5"), ("difference", "strongest 0.25")], ids=["entropy", "difference"]
)
def test_tokens_are_shaded_by_entropy_and_by_what_the_trainer_computes_otherwise(
    browser: Any, show: Show, shade: str, words: str
) -> None:
    tokens = spoken("ab", logprob=[-1.0, -2.0], old_logprob=[-1.25, -2.0], entropy=[0.5, 2.5])
    show(run_of([sample(tokens=tokens)]), f"#/sample/0?shade={shade}")
    assert words in text_of(browser)


def test_shades_of_what_was_not_recorded_are_not_offered(browser: Any, show: Show) -> None:
    show(run_of([sample(tokens=spoken("ab", logprob=[-1.0, -2.0]))]), "#/sample/0")
    offered = browser.execute_script("return [...document.querySelectorAll('main select option')].map((o) => o.value)")
    assert offered == ["logprob"]


def test_what_a_model_wrote_is_shown_and_never_run(browser: Any, show: Show) -> None:
    prompt = [{"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"x": HOSTILE}]}]
    tokens = spoken("x", advantage=[1.0])
    samples = [
        sample(1, 0, n, float(n), prompt=prompt, completion=HOSTILE, source=HOSTILE, answer=HOSTILE, tokens=tokens)
        for n in (0, 1)
    ]
    run = Run(
        HOSTILE,
        "test",
        samples,
        [{"step": 1, HOSTILE: 1.0}],
        config=f"a:\n  b: {HOSTILE}\n",
        plan={
            "workers": {HOSTILE: {"backend": HOSTILE}},
            "notes": [HOSTILE],
            "components": {HOSTILE: {"name": HOSTILE}},
        },
        events=[Event(HOSTILE, HOSTILE, 0.0, 1.0, HOSTILE, 1, ("all/0", 0, 0, 0), 1)],
        alerts=[HOSTILE],
        notes=[HOSTILE],
    )
    for path in PATHS:
        address = f"#{path}"
        show([run, replace(run, name=f"{HOSTILE} 2", config="a:\n  b: c\n")], address)
        assert "owned" not in browser.title.replace("document.title='owned'", "")
        assert browser.execute_script("return document.querySelectorAll('#app img, #app b b, #app script').length") == 0
    show(run, "#/sample/0")
    assert HOSTILE in text_of(browser)
    assert len(browser.find_elements("css selector", ".track")) == 1


def test_characters_that_hide_or_turn_text_are_shown_by_their_code(browser: Any, show: Show) -> None:
    show(run_of([sample(completion="a\u202eb\x1bc\u200bd")]), "#/sample/0")
    assert "a⟨U+202E⟩b␛c⟨U+200B⟩d" in text_of(browser)


def test_the_keyboard_goes_everywhere(browser: Any, show: Show, tmp_path: Path) -> None:
    show(write_rlcore_run(tmp_path / "sums"), "#/")
    pages = {"s": "steps", "g": "groups", "p": "prompts", "a": "samples", "t": "timeline", "c": "config", "o": ""}
    for key, address in ((key, f"#/{page}") for key, page in pages.items()):
        press(browser, key)
        assert browser.execute_script("return location.hash") == address
    show(tmp_path / "sums", "#/sample/0")
    press(browser, "j")
    assert browser.execute_script("return location.hash") == "#/sample/1"
    press(browser, "u")
    assert browser.execute_script("return location.hash") == "#/group/0"
    press(browser, "u")
    assert browser.execute_script("return location.hash") == "#/step/1"
    press(browser, "/")
    assert browser.execute_script("return document.activeElement.id") == "search"


def test_a_phones_width_needs_no_scrolling_sideways(browser: Any, show: Show, tmp_path: Path) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        run = read(write_rlcore_run(tmp_path / "sums"))
        for path in PATHS:
            show([run, replace(run, name="other")], f"#{path}")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, path
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_that_can_be_reached_or_is_a_picture_has_a_name(browser: Any, show: Show, tmp_path: Path) -> None:
    run = read(write_rlcore_run(tmp_path / "sums"))
    event = Event("generate", "generate", 0.0, 1.0, "sums/0", 2, ("sums/0", 1, 0, 0), 1)
    for path in PATHS:
        show([replace(run, events=[event]), replace(run, name="other")], f"#{path}")
        nameless = browser.execute_script(
            "return [...document.querySelectorAll('a, button, input, select, summary, [role=img], [role=region], nav')]"
            ".filter((found) => !found.closest('[hidden]') && !(found.getAttribute('aria-label') || found.textContent"
            " || found.closest('label')?.textContent).trim()).map((found) => found.outerHTML)"
        )
        assert nameless == [], path


def test_words_that_differ_from_the_best_sample_are_marked(browser: Any, show: Show) -> None:
    samples = [sample(1, 0, 0, 0.0, completion="it is a dog"), sample(1, 0, 1, 1.0, completion="it is a big cat")]
    show(run_of(samples), "#/group/0")
    script = (
        "return [...document.querySelectorAll('.card')].map((card) => [card.querySelector('a').textContent,"
        " [...card.querySelectorAll('ins, del')].map((word) => [word.tagName, word.textContent])])"
    )
    assert browser.execute_script(script) == [["sample 1", []], ["sample 0", [["DEL", "big cat"], ["INS", "dog"]]]]
    show(run_of(samples), "#/group/0?marks=none&order=recorded")
    assert browser.execute_script(script) == [["sample 0", []], ["sample 1", []]]


def test_runs_that_differ_in_their_seed_are_one_curve_with_a_band(browser: Any, show: Show) -> None:
    config = "train:\n  seed: {}\nactor:\n  lr: {}\n"
    runs = [
        replace(
            run_of([sample(1, 0, 0, score)], reward__mean=[0.1, score]),
            name=f"run {number}",
            config=config.format(*key),
        )
        for number, (score, *key) in enumerate([(0.2, 0, 1), (0.6, 1, 1), (0.9, 0, 2)])
    ]
    show(runs, "#/compare?a=0&b=2")
    assert browser.execute_script("return document.querySelectorAll('main .chart polygon').length") == 1
    shown = text_of(browser)
    assert "run 0 and 1 more seed" in shown
    assert "actor.lr112" in shown
    assert "+0.7" in shown
    show(runs, "#/compare/0?a=0&b=2")
    assert browser.execute_script("return document.querySelectorAll('.sides .card').length") == 2
    show(runs, "#2/groups")
    assert browser.execute_script("return document.querySelector('h1 select').selectedOptions[0].text") == "run 2"
    assert browser.execute_script("return document.querySelector('.list a').getAttribute('href')") == "#2/group/0"


def test_the_timeline_has_a_bar_per_event_coloured_by_version(browser: Any, show: Show) -> None:
    events = [
        Event("generate", "generate", 10.0, 2.0, "all/0", 1, ("all/0", 0, 0, 0), 0),
        Event("generate", "generate", 12.0, 2.0, "all/0", 1, ("all/0", 0, 0, 0), 1),
        Event("judge", "reward", 14.0, 1.0, "all/0", 1, ("all/0", 0, 0, 0)),
        Event("update", "train", 15.0, 5.0, "actor", 1),
        Event("update", "train", 99.0, 5.0, "actor", 2),
    ]
    show(replace(run_of([sample()]), events=events), "#/timeline?step=1")
    bars = browser.execute_script(
        "return [...document.querySelectorAll('.track')].map((track) => [track.querySelector('.name').textContent,"
        " [...track.querySelectorAll('i')].map((bar) => [bar.title, bar.style.left, bar.style.background])])"
    )
    assert [(name, len(found)) for name, found in bars] == [("actor", 1), ("all/0", 3)]
    [[first, left, colour], [_, later, other], [judge, *_]] = bars[1][1]
    assert (first, left, later) == ("generate: 2 s from 0 s, weights of version 0", "0%", "20%")
    assert judge == "judge: 1 s from 4 s"
    assert colour != other


def test_a_very_long_text_and_many_tokens_are_shown_in_part_until_asked_for(browser: Any, show: Show) -> None:
    text = "long " * 2_000_000
    tokens = spoken("x" * 6000, advantage=[1.0] * 6000)
    show(run_of([sample(completion=text, tokens=tokens), sample(1, 0, 1, 1.0, completion=f"no {text}")]), "#/sample/0")
    assert len(text_of(browser, ".assistant pre")) < 60_000
    assert browser.execute_script("return document.querySelectorAll('.token').length") == 5000
    for button in browser.find_elements("css selector", "main button"):
        if button.is_displayed():
            button.click()
    assert len(text_of(browser, ".assistant pre")) == len(text)
    assert browser.execute_script("return document.querySelectorAll('.token').length") == 6000
    show(run_of([sample()]), "#/group/0")
    assert len(text_of(browser)) < 300_000


def test_a_page_that_is_served_follows_the_run_and_keeps_its_address(browser: Any, tmp_path: Path) -> None:
    run = write_rlcore_run(tmp_path / "sums", steps=1)
    server, address = server_of(Editions([run], lambda: [read(run)], 100.0))
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            browser.get(f"{address}#/samples?where=reward+%3E+0.5")
            until(browser, "document.body.dataset.ready === 'true'")
            assert "2 of 4 samples" in text_of(browser)
            old, new = (run / "trajectories" / f"step_00000{step}.jsonl" for step in (1, 2))
            new.write_text(old.read_text())
            until(browser, "document.querySelector('main').textContent.includes('4 of 8 samples')")
        finally:
            server.shutdown()
            thread.join()
    until(browser, "document.querySelector('.live').textContent === 'the server is gone'")
    browser.get("about:blank")
    browser.get_log("browser")


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("reward < 0.5", 4),
        ("reward >= 1 and truncated", 4),
        ("not truncated", 4),
        ("step == 2 and prompt == 'sums/1'", 2),
        ("reward.right == 1 and reward.short == 1", 4),
        ("-1 < advantage < 0", 4),
        ("reward.unknown < 1", 0),
        ("lane == 'eval' or failed", 0),
        ("'1' not in prompt", 4),
        ("not (step == 1 or step == 2)", 0),
    ],
)
def test_an_expression_finds_what_the_command_finds(
    browser: Any, show: Show, tmp_path: Path, where: str, found: int
) -> None:
    run = read(write_rlcore_run(tmp_path / "sums"))
    show(run)
    count = browser.execute_script(
        "const test = filterOf(arguments[0]); return indicesWhere((at) => test(run, at)).length", where
    )
    assert count == found == sum(map(query.parse(where), run.samples))


@pytest.mark.parametrize(
    ("where", "found"), [("reward < 1", 0), ("reward > -1", 0), ("-reward < 1", 0), ("step < 2", 1)]
)
def test_a_comparison_with_a_number_that_is_missing_is_false(browser: Any, show: Show, where: str, found: int) -> None:
    show(run_of([sample(1, 0, 0, None)]), f"#/samples?where={where.replace(' ', '+')}")
    assert f"{found} of 1 samples" in text_of(browser)


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
    assert "10,000 samples" in text_of(browser, ".top")
