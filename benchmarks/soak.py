"""Runs every feature for a given time, with faults drawn from a seed, and then audits the run.

    .venv/bin/python benchmarks/soak.py [--minutes M] [--seed S] [--scene tools|program|single]
        [--engine null|hf|vllm] [--faults retried|all]

The run is synchronous. It has two rollout replicas, a reward model of two replicas, and reward functions and agents in
child processes. An HTTP reward service and a judge have two addresses each. A checkpoint is written every five steps.
Actor, rollout and reward model are null ones or tiny models. With `--engine hf`, two ranks of an actor on transformers
also sample. With `--engine vllm`, which needs the Python of .venv-vllm, there are one rank and two replicas of vLLM.
The seed decides the steps of the faults. The first faults of the plan are printed, and each one when it is injected. A
run that has ended is resumed.

Prints one JSON line. The exit status is 0 if all of these hold, else 1:

* Every sample of every prompt is in the records once per epoch.
* Memory, descriptors and threads of the controller do not grow.
* No process outlives the controller, and it prints no traceback.
* With `--faults retried`, metrics, trajectories and the last checkpoint equal those of an undisturbed run of as many
  steps, bit for bit, if the engine repeats them. The null engine does, and hf with `--scene single`. The low bits of a
  model's logits depend on the rows that are decoded together, and for agents' turns these depend on the clock.

The fault of the clock changes `time.time` of the controller's process, which is replaced before rlcore is imported.
Children, other clocks and `datetime` stay as they are. The fault of the disk makes a tmpfs as small as its contents;
without the right to mount one, it limits the size of files.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import machine, say
from soak_audit import Sample, accounted, resources, sampled
from soak_bounds import BOUNDS, Bounds
from soak_faults import ACTOR, CONTROLLER, ENDS, FAULTS, Fault, Stage, disk, plan
from soak_run import CHECKPOINT_STEPS, Controller, Weather, config, last_step, write

from rlcore.testing.runs import differing
from rlcore.testing.service import serving

NAME = "soak"
SETTLED_STEPS = 10
"""Steps of a life before its resources count."""
PRINTED = 20
"""Number of faults that are printed before the run begins."""
SCENES = ("tools", "program", "single")
"""A loop with tools, a program that talks to the policy's endpoint, or the core's single turn."""
REFERENCE_S = 7200.0


class Broken(Exception):
    """The run broke a promise, or did too little for a verdict."""


@dataclass
class Soak:
    """One soak and its observations."""

    options: argparse.Namespace
    work: Path
    weather: Weather
    mounted: bool
    bounds: Bounds
    lives: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    must_say: str = ""
    ends_at: float = math.inf
    """The end of the soak, known after the first step."""

    def go(self) -> int:
        """Run until the time is up, then to a clean end; returns the number of steps.

        The time begins at the first step, so a slow start does not shorten the soak.
        """
        planned, faults = itertools.tee(self._plan())
        for fault in itertools.islice(planned, PRINTED):
            say(f"planned: step {fault.step}: {fault.kind}")
        following = next(faults)
        while self._has_time():
            following = self._live(following, faults)
        steps = last_step(self.work / "runs" / NAME) + 2
        last = self._begin(f"train.max_steps={steps}")
        code = last.wait(self.bounds.start_s + 2 * self.bounds.stuck_s)
        self._check_end(last, [], code, (0,))
        return steps

    def facts(self) -> dict[str, Any]:
        """Injected faults, resource samples and problems, for the JSON line."""
        return {
            "lives": self.lives,
            "injected": dict(sorted(self.injected.items())),
            "nothing_to_do_it_to": dict(self.skipped),
            "requests_to_services": self.weather.served,
            "first_step_after_s": [round(seconds, 1) for seconds in self.resumed_s],
            "full_disk": "tmpfs" if self.mounted else "limit of file size",
            "samples": [asdict(sample) for sample in self.samples],
            "problems": self.problems,
        }

    def _plan(self) -> Iterator[Fault]:
        options = self.options
        return plan(options.seed, options.faults == "all", options.calm, options.gap, options.engine)

    def _has_time(self) -> bool:
        enough = self.options.num_faults and sum(self.injected.values()) >= self.options.num_faults
        return time.monotonic() < self.ends_at and not enough

    def _begin(self, *more: str) -> Controller:
        for mark in (self.work / "pids").iterdir():
            mark.unlink()
        if self.lives:
            more = ("--resume", "--from-start", *more)
        self.lives += 1
        return Controller(self.work, NAME, self.lives, *more)

    def _live(self, following: Fault, faults: Any) -> Fault:
        """One life of the controller, until a fault or the end of the time ends it; returns the next fault."""
        controller = self._begin()
        first = before = last_step(controller.run)
        begun = False
        stage = Stage(self.work, controller, self.weather, self.mounted, self.bounds.end_s)
        moved = time.monotonic()
        while self._has_time():
            if (code := controller.ended()) is not None:
                if not last_step(controller.run):
                    raise Broken(f"it ended with {code} before its first step: {controller.text()[-500:]}")
                self._check_end(controller, [], code, ())
                return following
            step = last_step(controller.run)
            if step != before:
                if not begun:
                    self._check_begin(controller)
                    begun, first = True, step
                    self.ends_at = min(self.ends_at, time.monotonic() + 60.0 * self.options.minutes)
                before, moved = step, time.monotonic()
            elif time.monotonic() - moved > (limit_s := self.bounds.stuck_s if begun else self.bounds.start_s):
                controller.kill()
                raise Broken(f"no step after {before} in {limit_s:.0f} s: {controller.text()[-500:]}")
            if step < following.step or not begun:
                time.sleep(0.05)
                continue
            if step - first >= SETTLED_STEPS and controller.is_whole():
                with contextlib.suppress(psutil.NoSuchProcess):  # the next check finds that it ended
                    self.samples.append(sampled(controller.process, self.lives, step))
            fault, following = following, next(faults)
            if self._inject(fault, stage):
                return following
            moved = time.monotonic()
        children = controller.children()
        controller.process.terminate()
        # before its first step it may not handle signals yet
        allowed = (143,) if begun else (143, -signal.SIGTERM)
        self._check_end(controller, children, controller.wait(self.bounds.end_s), allowed)
        return following

    def _inject(self, fault: Fault, stage: Stage) -> bool:
        """Inject the fault; True if it ended the controller."""
        controller = stage.controller
        stage.chance = random.Random(fault.seed)
        children = controller.children()
        ending = fault.kind in CONTROLLER or fault.kind in ACTOR
        try:
            note = FAULTS[fault.kind](stage)
        except psutil.NoSuchProcess:  # it has ended meanwhile, which the next check finds
            note = ""
        say(f"step {last_step(controller.run)}: {fault.kind}: {note or 'nothing to do it to'}")
        (self.injected if note else self.skipped)[fault.kind] += 1
        if not (ending and note):
            return False
        self.must_say, stage.must_say = stage.must_say, ""
        self._check_end(controller, children, controller.wait(self.bounds.end_s), ENDS[fault.kind])
        return True

    def _check_begin(self, controller: Controller) -> None:
        """Check a life after its first step."""
        self.resumed_s.append(time.monotonic() - controller.began)
        if self.must_say and self.must_say not in controller.text():
            self.problems.append(f"life {self.lives} passes over {self.must_say} and does not say so")
        self.must_say = ""

    def _check_end(
        self, controller: Controller, children: Sequence[psutil.Process], code: int, allowed: Sequence[int]
    ) -> None:
        """Check the end of a life: as expected, without a traceback, and together with all processes that it
        started."""
        text = controller.text()
        if code not in allowed:
            self.problems.append(f"life {self.lives} ended with {code}: {text[-500:]}")
        if "Traceback" in text:
            self.problems.append(f"life {self.lives} printed a traceback: {text[text.index('Traceback') :][:1500]}")
        _, alive = psutil.wait_procs(list(children), timeout=self.bounds.gone_s)
        if alive:
            self.problems.append(f"life {self.lives} left behind {len(alive)} processes")


def soak(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run the soak and its reference, and audit them."""
    write(work, options.engine)
    weather, calm = Weather(), Weather()
    with ExitStack() as stack:
        mounted = stack.enter_context(disk(work / "runs", keep=options.work is not None))
        for name, services, update_s in (("config", weather, options.pace_s), ("calm", calm, 0.0)):
            urls = {
                "score": [f"{stack.enter_context(serving(services.score)).url}/score" for _ in range(2)],
                "judge": [f"{stack.enter_context(serving(services.judge)).url}/v1" for _ in range(2)],
            }
            settings = config(work, options.scene, urls, options.seed, update_s, options.engine)
            (work / f"{name}.json").write_text(json.dumps(settings))
        state = Soak(options, work, weather, mounted, BOUNDS[options.engine])
        began = time.monotonic()
        different, run = None, work / "runs" / NAME
        try:
            steps = state.go()
            took_s = time.monotonic() - began
            if options.faults == "retried" and repeats(options):
                different = differences(work, steps)
        except (Broken, subprocess.TimeoutExpired) as error:  # the steps until then are still audited
            steps, took_s = last_step(run), time.monotonic() - began
            state.problems.append(" ".join(str(error).split()))
        account = accounted(run, steps)
        log = run / "log.txt"
        if log.exists() and "Traceback" in log.read_text(errors="replace"):
            state.problems.append("log.txt holds a traceback")
    state.problems += account.problems + resources(state.samples, state.bounds.growth)
    if different:
        state.problems.append(f"it differs from the undisturbed run in {len(different)}: {different[:5]}")
    return {
        "name": "soak",
        **{name: getattr(options, name) for name in ("seed", "scene", "engine", "faults", "calm", "gap", "pace_s")},
        "seconds": round(took_s),
        "steps": steps,
        "checkpoint_steps": CHECKPOINT_STEPS,
        "bounds": asdict(state.bounds),
        **state.facts(),
        "statuses": dict(account.statuses),
        "ended_by": dict(account.ended_by),
        "differences": None if different is None else len(different),
        **machine(),
    }


