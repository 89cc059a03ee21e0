"""Groups, several runs, timelines, served and large pages in a real browser."""

import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import Show, settled, text_of, until
from expressions import FOUND, REFUSED, samples_to_find
from made_runs import run_of, sample, spoken, write_rlcore_run
from rlcore_view import Run, ViewError, query, read, write_page
from rlcore_view.model import Event
from rlcore_view.serve import Editions, server_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

OPENS_IN_S = 20.0
"""Ten times what is wanted of 10 000 samples."""


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


def test_prompts_of_one_name_that_are_other_questions_are_not_compared(browser: Any, show: Show) -> None:
    other = [{"role": "user", "content": "another question"}]
    first = run_of([sample(1, 0, 0, 0.0), sample(1, 1, 0, 0.0)])
    second = run_of([sample(1, 1, 0, 1.0, prompt=other), sample(1, 0, 0, 1.0)])
    runs = [replace(run, name=name) for run, name in ((first, "first"), (second, "second"))]
    show(runs, "#/compare")
    shown = text_of(browser)
    assert "1 prompts of both" in shown
    assert "1 of the same name are other questions in each run, and left out" in shown
    assert browser.execute_script("return document.querySelectorAll('.list a.row').length") == 1
    show(runs, "#/compare/0")
    assert browser.execute_script("return document.querySelectorAll('.sides .card').length") == 2
    show(runs, "#/compare/1")
    assert browser.execute_script("return document.querySelectorAll('.sides .card').length") == 1
    assert "this run did not train on it" in text_of(browser)


def test_steps_are_those_of_training_and_labels_of_an_axis_differ(browser: Any, show: Show) -> None:
    samples = [sample(0, 0, 0, 0.0, lane="eval"), sample(1, 0, 0, 5.5411), sample(2, 0, 0, 5.5411)]
    run = run_of([*samples, sample(2, 1, 0, 5.5442)], policy__entropy=[5.5411, 5.5442])
    show(run, "#/")
    assert browser.execute_script("return document.querySelector('#kind').textContent").endswith(" · 2 steps")
    script = "return [...document.querySelectorAll('.chart .tick.end')].map((tick) => tick.textContent)"
    shown = browser.execute_script(script)
    assert ["5.542", "5.543", "5.544"] in [shown[at : at + 3] for at in range(len(shown))]
    show(run, "#/step/2")
    script = "return [...document.querySelectorAll('.chart .tick')].map((tick) => tick.textContent)"
    assert browser.execute_script(script)[:2] == ["5.541", "5.544"]


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


FILTER = """
const [expression, done] = arguments;
const bodies = Array.from({ length: run.size }, (_, index) => bodyOf(index));
Promise.all(bodies).then((bodies) => {
  const test = filterOf(expression);
  return indicesWhere((index) => test(run, index, bodies[index]));
}).then(done, (error) => done(error.message));
"""


def test_an_expression_finds_what_the_command_finds(browser: Any, show: Show) -> None:
    show(samples_to_find())
    found = {expression: browser.execute_async_script(FILTER, expression) for expression in FOUND}
    assert found == {expression: sorted(indices) for expression, indices in FOUND.items()}


def test_an_expression_is_refused_in_the_words_of_the_command(browser: Any, show: Show) -> None:
    show(samples_to_find())
    for expression in REFUSED:
        with pytest.raises(ViewError) as refused:
            [query.parse(expression)(entry) for entry in samples_to_find().samples]
        problem = browser.execute_async_script(FILTER, expression)
        assert (
            str(refused.value) == f"'{expression}': {problem}; needs an expression such as: reward < 0.1 and truncated"
        )


def many_samples() -> Run:
    return run_of([sample(1 + n // 64, n // 8, n % 8, float(n % 2), completion=f"word{n % 100}") for n in range(3000)])


def test_texts_are_searched_chunk_by_chunk_and_sorted(browser: Any, show: Show) -> None:
    show(many_samples(), "#/samples?where='word17'+in+text+and+reward+>+0&sort=-length")
    until(browser, "document.querySelector('.search').getAttribute('aria-busy') === 'false'")
    assert text_of(browser, ".search [role=status]") == "30 of 3000 samples"
    assert browser.execute_script("return document.querySelectorAll('.search .row').length") == 30
    assert browser.execute_script("return document.querySelectorAll('.search > .controls button').length") == 0


SLOWLY = """
const whole = unpack;
unpack = async (id) => {
  if (id === "chunk-0-2") await new Promise((wake) => { window.wake = wake; });
  return whole(id);
};
location.hash = "#/search?q=word17";
"""


def test_a_search_says_how_far_it_is_and_shows_what_it_has_when_it_is_stopped(browser: Any, show: Show) -> None:
    show(many_samples())
    browser.execute_script(SLOWLY)
    until(browser, "window.wake !== undefined")
    assert text_of(browser, ".search [role=status]") == "searching: 350 of 3000 samples, 5 found"
    browser.find_element("css selector", ".search button").click()
    browser.execute_script("window.wake()")
    until(browser, "document.querySelector('.search').getAttribute('aria-busy') === 'false'")
    stopped = "5 samples with “word17”; stopped after 350 of 3000"
    assert text_of(browser, ".search [role=status]") == stopped
    assert browser.execute_script("return document.querySelectorAll('.search .row').length") == 5


def test_a_search_ends_when_another_page_is_shown(browser: Any, show: Show) -> None:
    show(many_samples())
    browser.execute_script(
        "window.asked = []; const ask = unpack; unpack = (id) => { asked.push(id); return ask(id); };"
    )
    browser.execute_script(SLOWLY)
    until(browser, "window.wake !== undefined")
    browser.execute_script("location.hash = '#/groups'; window.asked.length = 0;")
    until(browser, "document.querySelector('main h2').textContent === 'Groups'")
    browser.execute_script("window.wake()")
    settled(browser)
    time.sleep(0.2)
    assert browser.execute_script("return asked.filter((id) => id !== 'chunk-0-2')") == []


def test_texts_that_the_page_leaves_out_are_not_found_and_it_says_so(browser: Any, tmp_path: Path) -> None:
    rows = [sample(1, n, 0, float(n), completion=f"word {n} {secrets.token_hex(20_000)}") for n in range(40)]
    page = tmp_path / "small.html"
    write_page(run_of(rows), page, max_mb=0.1)
    browser.get(f"file://{page}#/search?q=word")
    until(browser, "document.querySelector('.search')?.getAttribute('aria-busy') === 'false'")
    status = text_of(browser, ".search [role=status]")
    assert status == "2 samples with “word”; texts of 38 samples were left out of this page"


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
