"""The page as a file: self-contained, without foreign markup, within its size."""

import array
import base64
import gzip
import hashlib
import json
import math
import random
import re
import struct
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from made_runs import run_of, sample, spoken
from rlcore_view import Run, Tokens, write_page
from rlcore_view.model import Event
from rlcore_view.write_page import FOLLOW, SCRIPTS, page

MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|fetch\(|https?:(?!//www\.w3\.org)"
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def unpacked(text: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/octet-stream" id="([\w-]+)">([^<]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(packed))) for name, packed in found}


def numbers_of(body: dict[str, Any]) -> dict[str, list[float]]:
    """The arrays of a sample's tokens, as the page's script reads them."""
    found = {}
    for name, [packed] in body["tokens"]["arrays"].items():
        planes = base64.b64decode(packed)
        count = len(planes) // 3
        words = zip(planes[:count], planes[count : 2 * count], planes[2 * count :], bytes(count), strict=True)
        found[name] = list(struct.unpack(f">{count}f", bytes(byte for word in words for byte in word)))
    return found


def test_the_page_holds_every_sample_with_its_text_and_tokens() -> None:
    tokens = spoken("42", advantage=[0.5, -0.5])
    data = unpacked(page(run_of([sample(1, 0, 0, 1.0, tokens=tokens), sample(1, 0, 1, 0.0), sample(2, 1, 0, 0.5)])))
    columns = data["head-0"]["columns"]
    assert columns["score"] == [1.0, 0.0, 0.5]
    assert columns["prompt"] == [0, 0, 1]
    bodies = [data[f"chunk-0-{chunk}"][place] for chunk, place in zip(columns["chunk"], columns["place"], strict=True)]
    assert [body["completion"] for body in bodies] == ["answer 0", "answer 1", "answer 0"]
    assert bodies[0]["tokens"]["pieces"] == ["4", "2"]
    assert numbers_of(bodies[0])["advantage"] == [0.5, -0.5]


def test_text_of_models_is_never_markup() -> None:
    run = run_of([sample(completion=HOSTILE, source=HOSTILE, info={HOSTILE: HOSTILE})])
    text = page(replace(run, name=HOSTILE, notes=[HOSTILE], config=HOSTILE))
    assert "onerror" not in re.sub(r"<title>.*?</title>", "", text)
    assert "<title>&lt;/script&gt;" in text
    assert unpacked(text)["chunk-0-0"][0]["completion"] == HOSTILE


def test_scripts_make_text_and_never_markup() -> None:
    for name in (*SCRIPTS, FOLLOW):
        script = files("rlcore_view").joinpath("page", name).read_text("utf-8")
        assert not MARKUP.search(script.replace("fetch(", "", 1) if name == FOLLOW else script), name
    assert {file.name for file in files("rlcore_view").joinpath("page").iterdir()} == {*SCRIPTS, FOLLOW, "page.css"}


def test_the_policy_of_the_page_allows_its_own_script_alone() -> None:
    text = page(run_of([sample()]))
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    [script] = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    assert not re.search(r"\s(?:src|href)=", text.replace(script, ""))


def test_equal_runs_make_equal_pages() -> None:
    assert page(run_of([sample()])) == page(run_of([sample()]))


def test_above_its_size_the_page_keeps_the_best_and_the_worst_of_each_step_and_says_so() -> None:
    noise = [random.Random(number).randbytes(500).hex() for number in range(600)]
    samples = [sample(1 + n // 300, n, 0, float(n % 300), completion=text) for n, text in enumerate(noise)]
    text = page(run_of(samples), max_mb=0.2)
    head = unpacked(text)["head-0"]
    kept = [index for index, chunk in enumerate(head["columns"]["chunk"]) if chunk >= 0]
    assert {0, 299, 300, 599} <= set(kept) < set(range(600))
    [note] = head["notes"]
    left_out = 600 - len(kept)
    assert note.startswith(f"texts of {left_out} of 600 samples are left out, to stay below 0.2 MB; the best and the")


@pytest.mark.parametrize("text", ["", "\x00\x1b[31m", "\ud800", "\u202egnp.exe", "🙂" * 1000])
def test_any_text_can_be_written(tmp_path: Path, text: str) -> None:
    write_page(run_of([sample(completion=text)]), tmp_path / "page.html")
    shown = unpacked((tmp_path / "page.html").read_text("utf-8"))["chunk-0-0"][0]["completion"]
    assert shown == text


def test_numbers_that_are_not_finite_are_null() -> None:
    run = Run("odd", "test", [sample(info={"x": float("inf")}, components={"a": float("nan")})])
    data = unpacked(page(run))
    assert data["chunk-0-0"][0]["info"] == {"x": None}
    assert data["head-0"]["columns"]["reward.a"] == [None]


def test_several_runs_are_one_page_with_what_they_differ_in() -> None:
    text = "train:\n  seed: {seed}\n  dir: /runs/{seed}\nactor:\n  lr: {lr}\n"
    runs = [
        replace(run_of([sample(completion=name)]), name=name, config=text.format(seed=seed, lr=lr))
        for name, seed, lr in (("a", 0, 1), ("b", 1, 1), ("c", 0, 2))
    ]
    data = unpacked(page(runs))
    assert data["about"] == {"count": 3, "families": [0, 0, 1], "changes": [["actor.lr", ["1", "1", "2"]]]}
    assert [data[f"chunk-{number}-0"][0]["completion"] for number in range(3)] == ["a", "b", "c"]


def test_the_timeline_names_the_sample_of_each_event() -> None:
    event = Event("generate", "generate", 5.0, 1.5, "row", 1, ("all/0", 0, 0, 0), 7)
    alone = Event("update", "train", 4.0, 0.5, "actor", 1)
    data = unpacked(page(replace(run_of([sample()]), events=[event, alone])))
    assert data["events-0"] == {
        "rows": ["row", "actor"],
        "events": [[0, "generate", "generate", 1.0, 1.5, 1, 7, 0], [1, "update", "train", 0.0, 0.5, 1, None, None]],
    }


def test_a_full_disk_leaves_the_older_page_and_nothing_else(tmp_path: Path) -> None:
    """A limit of the size of files stands for the full disk: the write fails in the middle in the same way."""
    out = tmp_path / "page.html"
    out.write_text("older")
    code = (
        "import resource, signal, sys; from rlcore_view.cli import main; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.exit(main(sys.argv[1:]))"
    )
    (tmp_path / "talk.jsonl").write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n')
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "talk.jsonl"), "--out", str(out)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"rlcore-view: '{out}': it cannot be written: File too large; choose another with --out\n",
    )
    assert out.read_text() == "older"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "talk.jsonl"]


@pytest.mark.slow
def test_a_page_shows_so_many_names_and_says_which_it_leaves_out() -> None:
    components = {f"part/{number}": 1.0 for number in range(2003)}
    metrics = {f"loss__{number}": [0.5] for number in range(2002)}
    head = unpacked(page(run_of([sample(components=components)], **metrics)))["head-0"]
    assert len(head["metrics"]) == 2000
    assert len([name for name in head["columns"] if name.startswith("reward.part/")]) == 2000
    assert head["notes"] == [
        "2 of 2002 metrics are left out, from 'loss/2000' on; a page shows 2000",
        "3 of 2003 reward components are left out, from 'part/2000' on; a page shows 2000",
    ]


def test_tokens_that_spell_a_secret_together_are_withheld() -> None:
    pieces = ["sk-", "abcdefgh", "ijklmnop", "qrst", " end"]
    tokens = Tokens(pieces, {"advantage": [1.0, float("inf"), None, 0.5, 0.5]})
    body = unpacked(page(run_of([sample(completion="".join(pieces), tokens=tokens)])))["chunk-0-0"][0]
    assert body["completion"] == "[sk-a... redacted] end"
    assert body["tokens"]["pieces"] == ["\N{FULL BLOCK}"] * 5
    numbers = numbers_of(body)["advantage"]
    assert [number if math.isfinite(number) else None for number in numbers] == [1.0, None, None, 0.5, 0.5]


def test_numbers_of_tokens_keep_four_digits_from_lists_and_from_packed_arrays() -> None:
    values = [-0.123456, 3.14159e-7, -12345.6, 0.0]
    for entropies in (values, array.array("f", values)):
        body = unpacked(page(run_of([sample(tokens=Tokens(list("abcd"), {"entropy": entropies}))])))["chunk-0-0"][0]
        assert numbers_of(body)["entropy"] == pytest.approx(values, rel=1e-4)
