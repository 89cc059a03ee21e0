"""Every page in a real browser: it shows what it should, and runs nothing that a model wrote."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import Show, press, settled, text_of, until
from made_runs import run_of, sample, spoken, write_rlcore_run
from rlcore_view import Run, read
from rlcore_view.model import Event

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
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
        ("#/samples?where=rewards+%3C+1", ["'rewards' is not known here; choose from reward, score"]),
        ("#/samples?where=%28reward+%3C", ["the expression ends too early"]),
        ("#/timeline?step=2", ["version 1", "This run recorded no times"]),
        ("#/sample/1", ["0+1=", "4é!1", "shade by", "everything recorded"]),
        ("#/samples?where=%27%C3%A9!1%27+in+text", ["4 of 8 samples"]),
        ("#/samples?where=1+in+text", ["'in' needs a text on both sides"]),
        ("#/samples?where=1+in+prompt", ["'in' needs a text on both sides"]),
        ("#/search?q=4%C3%A9!1", ["4 samples with"]),
        ("#/sample/99", ["there is no such sample"]),
    ],
)
def test_each_page_shows_what_it_is_for(
    browser: Any, show: Show, tmp_path: Path, address: str, words: list[str]
) -> None:
    show(write_rlcore_run(tmp_path / "sums"), address)
    until(browser, "!document.querySelector('main [aria-busy=true]')")
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


@pytest.mark.parametrize("address", ["#/steps", "#/prompts", "#/compare"])
def test_the_segments_of_a_sample_count_once_in_means(browser: Any, show: Show, address: str) -> None:
    runs = []
    for name in ("one", "other"):
        parts = [sample(step, 0, 0, 0.0, segment=segment) for step in (1, 2) for segment in range(3)]
        runs.append(replace(run_of([*parts, *(sample(step, 0, 1, 1.0) for step in (1, 2))]), name=name))
    show(runs if address == "#/compare" else runs[0], address)
    until(browser, "!document.querySelector('main [aria-busy=true]')")
    shown = text_of(browser)
    assert "0.5" in shown
    assert "0.25" not in shown


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
