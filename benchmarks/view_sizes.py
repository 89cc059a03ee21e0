"""Measures pages of rlcore-view: their size, and the time of writing and opening them.

    .venv/bin/python benchmarks/view_sizes.py [--samples 100 10000 100000] [--max-mb 100]

Prints one JSON line per size. A run has 64 samples per step, of 160 tokens each, with log-probs and advantages:

* `read_s`, `write_s`: reading the run directory, and writing the page, in a separate process.
* `page_mb`: the page; `texts_left_out` counts samples whose text did not fit into `--max-mb`.
* `open_s`: Chromium, from the address to the finished overview; the median of three times. `group_s`, `prompts_s` and
  `filter_s`: the same for the address of a group's samples with their differences, the map of all prompts, and a
  filtered list.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "view" / "tests"))
GROUPS, GROUP_SIZE = 8, 8
WORDS = [
    "the",
    "sum",
    "is",
    "of",
    "two",
    "digits",
    "carry",
    "so",
    "we",
    "wait",
    "4",
    "17",
    "23",
    "91",
    "=",
    "+",
    "answer",
]
LETTERS, TIMES = 159, 3
READY = "document.body.dataset.ready === 'true' && document.querySelector('main').getAttribute('aria-busy') === 'false'"
PAGES = {
    "group_s": "#/group/1",
    "prompts_s": "#/prompts?sort=worst",
    "filter_s": "#/samples?where=reward+%3C+0.5+and+truncated&sort=-length",
}
MEASURE = """
import json, sys, time
from pathlib import Path
from rlcore_view import read, write_page
begin = time.perf_counter()
run = read(Path(sys.argv[1]))
read_s = time.perf_counter() - begin
write_page(run, Path(sys.argv[2]), float(sys.argv[3]))
print(json.dumps({"read_s": round(read_s, 2), "write_s": round(time.perf_counter() - begin - read_s, 2)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 10_000, 100_000])
    parser.add_argument("--max-mb", type=float, default=100.0)
    parsed = parser.parse_args()
    for samples in parsed.samples:
        with tempfile.TemporaryDirectory() as place:
            sys.stdout.write(json.dumps(measured(Path(place), samples, parsed.max_mb)) + "\n")
            sys.stdout.flush()


def measured(place: Path, samples: int, max_mb: float) -> dict[str, Any]:
    """The figures of one size, as the module's docstring lists them."""
    from made_runs import write_rlcore_run

    steps = max(1, round(samples / (GROUPS * GROUP_SIZE)))
    words = random.Random(0)
    run = write_rlcore_run(
        place / "run",
        steps=steps,
        groups=GROUPS,
        size=GROUP_SIZE,
        text=lambda: " ".join(words.choices(WORDS, k=60))[:LETTERS].ljust(LETTERS, "."),
    )
    page = place / "page.html"
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(run), str(page), str(max_mb)], check=True, capture_output=True, text=True
    )
    opened = open_times(page)
    return {
        "samples": steps * GROUPS * GROUP_SIZE,
        "steps": steps,
        **json.loads(output.stdout),
        "page_mb": round(page.stat().st_size / 1e6, 2),
        **opened,
    }


def open_times(page: Path) -> dict[str, Any]:
    """Seconds until Chromium shows the overview and then other pages, and the number of texts that are left out."""
    sys.path.insert(0, str(ROOT / "view" / "tests"))
    from browsing import chromium

    times = []
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        browser.set_script_timeout(300)
        for _ in range(TIMES):
            browser.get("about:blank")
            times.append(_seconds(browser, f"file://{page}"))
        found: dict[str, Any] = {"open_s": round(statistics.median(times), 2)}
        for name, address in PAGES.items():
            browser.get("about:blank")
            found[name] = round(_seconds(browser, f"file://{page}{address}"), 2)
        found["texts_left_out"] = browser.execute_script("return run.columns.chunk.filter((at) => at < 0).length")
    return found


def _seconds(browser: Any, address: str) -> float:
    begin = time.perf_counter()
    browser.get(address)
    while not browser.execute_script(f"return {READY}"):
        time.sleep(0.005)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
