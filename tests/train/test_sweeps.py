"""Sweeps: cells, their order and names, runs side by side, failures, interruptions, and the table."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError
from rlcore.testing import write_prompts
from rlcore.train.sweeps import Group, Sweep, cells_of, parse_seeds, parse_values


def test_seeds_are_a_range_with_both_ends_or_a_list() -> None:
    assert parse_seeds("0..3") == (0, 1, 2, 3)
    assert parse_seeds("7,0") == (7, 0)
    for text in ("", "3..1", "1,1", "a", "1..", "-1"):
        with pytest.raises(ConfigError, match="--seeds: found"):
            parse_seeds(text)


def test_values_are_split_at_commas_outside_of_brackets() -> None:
    assert parse_values("actor.lr=1e-5,3e-5") == ("actor.lr", ("1e-5", "3e-5"))
    assert parse_values("rollout.stop=[a,b],[]") == ("rollout.stop", ("[a,b]", "[]"))
    for text in ("actor.lr", "=1", "actor.lr=", "actor.lr=1,1"):
        with pytest.raises(ConfigError, match="--set: found"):
            parse_values(text)


def test_cells_are_combinations_with_names_that_differ() -> None:
    cells = cells_of((0, 1), (parse_values("actor.lr=1e-5,3e-5"), parse_values("algo.preset=grpo,rloo")))
    assert len({cell.name for cell in cells}) == 8
    assert cells[1].name == "lr-1e-5_preset-grpo_seed-1"
    assert cells[1].overrides == ("actor.lr=1e-5", "algo.preset=grpo", "train.seed=1")
    assert len({cell.group for cell in cells}) == 4
    with pytest.raises(ConfigError, match="would be named"):
        cells_of((0,), (parse_values("rollout.stop=[a],(a)"),))
    with pytest.raises(ConfigError, match=r"actor.lr is set twice"):
        cells_of((0,), (parse_values("actor.lr=1"), parse_values("actor.lr=2")))


def test_a_group_has_mean_and_spread_of_what_is_there() -> None:
    assert (Group("g", (1.0, 3.0), 0).mean, Group("g", (1.0, 3.0), 0).spread) == (2.0, math.sqrt(2))
    assert math.isnan(Group("g", (), 2).mean)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"""
        model: {{path: none, tokenizer: bytes}}
        data: {{sources: {{all: {{path: {write_prompts(tmp_path / "p.jsonl", 8)}}}}}}}
        rollout: {{backend: 'null', samples_per_prompt: 2, max_tokens: 4}}
        reward: {{functions: {{letters: {{fn: count_letter, children: 1}}}}}}
        actor: {{backend: 'null'}}
        train: {{prompts_per_step: 2, max_steps: 2, dir: {tmp_path / "runs"}}}
        plugins: {{'null': {{}}}}
        """
    )
    return file


@pytest.mark.real
def test_half_of_the_runs_fail_the_rest_continue_and_only_failed_ones_are_retried(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", str(config), "--seeds", "0..1", "--set", "actor.lr=0.1,-5", "--name", "lrs"]
    assert main(command) == 2
    out, err = capfd.readouterr()
    assert out.count("\nroles ") == 1, "one plan is shown"
    assert "4/4 lr--5_seed-1: actor.lr: found -5.0" in out
    assert err.startswith("rlcore: sweep: 2 of 4 runs failed, first lr--5_seed-0: actor.lr: found -5.0")
    assert err.count("\n") == 1
    rows = [line.split() for line in out.splitlines() if line.startswith("actor.lr=")]
    assert [row[:3] for row in rows] == [["actor.lr=0.1", "2", "0"], ["actor.lr=-5", "0", "2"]]
    assert rows[1][3:] == ["-", "-", "-"]
    runs = config.parent / "runs" / "lrs"
    before = (runs / "lr-0.1_seed-0" / "metrics.jsonl").read_bytes()
    assert main([*command[:5], "actor.lr=0.1", *command[6:], "--json", "--metric", "reward/mean"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["metric"], len(found["groups"][0]["runs"])) == ("reward/mean", 2)
    assert (runs / "lr-0.1_seed-0" / "metrics.jsonl").read_bytes() == before


def test_a_sweep_of_other_settings_needs_another_name(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, ["a.yaml"], cells_of((0,), ()))
    sweep._write()
    with pytest.raises(ConfigError, match=r"is a sweep of other settings \(a.yaml\); choose another name"):
        Sweep(tmp_path, ["b.yaml"], cells_of((0,), ()))
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Sweep(tmp_path, ["a.yaml"], cells_of((0,), ()))


@pytest.mark.real
def test_an_interrupted_sweep_resumes_where_it_was(config: Path) -> None:
    runs = config.parent / "runs" / "tiny-sweep"
    command = [sys.executable, "-m", "rlcore", "sweep", str(config), "--seeds", "0..1", "train.max_steps=60"]
    with subprocess.Popen(
        [*command, "checkpoint.every_steps=1"], stdout=-1, stderr=-1, start_new_session=True
    ) as first:
        deadline = time.monotonic() + 60
        while not (runs / "seed-0" / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGINT)
        _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert b"the same command continues it" in err
    assert not (runs / "seed-1").exists()
    taken = len((runs / "seed-0" / "metrics.jsonl").read_text().splitlines())
    assert 0 < taken < 60
    assert subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 0
    assert len((runs / "seed-0" / "metrics.jsonl").read_text().splitlines()) == 60
    assert "continuing after step" in (runs / "seed-0.out").read_text()


def test_a_number_of_jobs_that_is_none_is_one_line(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("0", "-1", "two", "1.5", ""):
        assert main(["sweep", str(config), f"--jobs={text}"]) == 2
        err = capfd.readouterr().err
        assert err.startswith(f"rlcore: --jobs: found '{text}'; needs the number of runs")
        assert err.count("\n") == 1


def test_jobs_that_do_not_fit_into_memory_together_are_refused(
    config: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.runtime.machine.memory_bytes", lambda: 3 << 30)
    monkeypatch.setattr(import_module("rlcore.plan.planner"), "memory_estimate", lambda *arguments: {"actor": 2 << 30})
    assert main(["sweep", str(config), "--seeds", "0..1", "--jobs", "2"]) == 2
    err = capfd.readouterr().err
    assert "--jobs: found 2, each with its part of the memory: memory: the run needs about 2.0 GiB" in err
    assert "the machine has 1.5" in err


MEETING = """
import os, time
from pathlib import Path

