"""Sweeps: cells, their order and names, runs side by side, failures, interruptions, and the table."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import main
from rlcore.errors import ConfigError
from rlcore.testing import write_prompts
from rlcore.train.sweeps import Group, Sweep, cells_of, parse_seeds, parse_values


def test_seeds_are_a_range_with_both_ends_or_a_list() -> None:
    assert parse_seeds("0..3") == (0, 1, 2, 3)
    assert parse_seeds("7,0") == (7, 0)
    for text in ("", "3..1", "1,1", "a", "1..", "-1", "0..1000", f"0..{10**15}"):
        with pytest.raises(ConfigError, match="--seeds: found"):
            parse_seeds(text)


def test_values_are_split_at_commas_outside_of_brackets() -> None:
    assert parse_values("actor.lr=1e-5,3e-5") == ("actor.lr", ("1e-5", "3e-5"))
    assert parse_values("rollout.stop=[a,b],[]") == ("rollout.stop", ("[a,b]", "[]"))
    assert parse_values("data.system_prompt=don't,won't")[1] == ("don't", "won't")
    assert parse_values("data.system_prompt='a,b', \"c,d\"")[1] == ("'a,b'", '"c,d"')
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


def test_two_keys_that_end_alike_are_named_with_more_of_each() -> None:
    lrs = (parse_values("actor.lr=1"), parse_values("critic.lr=1"), parse_values("lr=2"))
    assert cells_of((0,), lrs[:2])[0].name == "actor.lr-1_critic.lr-1_seed-0"
    assert cells_of((0,), lrs)[0].name == "actor.lr-1_critic.lr-1_lr-2_seed-0"


@pytest.mark.parametrize(
    ("text", "option"),
    [("train.seed=1,2", "--seeds"), ("train.name=a", "--name"), ("train.dir=a,b", "an override train.dir=...")],
)
def test_a_key_that_a_sweep_sets_itself_is_refused(text: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set: found {text.partition('=')[0]}, .*; use {re.escape(option)}$"):
        cells_of((0,), (parse_values(text),))


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


FAILS = """
def score(completions, bad=0, **row):
    if bad:
        raise ValueError("it is bad")
    return [1.0 for _ in completions]
"""


def failing_when_bad(directory: Path, code: str) -> list[str]:
    """Overrides of a reward that ends the runs with `BAD=1`."""
    (directory / "rew.py").write_text(code)
    function = "reward.functions.letters"
    return [f"{function}.fn={directory / 'rew.py'}:score", f"{function}.on_failure=abort"]


BAD = "reward.functions.letters.kwargs.bad"


@pytest.mark.real
def test_half_of_the_runs_fail_the_rest_continue_and_only_failed_ones_are_retried(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = [str(config), *failing_when_bad(config.parent, FAILS)]
    command = ["sweep", *settings, "--seeds", "0..1", "--name", "half", "--set"]
    assert main([*command, f"{BAD}=0,1"]) == 2
    out, err = capfd.readouterr()
    assert out.count("\nroles ") == 1, "one plan is shown"
    assert "4/4 bad-1_seed-1: reward of sample" in out
    assert err.startswith("rlcore: sweep: 2 of 4 runs failed, first bad-1_seed-0: reward of sample")
    assert "ValueError: it is bad" in err
    assert err.count("\n") == 1
    rows = [line.split() for line in out.splitlines() if line.startswith(BAD)]
    assert [row[:3] for row in rows] == [[f"{BAD}=0", "2", "0"], [f"{BAD}=1", "0", "2"]]
    assert rows[1][3:] == ["-", "-", "-"]
    runs = config.parent / "runs" / "half"
    before = (runs / "bad-0_seed-0" / "metrics.jsonl").read_bytes()
    assert main([*command, f"{BAD}=0", "--json", "--metric", "reward/mean"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["metric"], len(found["groups"][0]["runs"])) == ("reward/mean", 2)
    assert (runs / "bad-0_seed-0" / "metrics.jsonl").read_bytes() == before


def test_a_combination_that_cannot_be_planned_is_refused_before_the_first_run(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(config), "--seeds", "0..1", "--set", "actor.lr=0.1,-5"]) == 2
    assert capfd.readouterr().err.startswith("rlcore: --set actor.lr=-5: actor.lr: found -5.0")
    assert main(["sweep", str(config), "--seeds", "0..1", "actor.lr=-5"]) == 2
    assert capfd.readouterr().err.startswith("rlcore: actor.lr: found -5.0")
    assert main(["sweep", str(config), "--set", "actor.lr=[0.1,0.2]"]) == 2
    assert "the list is one value; several are written actor.lr=0.1,0.2\n" in capfd.readouterr().err
    assert not (config.parent / "runs").exists()


ESTIMATOR = """
from rlcore import Algorithm, AlgorithmKind, Scope, hookimpl