def repeats(options: argparse.Namespace) -> bool:
    """True if an undisturbed run has the same bits. A model's logits depend on the rows that are decoded together."""
    return bool(options.engine == "null" or (options.engine == "hf" and options.scene == "single"))


def differences(work: Path, steps: int) -> list[str]:
    """Differences from an undisturbed run of `steps` steps, one line each."""
    (work / "clock").unlink(missing_ok=True)
    undisturbed = Controller(work, "reference", 0, f"train.max_steps={steps}", config="calm.json")
    if code := undisturbed.wait(REFERENCE_S):
        return [f"the undisturbed run ended with {code}"]
    return differing(work / "runs" / NAME, work / "runs" / "reference")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scene", choices=SCENES, default="tools", help="who the agent is")
    parser.add_argument("--engine", choices=("null", "hf", "vllm"), default="null", help="who samples and trains")
    parser.add_argument("--faults", choices=("retried", "all"), default="retried")
    parser.add_argument("--calm", type=int, default=4, help="other faults for each that ends the controller")
    parser.add_argument("--gap", type=int, default=8, help="steps between two faults at most")
    parser.add_argument("--pace-s", type=float, default=0.3, help="seconds that an update takes")
    parser.add_argument("--num-faults", type=int, default=0, help="end after so many; 0: when the time is up")
    parser.add_argument("--smoke", action="store_true", help="seven faults, less than a minute")
    parser.add_argument("--out", type=Path, help="a file for the result, too")
    parser.add_argument("--work", type=Path, help="a new directory to work in, which is kept")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.minutes, options.num_faults, options.calm, options.gap, options.pace_s = 4.0, 7, 1, 3, 0.05
    with tempfile.TemporaryDirectory(prefix="rlcore-soak-", ignore_cleanup_errors=True) as scratch:
        work = options.work or Path(scratch) / "work"
        work.mkdir(parents=True)
        result = soak(options, work.resolve())
    line = json.dumps(result)
    print(line)
    if options.out:
        options.out.write_text(line + "\n")
    for problem in result["problems"]:
        say(f"problem: {problem}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.exit(main())