def score(completions, **row):
    here = Path(MEETING)
    (here / str(os.getpid())).write_text(str(len(os.sched_getaffinity(0))))
    deadline = time.monotonic() + 60
    while len(list(here.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(here.iterdir())) >= 2, "the other run does not continue meanwhile"
    return [1.0 for _ in completions]
"""


@pytest.mark.real
def test_jobs_run_in_parallel_on_their_own_cores_and_a_failed_one_stops_no_other(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    meeting = config.parent / "meeting"
    meeting.mkdir()
    (config.parent / "rew.py").write_text(MEETING.replace("MEETING", repr(str(meeting))))
    reward = f"reward.functions.letters.fn={config.parent / 'rew.py'}:score"
    command = ["sweep", str(config), reward, "--set", "actor.lr=0.1,-5,0.2", "--name", "both"]
    assert main([*command, "--jobs", "2"]) == 2
    out, err = capfd.readouterr()
    assert "3 runs in" in out
    assert ", 2 at a time; the plan" in out
    assert err.startswith("rlcore: sweep: 1 of 3 runs failed, first lr--5_seed-0: actor.lr: found -5.0")
    rows = [line.split() for line in out.splitlines() if line.startswith("actor.lr=")]
    assert [row[:3] for row in rows] == [
        ["actor.lr=0.1", "1", "0"],
        ["actor.lr=-5", "0", "1"],
        ["actor.lr=0.2", "1", "0"],
    ]
    outputs = sorted(path.name for path in (config.parent / "runs" / "both").glob("*.out"))
    assert outputs == ["lr--5_seed-0.out", "lr-0.1_seed-0.out", "lr-0.2_seed-0.out"]
    cores = [int(path.read_text()) for path in meeting.iterdir()]
    whole = len(os.sched_getaffinity(0))
    assert cores == [max(1, whole // 2)] * 2
    assert len(os.sched_getaffinity(0)) == whole


@pytest.mark.real
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_jobs_in_order_and_begins_no_other(config: Path, signum: int, code: int) -> None:
    runs = config.parent / "runs" / "tiny-sweep"
    command = [sys.executable, "-m", "rlcore", "sweep", str(config), "--seeds", "0..2", "train.max_steps=100000"]
    begun = [runs / f"seed-{seed}" / "checkpoints" / "latest" for seed in (0, 1)]
    with subprocess.Popen(
        [*command, "checkpoint.every_steps=1", "--jobs", "2"], stdout=-1, stderr=-1, start_new_session=True
    ) as sweep:
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in begun) and time.monotonic() < deadline:
            time.sleep(0.05)
        if signum == signal.SIGINT:
            os.killpg(sweep.pid, signum)
        else:
            os.kill(sweep.pid, signum)
        out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == code
    assert b"ending seed-0 and seed-1; a second Ctrl-C does so at once" in out
    assert b"interrupted with 0 of 3 runs done; the same command continues it" in err
    assert not (runs / "seed-2.out").exists(), "no other is begun"
    for seed in (0, 1):
        assert "continue with --resume" in (runs / f"seed-{seed}.out").read_text()