RLCORE_API = "1"

@hookimpl
def rlcore_algorithms():
    return [Algorithm("mine", AlgorithmKind.ADVANTAGE, "rlcore.algo.advantage:rloo", Scope.GROUP)]
"""


@pytest.mark.real
@pytest.mark.parametrize("place", ["--plugin", "in the file"])
def test_a_plugin_that_a_part_of_the_runs_uses_is_left_out_of_the_others(
    config: Path, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = config.parent / "mine.py"
    plugin.write_text(ESTIMATOR)
    command = ["sweep", str(config), "--name", "ways", "--set", "algo.advantage=grpo,mine"]
    if place == "--plugin":
        command += ["--plugin", str(plugin)]
    else:
        text = config.read_text().replace("plugins: {'null': {}", f"plugins: {{'null': {{}}, mine: {{path: {plugin}}}")
        config.write_text(text)
    assert main(command) == 0, capfd.readouterr()
    rows = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("algo.advantage=")]
    assert [row[:3] for row in rows] == [["algo.advantage=grpo", "1", "0"], ["algo.advantage=mine", "1", "0"]]
    runs = config.parent / "runs" / "ways"
    enabled = ["mine" in (runs / f"advantage-{name}_seed-0" / "config.yaml").read_text() for name in ("grpo", "mine")]
    assert enabled == [False, True]
    assert main(command) == 0, "the same command continues the sweep"
    assert capfd.readouterr().out.count("done already") == 2


def test_a_plugin_that_no_run_of_a_sweep_uses_is_refused(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (config.parent / "mine.py").write_text(ESTIMATOR)
    command = ["sweep", str(config), "--set", "algo.advantage=grpo,rloo", "--plugin", str(config.parent / "mine.py")]
    assert main(command) == 2
    assert "plugin 'mine' " in (err := capfd.readouterr().err)
    assert "is enabled, but nothing of it is in the plan" in err


def test_a_sweep_of_other_settings_needs_another_name(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, ["a.yaml"], cells_of((0,), ()))
    sweep._write()
    with pytest.raises(ConfigError, match=r"is a sweep of other settings \(a.yaml\); choose another name"):
        Sweep(tmp_path, ["b.yaml"], cells_of((0,), ()))
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Sweep(tmp_path, ["a.yaml"], cells_of((0,), ()))


def test_the_settings_of_a_sweep_are_on_disk_before_its_first_run(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config.parent / "runs").mkdir()
    sweep = Sweep(config.parent / "runs" / "s", [str(config)], cells_of((0,), ()))
    monkeypatch.setattr(sweep, "_command", lambda cell: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep.run(print)
    assert json.loads((sweep.directory / "sweep.json").read_text())["cells"][0]["name"] == "seed-0"


@pytest.mark.real
def test_an_interrupted_sweep_resumes_where_it_was(config: Path) -> None:
    runs = config.parent / "runs" / "tiny-sweep"
    command = [sys.executable, "-m", "rlcore", "sweep", str(config), "--seeds", "0..1", "train.max_steps=60"]
    command.append("checkpoint.every_steps=1")
    with subprocess.Popen(command, stdout=-1, stderr=-1, start_new_session=True) as first:
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


WAITS = """
import os, time

def score(completions, **row):
    until = time.monotonic() + 60
    while not os.path.exists({gate!r}) and time.monotonic() < until:
        time.sleep(0.02)
    return [1.0 for _ in completions]
