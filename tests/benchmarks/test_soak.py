"""The soak's plan and account: what is missing, doubled or growing is found."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def soak() -> Iterator[Any]:
    """The modules, which import each other by their bare names."""
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)
    try:
        yield {name: import_module(name) for name in ("soak", "soak_run", "soak_audit", "soak_bounds", "soak_faults")}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


def write_run(soak: Any, run: Path, steps: int) -> None:
    """Trajectories as a run without faults leaves them, without an order within an epoch."""
    (run / "trajectories").mkdir(parents=True)
    per_step, prompts = soak["soak_run"].PROMPTS_PER_STEP, soak["soak_run"].PROMPTS
    for step in range(steps):
        rows = []
        for issued in range(step * per_step, (step + 1) * per_step):
            for sample in range(soak["soak_run"].SAMPLES):
                name = {"prompt": f"p/{issued % prompts}", "epoch": issued // prompts, "sample": sample, "segment": 0}
                rows.append({"id": name, "status": "ok", "agent": {"ended_by": "agent"}})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (run / "trajectories" / f"step_{step + 1:06d}.jsonl").write_text(lines)


def test_a_whole_run_is_accounted_for(soak: Any, tmp_path: Path) -> None:
    write_run(soak, tmp_path, 30)
    account = soak["soak_audit"].accounted(tmp_path, 30)
    assert account.problems == []
    assert account.statuses == {"ok": 30 * 16}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda lines: lines[1:], "there are samples [1, 2, 3]"),
        (lambda lines: [*lines, lines[0]], "is there 2 times"),
        (lambda lines: lines[4:], "3 prompts"),
        (lambda lines: [line.replace("p/8", "p/9") for line in lines], "is there 2 times"),
        (lambda lines: [line.replace("p/8", "p/1") for line in lines], "prompt p/1 comes 2 times in epoch 0"),
        (lambda lines: [line.replace('"epoch": 0', '"epoch": 7') for line in lines], "epoch 0 has 46 of 50 prompts"),
    ],
    ids=["a lost sample", "a doubled line", "a lost prompt", "a doubled prompt", "a prompt trained twice", "an epoch"],
)
def test_what_is_missing_or_doubled_is_found(soak: Any, tmp_path: Path, change: Any, expected: str) -> None:
    write_run(soak, tmp_path, 30)
    path = tmp_path / "trajectories" / "step_000003.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    assert expected in "; ".join(soak["soak_audit"].accounted(tmp_path, 30).problems)


def test_what_grows_within_a_life_is_found(soak: Any) -> None:
    audit = soak["soak_audit"]
    calm = [audit.Sample(1, step, 200.0, 60 + step % 3, 40, 5, 8, 300.0) for step in range(20)]
    for bounds in soak["soak_bounds"].BOUNDS.values():
        assert audit.resources(calm, bounds.growth) == []
        for name, more in bounds.growth.items():
            growing = [replace(value, **{name: getattr(value, name) + value.step * more / 10}) for value in calm]
            assert any(name in problem for problem in audit.resources(growing, bounds.growth))


def test_the_null_engine_has_narrower_bounds_than_models(soak: Any) -> None:
    bounds = soak["soak_bounds"].BOUNDS
    null = bounds["null"]
    assert (null.stuck_s, null.end_s, null.gone_s, null.growth["children_mib"]) == (300.0, 120.0, 10.0, 64.0)
    for models in (bounds["hf"], bounds["vllm"]):
        assert null.stuck_s < models.stuck_s
        assert null.growth.items() <= {**models.growth, "children_mib": 64.0}.items()


def test_the_plan_follows_from_the_seed_and_has_every_fault(soak: Any) -> None:
    faults = soak["soak_faults"]
    one, same, other = (list(islice(faults.plan(seed, True, 1, 3), 23)) for seed in (1, 1, 2))
    assert one == same != other
    assert {fault.kind for fault in one} == set(faults.FAULTS) - set(faults.VLLM) - set(faults.ACTOR)
    real = {fault.kind for fault in islice(faults.plan(1, True, 1, 3, "vllm"), 27)}
    assert real == set(faults.FAULTS)
    embedded = {fault.kind for fault in islice(faults.plan(1, True, 1, 3, "hf"), 100)}
    assert embedded == {kind for kind in faults.FAULTS if "rollout" not in kind} - set(faults.VLLM)
    assert all(fault.step < later.step for fault, later in pairwise(one))
    assert faults.ENDS.keys() == (faults.CONTROLLER | faults.ACTOR).keys()
    assert not {fault.kind for fault in islice(faults.plan(1, False, 1, 3), 100)} & set(faults.DATA)


def test_a_soak_that_cannot_be_judged_ends_in_one_line(
    soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(self: Any) -> int:
        raise subprocess.TimeoutExpired("rlcore train", 5.0)

    monkeypatch.setattr(soak["soak"].Soak, "go", ends)
    assert soak["soak"].main(["--minutes", "0"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.search("problem: .*after 5.0 seconds", lines[-1])


def test_a_soak_whose_first_step_does_not_come_ends_in_one_line(
    soak: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(soak["soak"].BOUNDS, "null", soak["soak_bounds"].Bounds(start_s=0.0))
    assert soak["soak"].main(["--minutes", "1"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert re.search("problem: no step after 0 in 0 s", lines[-1])
