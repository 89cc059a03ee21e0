"""Interrupted runs: kill -9 at any moment, signals in each phase, what is left behind (cases 32, 34, 35)."""

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
from forked_runs import ForkedRun, fork_run

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.train import checkpoint

pytestmark = [pytest.mark.fault, pytest.mark.timeout(540), pytest.mark.usefixtures("forked_runs")]

CONFIG = """
model: {{path: "", tokenizer: bytes}}
data: {{sources: {{train: {{path: {prompts}}}}}}}
eval: {{sources: {{heldout: {{path: {heldout}}}}}, every_steps: 4}}
rollout: {{backend: "null", samples_per_prompt: 4, max_tokens: 12}}
reward: {{functions: {{letters: {{fn: count_letter}}}}}}
actor: {{backend: "null", lr: 0.1, minibatch_prompts: 2}}
train: {{prompts_per_step: 4, max_steps: 10, dir: {runs}}}
checkpoint: {{every_steps: 2}}
"""
SLOW_REWARD = """
import time

def slow(completions, **columns):
    time.sleep(50)
    return [0.0] * len(completions)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 30)
    heldout = write_prompts(tmp_path / "heldout.jsonl", 3, "Held out {index}.")
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(prompts=prompts, heldout=heldout, runs=tmp_path / "runs"))
    return path


def train(config: Path, name: str, *more: str) -> Path:
    assert start(config, name, *more).wait(timeout=120) == 0, (config.parent / f"{name}.log").read_text()
    return config.parent / "runs" / name


def timed(config: Path, name: str, *more: str) -> tuple[Path, float]:
    """The directory of a whole run, and the seconds from its lock to its end: others die at any moment of these."""
    process, run = start(config, name, *more), config.parent / "runs" / name
    wait_for(run / ".lock", process)
    started = time.monotonic()
    assert process.wait(timeout=120) == 0, (config.parent / f"{name}.log").read_text()
    return run, time.monotonic() - started


def start(config: Path, name: str, *more: str) -> ForkedRun:
    arguments = ["train", str(config), "--plugin", "null", f"train.name={name}", *more]
    return fork_run(arguments, config.parent / f"{name}.log")


def wait_for(what: Path, process: ForkedRun, text: str = "", deadline_s: float = 60.0) -> None:
    ends = time.monotonic() + deadline_s
    while not (what.exists() and text in what.read_text()):
        assert process.poll() is None, f"the run ended with {process.returncode} before {what.name} said {text!r}"
        assert time.monotonic() < ends, f"{what.name} does not say {text!r} after {deadline_s} s"
        time.sleep(0.02)


def descendants(process: ForkedRun) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process], deadline_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=deadline_s)
    assert not alive


def test_killed_at_random_moments_and_resumed_a_run_is_bitwise_the_uninterrupted_one(config: Path) -> None:
    slow = ("plugins.null.update_s=0.02", "plugins.null.save_s=0.02")
    whole, whole_s = timed(config, "whole", *slow)
    rng = random.Random(0)
    kills, names = 0, [f"killed-{number}" for number in range(60)]
    for name in names:
        run, more = config.parent / "runs" / name, ("train.seed=0",)
        ended = False
        while not ended and kills < 20:
            process = start(config, name, *slow, *more)
            wait_for(run / ".lock", process)
            more = ("--resume", "--from-start")
            time.sleep(rng.uniform(0.0, 1.2 * whole_s))
            ended = process.poll() is not None
            if not ended:
                kills += 1
                process.kill()
            assert process.wait() in ((0,) if ended else (0, -signal.SIGKILL))
        if not ended:
            train(config, name, *slow, *more)
        assert differing(whole, run) == []
        if kills == 20:
            break
    assert kills == 20


def test_five_steps_kill_and_five_more_equal_ten(config: Path) -> None:
    whole = train(config, "whole", "checkpoint.every_steps=5")
    process = start(config, "halves", "checkpoint.every_steps=5", "plugins.null.update_s=0.2")
    run = config.parent / "runs" / "halves"
    wait_for(run / "metrics.jsonl", process, '"step":7')
    process.kill()
    process.wait()
    newest = checkpoint.latest(run)
    assert newest is not None
    assert newest.name == "step_5"
    train(config, "halves", "checkpoint.every_steps=5", "--resume")
    assert differing(whole, run) == []
    assert [row["step"] for row in metrics.read(run) if "reward/mean" in row] == list(range(1, 11))


PHASES = {
    "setting up": (("plugins.null.setup_s=30",), "plan.json", ""),
    "scoring": (
        ("reward.functions.slow.fn={rewards}:slow", "eval.at_start=false"),
        "status.json",
        '"phase": "scoring"',
    ),
    # twelve seconds of tokens: a run that waited for their end would be too late
    "generating": (("plugins.null.token_s=1", "eval.at_start=false"), "status.json", '"phase": "sampling"'),
    "updating": (("plugins.null.update_s=30",), "log.txt", "updating"),
    "saving": (("plugins.null.save_s=3", "checkpoint.every_steps=1"), "log.txt", "saving"),
}


WAYS_ON = {"setting up": "so nothing is saved; start it again\n", "updating": "start over with --resume\n"}
"""Before the first step is taken there is nothing to resume from."""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_the_run_within_ten_seconds_in_every_phase(
    config: Path, phase: str, number: signal.Signals, code: int
) -> None:
    settings, file, text = PHASES[phase]
    name = phase.replace(" ", "-")
    run = config.parent / "runs" / name
    rewards = config.parent / "rewards.py"
    rewards.write_text(SLOW_REWARD)
    settings = tuple(setting.replace("{rewards}", str(rewards)) for setting in settings)
    process = start(config, name, "reward.functions.letters.children=2", *settings)
    wait_for(run / file, process, text)
    children = descendants(process)
    process.send_signal(number)
    sent = time.monotonic()
    assert process.wait(timeout=30) == code, (config.parent / f"{name}.log").read_text()
    assert time.monotonic() - sent < 10.0
    assert_gone(children, 3.0)
    output = (config.parent / f"{name}.log").read_text()
    assert WAYS_ON.get(phase, "continue with --resume") in output
    assert "Traceback" not in output
    assert run.exists() == (phase != "setting up")
    train(config, name, *(["--resume"] if run.exists() else []))
    assert (run / "checkpoints" / "step_10").is_dir()


def test_a_signal_between_checkpoints_saves_the_last_published_step(config: Path) -> None:
    process = start(config, "saved", "checkpoint.every_steps=0", "plugins.null.token_s=0.08")
    run = config.parent / "runs" / "saved"
    wait_for(run / "metrics.jsonl", process, '"step":2')
    time.sleep(0.3)
    process.terminate()
    assert process.wait(timeout=30) == 143
    newest = checkpoint.latest(run)
    assert newest is not None
    assert checkpoint.step_of(newest) >= 2
    whole = train(config, "whole", "checkpoint.every_steps=0")
    train(config, "saved", "checkpoint.every_steps=0", "--resume")
    assert differing(whole, run) == []


def test_finish_step_takes_the_step_to_its_end_and_saves_it(config: Path) -> None:
    process = start(config, "finish", "checkpoint.on_signal=finish_step", "plugins.null.update_s=1")
    run = config.parent / "runs" / "finish"
    wait_for(run / "log.txt", process, "updating")
    process.terminate()
    assert process.wait(timeout=30) == 143
    newest = checkpoint.latest(run)
    assert newest is not None
    assert checkpoint.step_of(newest) == 1


def test_no_descendant_outlives_a_driver_that_is_killed(config: Path) -> None:
    process = start(config, "orphans", "plugins.null.token_s=1", "reward.functions.letters.children=3")
    wait_for(config.parent / "runs" / "orphans" / "log.txt", process, "launched")
    children = descendants(process)
    assert len(children) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert_gone(children, 3.0)