"""


@pytest.mark.real
@pytest.mark.parametrize("gone", ["reader", "terminal"])
def test_a_sweep_outlives_its_terminal_and_the_reader_of_its_output(config: Path, gone: str) -> None:
    directory, gate = config.parent / "runs" / "tiny-sweep", config.parent / "gate"
    settings = failing_when_bad(config.parent, WAITS.format(gate=str(gate)))
    command = [sys.executable, "-m", "rlcore", "sweep", str(config), *settings, "--seeds", "0..1"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, start_new_session=True) as sweep:
        assert sweep.stdout is not None
        assert sweep.stderr is not None
        words = b"" if gone == "reader" else b"the output of a run is in"  # visible while it runs
        while words not in sweep.stdout.readline():
            pass
        sweep.stdout.close()
        until = time.monotonic() + 60
        while not (directory / "seed-0" / "log.txt").exists() and time.monotonic() < until:
            time.sleep(0.05)
        if gone == "terminal":
            os.killpg(sweep.pid, signal.SIGHUP)
        gate.touch()
        assert (sweep.wait(timeout=100), sweep.stderr.read()) == (0, b"")
    states = [cell["state"] for cell in json.loads((directory / "sweep.json").read_text())["cells"]]
    assert states == ["done", "done"]


def test_a_number_of_jobs_that_is_none_is_one_line(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("0", "-1", "two", "1.5", ""):
        assert main(["sweep", str(config), f"--jobs={text}"]) == 2
        err = capfd.readouterr().err
        assert err.startswith(f"rlcore: --jobs: found '{text}'; needs the number of runs")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("overrides", "seeds"),
    [((), "0"), (("train.seed=42",), "42"), (("train.seed=42", "--seeds", "3,7"), "3 7")],
)
def test_without_seeds_a_sweep_has_the_seed_of_its_configuration(
    config: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], seeds: str
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(Sweep, "run", lambda self, *_: ran.extend(cell.name for cell in self.cells) or 0)
    assert main(["sweep", str(config), *overrides]) == 0
    assert ran == [f"seed-{seed}" for seed in seeds.split()]


def test_a_seed_that_a_sweep_cannot_read_is_one_line(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(config), "train.seed=${oc.env:SEED}"]) == 2
    err = capfd.readouterr().err
    assert err == "rlcore: train.seed: found '${oc.env:SEED}'; needs a number in a sweep, or seeds of --seeds\n"


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

def score(completions, bad=0, **row):
    if bad:
        raise ValueError("it is bad")
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
    reward = failing_when_bad(config.parent, MEETING.replace("MEETING", repr(str(meeting))))
    command = ["sweep", str(config), *reward, "--set", f"{BAD}=0,1,false", "--name", "both"]
    assert main([*command, "--jobs", "2"]) == 2
    out, err = capfd.readouterr()
    assert "3 runs in" in out
    assert ", 2 at a time; the plan" in out
    assert err.startswith("rlcore: sweep: 1 of 3 runs failed, first bad-1_seed-0: reward of sample")
    rows = [line.split() for line in out.splitlines() if line.startswith(BAD)]
    assert [row[:3] for row in rows] == [[f"{BAD}=0", "1", "0"], [f"{BAD}=1", "0", "1"], [f"{BAD}=false", "1", "0"]]
    outputs = sorted(path.name for path in (config.parent / "runs" / "both").glob("*.out"))
    assert outputs == ["bad-0_seed-0.out", "bad-1_seed-0.out", "bad-false_seed-0.out"]
    cores = [int(path.read_text()) for path in meeting.iterdir()]
    whole = len(os.sched_getaffinity(0))
    assert cores == [max(1, whole // 2)] * 2
    assert len(os.sched_getaffinity(0)) == whole


@pytest.mark.real
@pytest.mark.parametrize(
    ("signum", "send", "code"),
    [(signal.SIGINT, os.killpg, 130), (signal.SIGINT, os.kill, 130), (signal.SIGTERM, os.kill, 143)],
)
def test_a_signal_ends_all_jobs_in_order_and_begins_no_other(config: Path, signum: int, send: Any, code: int) -> None:
    runs = config.parent / "runs" / "tiny-sweep"
    command = [sys.executable, "-m", "rlcore", "sweep", str(config), "--seeds", "0..2", "train.max_steps=100000"]
    begun = [runs / f"seed-{seed}" / "checkpoints" / "latest" for seed in (0, 1)]
    with subprocess.Popen(
        [*command, "checkpoint.every_steps=1", "--jobs", "2"], stdout=-1, stderr=-1, start_new_session=True
    ) as sweep:
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in begun) and time.monotonic() < deadline:
            time.sleep(0.05)
        send(sweep.pid, signum)
        out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == code
    assert b"ending seed-0 and seed-1; a second Ctrl-C does so at once" in out
    assert b"interrupted with 0 of 3 runs done; the same command continues it" in err
    assert not (runs / "seed-2.out").exists(), "no other is begun"
    for seed in (0, 1):
        assert "continue with --resume" in (runs / f"seed-{seed}.out").read_text()
