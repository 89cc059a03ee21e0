"""A run that is written while it is served: what is new is read and packed, nothing else, and a cut-back is noticed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_rlcore_run
from rlcore_view import file_memory, read, write_page
from rlcore_view.file_memory import FileMemory
from rlcore_view.serve import Editions
from rlcore_view.write_page import parts

STEPS = 16
OVERHEAD = 8000
"""Bytes that a poll may read in addition to new ones: ends of known files, and /proc itself."""


def event(step: int) -> str:
    args = {"step": step, "prompt": "sums/0", "epoch": step - 1, "sample": 0}
    return json.dumps({"name": "x", "cat": "reward", "ph": "X", "ts": step, "dur": 1, "pid": 1, "tid": 1, "args": args})


def write_trace(run: Path, steps: int) -> None:
    (run / "trace.json").write_text("[\n" + ",\n".join(map(event, range(1, steps + 1))) + "\n]\n")


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """A run of `STEPS` + 1 steps."""
    run = write_rlcore_run(tmp_path / "later", steps=STEPS + 1, groups=8, text="a rather long text " * 15)
    write_trace(run, STEPS + 1)
    (run / "log.txt").write_text("".join(f"2026-01-01 00:00:00 WARNING {n % 7}\n" for n in range(50 * (STEPS + 1))))
    return run


@pytest.fixture
def run(tmp_path: Path, later: Path) -> Path:
    """The same run one step before."""
    run = shutil.copytree(later, tmp_path / "run")
    for file in run.glob(f"*/step_{STEPS + 1:06d}*"):
        file.unlink()
    for name, lines in (("metrics.jsonl", 1), ("log.txt", 50)):
        whole = (later / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(whole[:-lines]))
    write_trace(run, STEPS)
    return run


def bytes_read() -> int:
    """By this process so far, as the kernel counts."""
    return int(Path("/proc/self/io").read_text().split()[1])


def sizes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


def take_step(run: Path, later: Path) -> None:
    """Write the last step as rlcore does: files that grow are appended to."""
    for file in later.glob(f"*/step_{STEPS + 1:06d}*"):
        shutil.copy(file, run / file.relative_to(later))
    for name in ("metrics.jsonl", "log.txt"):
        data = (later / name).read_bytes()
        with (run / name).open("ab") as grown:
            grown.write(data[grown.tell() :])
    with (run / "trace.json").open("r+b") as trace:
        trace.seek(-3, 2)
        trace.write(f",\n{event(STEPS + 1)}\n]\n".encode())


@pytest.mark.slow
def test_a_poll_reads_what_is_new_and_nothing_else(run: Path, later: Path) -> None:
    memory = FileMemory()
    editions = Editions([run], lambda: [read(run, memory)], 100.0)
    editions.newest()
    before = bytes_read()
    editions.newest()
    assert bytes_read() - before < OVERHEAD
    size = sizes(run)
    take_step(run, later)
    added = sizes(run) - size
    before = bytes_read()
    _, [found] = editions.newest()
    taken = bytes_read() - before
    assert added <= taken < added + OVERHEAD < size / 10
    assert parts([found], 100.0) | {"head-0": ""} == parts([read(later)], 100.0) | {"head-0": ""}  # their names differ


@pytest.mark.slow
def test_an_edition_packs_the_chunks_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, memory = write_rlcore_run(tmp_path / "many", steps=40, groups=8), FileMemory()
    last = run / "trajectories" / "step_000040.jsonl"
    last.rename(tmp_path / last.name)
    editions = Editions([run], lambda: [read(run, memory)], 100.0)
    editions.newest()
    packed: list[int] = []
    whole = write_page.__globals__["_body"]
    monkeypatch.setitem(write_page.__globals__, "_body", lambda sample: packed.append(sample.step) or whole(sample))
    (tmp_path / last.name).rename(last)
    editions.newest()
    assert len(packed) == 80 + 560 % 256, "of 640 samples the best and worst of each step, and the last chunk of others"


def grow(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "reward/mean": 1.0}\n{"step": 100, "rew')


def cut_back_and_continue(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    with (run / "metrics.jsonl").open("r+") as file:
        file.truncate(sum(map(len, lines[:10])))
        file.seek(0, 2)
        file.write("".join(line.replace("0.5", "0.625") for line in lines[10:]) + '{"step": 17, "reward/mean": 2}\n')


def cut_back(run: Path) -> None:
    for name in ("metrics.jsonl", "log.txt"):
        (run / name).write_bytes((run / name).read_bytes()[:400])


def cut_back_trace(run: Path) -> None:
    """Steps after the ninth are taken again, at other times."""
    lines = (run / "trace.json").read_text().splitlines(keepends=True)
    again = [line.replace('"ts":', '"ts": 100').replace('"ts": ', '"ts": 100') for line in lines[10:-1]]
    with (run / "trace.json").open("r+") as file:
        file.truncate(0)
        file.write("".join([*lines[:10], *again]).rstrip() + f",\n{event(77)}\n]\n")


def replace_file(run: Path) -> None:
    path = run / "trajectories" / "step_000003.jsonl"
    path.with_name("new").write_text(path.read_text().replace("rather", "quite "))
    path.with_name("new").replace(path)


def remove_tokens(run: Path) -> None:
    (run / "tokens" / "step_000004.train.safetensors").unlink()
    (run / "trajectories" / "step_000005.jsonl").unlink()


def other_layout(run: Path) -> None:
    (run / "trace.json").write_text(json.dumps(json.loads((run / "trace.json").read_text()), indent=1))


def new_settings(run: Path) -> None:
    (run / "config.yaml").write_text("actor:\n  lr: 2.0\n")
    (run / "plan.json").write_text('{"workers": {}')


CHANGES = (
    grow,
    cut_back_and_continue,
    cut_back,
    cut_back_trace,
    replace_file,
    remove_tokens,
    other_layout,
    new_settings,
)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_what_is_remembered_is_what_a_fresh_look_finds(
    run: Path, change: Callable[[Path], None]
) -> None:
    memory = FileMemory()
    old = parts([read(run, memory)], 100.0)
    change(run)
    fresh = read(run)
    assert parts([read(run, memory)], 100.0) == parts([fresh], 100.0)
    assert (parts([fresh], 100.0) == old) is (change is other_layout)
    assert read(run, memory).notes == fresh.notes


def test_a_damaged_line_is_reported_again_and_read_once_it_is_fixed(run: Path) -> None:
    memory, path = FileMemory(), run / "metrics.jsonl"
    read(run, memory)
    good = path.read_text()
    path.write_text(good + "[1\n")
    for _ in range(2):
        with pytest.raises(Exception, match=r"metrics.jsonl', line 17: b'\[1\\n' is not a JSON object; fix or remove"):
            read(run, memory)
    path.write_text(good + '{"step": 17}\n')
    assert len(read(run, memory).metrics) == STEPS + 1


def test_of_a_long_log_the_end_is_read(run: Path) -> None:
    log = run / "log.txt"
    log.write_text("2026-01-01 00:00:00 WARNING old\n" + "x" * 1_100_000 + "\n2026-01-01 00:00:00 WARNING new\n")
    assert [line.split()[-1] for line in read(run).alerts] == ["new"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(file_memory.ViewError, match=r"cannot be read: Is a directory"):
        FileMemory().lines(tmp_path, lambda line, number: None)


def test_tokens_that_are_written_while_the_run_is_read_have_their_texts(tmp_path: Path) -> None:
    run = write_rlcore_run(tmp_path / "run", steps=2, text="xyz")
    texts = [str(sample.completion) for sample in read(run).samples]
    names = run / "tokens" / "vocabulary.jsonl"
    entries = names.read_text().splitlines(keepends=True)
    names.write_text("".join(entries[: ord("x")]))

    class Slow(FileMemory):
        """The run writes a step after the vocabulary has been read."""

        def lines(self, path: Path, *arguments: Any, **named: Any) -> Any:
            found = list(super().lines(path, *arguments, **named)[0]), b""
            if path == names:
                names.write_text("".join(entries))
            return found

    memory = Slow()
    for _ in range(2):
        assert ["".join(sample.tokens.pieces) for sample in read(run, memory).samples if sample.tokens] == texts
