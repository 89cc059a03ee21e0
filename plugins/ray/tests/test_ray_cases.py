"""Cases of the scorecard on Ray (7, 8, 22, 23, 32 to 34, 37), all on one cluster, without torch."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.runs import differing, run_settings
from rlcore.train import checkpoint, train

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(420),
    pytest.mark.xdist_group("machine"),
    NEEDS_RAY,
]

DEADLINE_S = 120.0
CLUSTER = """
import os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
context = ray.init("local", num_cpus=8, object_store_memory=100 * 2**20, include_dashboard=False)
print("head:", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a Ray cluster, whose token is in the environment meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with process:
            try:
                yield next(line.split()[1] for line in process.stdout or () if line.startswith("head: "))
            finally:
                process.communicate("", timeout=60)


@pytest.fixture(scope="module")
def story(head: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of `ray_cases.py`."""
    here = tmp_path_factory.mktemp("cases")
    command = [sys.executable, str(Path(__file__).parent / "ray_cases.py"), head, str(here)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((here / "told.json").read_text())
    return found


def test_a_worker_of_another_interface_is_refused_before_ray_is_asked_for_anything(story: dict[str, Any]) -> None:
    """Case 37."""
    assert story["misfit"]["code"] == 2
    assert "needs a RewardReplica for backend 'misfit': none is offered" in story["misfit"]["said"]
    assert "for Sibling, which is another interface" in story["misfit"]["said"]
    assert story["misfit"]["held"] == 0.0


def test_an_address_is_refused_where_ray_is_there_already(story: dict[str, Any]) -> None:
    assert (story["joined"]["code"], story["joined"]["lines"]) == (2, 1)
    assert "Ray is already initialised in this process" in story["joined"]["said"]


def test_what_a_rollout_actor_owes_when_it_dies_is_sampled_once_by_its_successor(story: dict[str, Any]) -> None:
    """Case 22."""
    assert story["rollout"] == {"codes": [0, 0], "died": True, "differing": []}


def test_an_actor_that_missed_a_version_ends_the_run_before_the_update(story: dict[str, Any]) -> None:
    """Case 23."""
    assert story["forgets"]["code"] == 2
    assert "sampled with version 1 of the weights, the step begins with version 2" in story["forgets"]["said"]


def test_a_full_disk_in_the_actors_process_is_named_and_the_last_checkpoint_stays_good(story: dict[str, Any]) -> None:
    """Case 33."""
    full = story["full"]
    assert full["code"] == 2
    assert "actor[0].write_snapshot(): OSError: [Errno 28] No space left on device" in full["said"]
    assert f"last checkpoint: {full['path']}, continue with --resume" in full["said"]
    assert full["last"] == 1


def test_a_reward_actor_that_is_killed_costs_no_sample_and_serves_again(story: dict[str, Any]) -> None:
    """Case 7."""
    who = story["who"]
    assert (who["first"], who["good"], who["ids"]) == (3, 60, 60)
    assert who["victim"] < 60
    assert who["ejections"] >= 1
    assert who["ejected"] == 0.0


def test_a_slow_reward_actor_gets_so_few_calls_that_the_99th_percentile_does_not_see_it(story: dict[str, Any]) -> None:
    """Case 8."""
    counts = story["uneven"]["counts"]
    assert sum(counts) == 600
    assert len(counts) < 3 or counts[0] <= 6


def test_a_stuck_actor_is_killed_and_replaced_and_a_blocked_controller_loses_no_item(story: dict[str, Any]) -> None:
    probe = story["probe"]
    assert probe["items"] == list(range(30))
    assert probe["stuck"] == "probe[0].stuck() took longer than 3 s; its actor was killed"
    assert probe["events"] == [["lost", "probe[0].stuck() took longer than 3 s"], ["restored", ""]]
    assert probe["replaced"]


def test_a_value_that_cannot_be_pickled_or_read_is_an_error_of_its_call_and_the_actor_stays_in_service(
    story: dict[str, Any],
) -> None:
    unsent = "the result cannot be sent to the parent: TypeError: cannot pickle '_thread.lock' object"
    assert story["probe"]["crossing"] == [
        "probe[0].take(): the arguments cannot be read in the worker's process: ModuleNotFoundError: No module named "
        "'only_here'",
        f"probe[0].lock(): {unsent}",
        0,
        1,
        f"probe[0].locks(): {unsent}",
    ]
    assert story["probe"]["stayed"]


def test_every_run_released_what_it_acquired(story: dict[str, Any]) -> None:
    assert story["held"] == 0.0


def values(directory: Path, name: str, **more: Any) -> dict[str, Any]:
    """A run of six steps."""
    return run_settings(directory, 16, **{"train.name": name, "train.max_steps": 6, "checkpoint.every_steps": 1} | more)


def started(directory: Path, settings: dict[str, Any], *more: str) -> "subprocess.Popen[str]":
    """`rlcore train` as a process."""
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", *more]
    command += [f"{key}={value}" for key, value in settings.items()]
    log = (directory / f"{settings['train.name']}.err").open("w")
    with log:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True)


def wait_for(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    ends_at = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.02)


def trained_here(settings: dict[str, Any], resume: bool) -> None:
    """The run goes to its end without Ray and without delays."""
    plain = {key: value for key, value in settings.items() if not key.startswith(("plugins.", "cluster."))}
    train({"plugins": {"null": {}}}, *(f"{key}={value}" for key, value in plain.items()), resume=resume)


PHASES = {
    "setup": ({"plugins.null.setup_s": 20}, "plan.json", ""),
    "generating": ({"plugins.null.token_s": 1.0}, "status.json", '"phase": "sampling"'),
    "updating": ({"plugins.null.update_s": 20}, "log.txt", "updating"),
    "saving": ({"plugins.null.save_s": 3}, "log.txt", "saving"),
}


def ended_by_a_signal(run: "subprocess.Popen[str]", directory: Path, name: str, file: str, text: str) -> str:
    """The output of a run that gets SIGTERM when a file of its directory has this text; its actors have ended, too."""
    path = directory / "runs" / name / file

    def reached() -> bool:
        assert run.poll() is None, (directory / f"{name}.err").read_text()
        return path.exists() and text in path.read_text()

    wait_for(f"{name}: {text}", reached)
    ours = descendants(run.pid)
    run.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert run.wait(timeout=30) == 143, (directory / f"{name}.err").read_text()
    assert time.monotonic() - sent < 10.0, (directory / f"{name}.err").read_text()
    wait_for("the end of every process", lambda: not any(map(is_running, ours)), 5)
    output = (directory / f"{name}.err").read_text()
    assert "Traceback" not in output
    return output


def test_a_signal_in_each_phase_ends_the_run_and_its_actors_and_it_can_be_resumed(head: str, tmp_path: Path) -> None:
    joined = {"plugins.ray.address": head, "cluster.threads": 1}
    settings = {name: values(tmp_path, name, **joined | more) for name, (more, _, _) in PHASES.items()}
    runs = {name: started(tmp_path, setting) for name, setting in settings.items() if name != "saving"}
    try:
        for name, (_, file, text) in PHASES.items():
            if name == "saving":  # its phase ends by itself
                runs[name] = started(tmp_path, settings[name])
            output = ended_by_a_signal(runs[name], tmp_path, name, file, text)
            # Before the first step has been taken nothing is kept that a resume could use.
            is_begun = "nothing is saved; start it again" not in output
            assert ("continue with --resume" in output) is is_begun
            # Ray's handler of the signal, which has a process aborted, is gone when Ray has been joined.
            assert name == "setup" or "SIGTERM received" not in output
            trained_here(settings[name], resume=is_begun)
            assert (tmp_path / "runs" / name / "checkpoints" / "step_6").is_dir()
    finally:
        for run in runs.values():
            run.kill()
            run.wait()


def test_a_checkpoint_is_complete_when_it_is_written_and_not_when_the_update_ends(head: str, tmp_path: Path) -> None:
    slow = {"plugins.null.update_s": 12, "plugins.null.save_s": 0.3, "checkpoint.shutdown_s": 6}
    setting = values(tmp_path, "writing", **{"plugins.ray.address": head, "cluster.threads": 1} | slow)
    run = started(tmp_path, setting)
    try:
        output = ended_by_a_signal(run, tmp_path, "writing", "log.txt", "step 2: updating")
        written = tmp_path / "runs" / "writing" / "checkpoints" / "step_1"
        assert f"saved; the last checkpoint is {written}; continue with --resume" in output
    finally:
        run.kill()
        run.wait()


def test_a_driver_killed_on_ray_and_resumed_is_bitwise_the_uninterrupted_run(head: str, tmp_path: Path) -> None:
    """Case 32."""
    trained_here(values(tmp_path, "whole"), resume=False)
    joined = {"plugins.ray.address": head, "cluster.threads": 1}
    settings = values(tmp_path, "killed", **joined | {"plugins.null.update_s": 0.3})
    run, directory = started(tmp_path, settings), tmp_path / "runs" / "killed"
    try:
        wait_for("two checkpoints", lambda: len(list((directory / "checkpoints").glob("step_*"))) >= 2)
        os.kill(run.pid, signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    newest = checkpoint.latest(directory)
    assert newest is not None
    assert 2 <= checkpoint.step_of(newest) < 6
    again = started(tmp_path, {**settings, "plugins.null.update_s": 0}, "--resume")
    assert again.wait(timeout=DEADLINE_S) == 0, (tmp_path / "killed.err").read_text()
    assert differing(tmp_path / "runs" / "whole", directory) == []
