"""Ray after things went wrong: a driver killed, a signal, another run in the way. A dead rank: `test_rank_names.py`."""

import os
import secrets
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import psutil
import pytest
from rlcore_ray.testing import NEEDS_RAY

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.runs import run_settings

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("machine"),
    NEEDS_RAY,
]

DEADLINE_S = 120.0


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    """A run on Ray whose updates take long enough to be interrupted; every step is saved."""
    slow = {
        "train.name": "run",
        "train.max_steps": 200,
        "checkpoint.every_steps": 1,
        "plugins.ray.object_store_gib": 0.1,
        "plugins.null.update_s": 0.2,
    }
    return run_settings(directory, 400, **slow | more)


@contextmanager
def training(values: Mapping[str, Any], **more: Any) -> Iterator[subprocess.Popen[str]]:
    """`rlcore train` as a process, killed at the end if it still runs."""
    command = [sys.executable, "-m", "rlcore", "train", *(f"{key}={value}" for key, value in values.items())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **more)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(what: str, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Return when it holds; fail when it does not in time."""
    ends_at = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < ends_at, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.05)


def steps(directory: Path) -> int:
    """Steps that the run has written down."""
    log = directory / "runs" / "run" / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def ended(process: subprocess.Popen[str]) -> bool:
    """False while the run continues; fails with its last output if it has ended too early."""
    assert process.poll() is None, process.communicate()[1]
    return False


def actors_of(process: int) -> list[int]:
    """The processes of our actors under a driver."""
    found = []
    for pid in descendants(process):
        try:
            if b"ActorHost" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_a_killed_driver_takes_its_ray_along(tmp_path: Path) -> None:
    """Scorecard case 35."""
    with training(settings(tmp_path)) as run:
        wait_for("two steps", lambda: steps(tmp_path) >= 2 or ended(run))
        ours = descendants(run.pid)
        assert actors_of(run.pid)
        run.kill()
        wait_for("the end of every process", lambda: not any(map(is_running, ours)), 3)


CLIENT = """
import os, sys
if sys.argv[2] == "stranger":
    del os.environ["RAY_AUTH_TOKEN"]
    os.environ["RAY_AUTH_MODE"] = "disabled"
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, 10)
    print("served")
except AuthenticationError as error:
    print("refused:", error)
"""


def answer_to(who: str, address: str) -> str:
    """The result of a client of Ray's head."""
    command = [sys.executable, "-c", CLIENT, address, who]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def listening(processes: set[int]) -> Iterator[tuple[str, str, int]]:
    """Name of the program, address and port of every socket on which one of these waits for connections."""
    for pid in processes:
        try:
            process = psutil.Process(pid)
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    yield process.name(), socket.laddr.ip, socket.laddr.port
        except psutil.Error:
            continue


def names(parent: int) -> set[str]:
    """Names of the programs that this process and its descendants have started and that run."""
    found = set()
    for pid in descendants(parent):
        with suppress(psutil.Error):
            found.add(psutil.Process(pid).name())
    return found


def test_a_signal_ends_run_actors_and_ray_which_only_this_machine_with_its_token_could_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scorecard cases 34 and 40."""
    token = secrets.token_hex(32)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with training(settings(tmp_path, **{"plugins.null.update_s": 0.5})) as run:
        wait_for("two steps", lambda: steps(tmp_path) >= 2 or ended(run))
        ours = descendants(run.pid)
        open_ports = list(listening(ours))
        assert len(open_ports) >= 3, "Ray's servers and its actors"
        assert {address.removeprefix("::ffff:") for _, address, _ in open_ports} == {"127.0.0.1"}
        [head_port] = [port for name, _, port in open_ports if name == "gcs_server"]
        assert answer_to("driver", f"127.0.0.1:{head_port}") == "served\n"
        assert "InvalidAuthToken" in answer_to("stranger", f"127.0.0.1:{head_port}")
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 143, errors
        wait_for("the end of every process", lambda: not any(map(is_running, ours)), 20)
    directory = tmp_path / "runs" / "run"
    assert list((directory / "checkpoints").glob("step_*"))
    for name in ("config.yaml", "plan.json", "log.txt"):
        assert token not in (directory / name).read_text()


def test_a_signal_while_ray_is_being_started_leaves_nothing_of_it(tmp_path: Path) -> None:
    with training(settings(tmp_path)) as run:
        wait_for("the first process of Ray", lambda: "gcs_server" in names(run.pid) or ended(run))
        sent, seen = time.monotonic(), descendants(run.pid)
        run.send_signal(signal.SIGTERM)
        while run.poll() is None:
            seen |= descendants(run.pid)
            time.sleep(0.02)
        assert time.monotonic() - sent < 10.0
        assert run.returncode == 143, run.communicate()[1]
    assert steps(tmp_path) == 0, "Ray was being started"
    wait_for("the end of every process", lambda: not any(map(is_running, seen)), 10)


def test_signals_for_the_process_group_reach_no_process_of_ray_whose_token_was_never_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal that closes leaves the run its Ray. `timeout 1h rlcore train` ends the whole group, and Ray leaves
    when the last step is saved."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    token, seen = tmp_path / "home" / ".ray" / "auth_token", set[int]()

    def has_stepped(num: int) -> bool:
        with suppress(FileNotFoundError):
            seen.add(stat.S_IMODE(token.stat().st_mode))
        return steps(tmp_path) >= num or ended(run)

    rare = {"checkpoint.every_steps": 1000, "plugins.null.update_s": 0, "plugins.null.token_s": 0.05}
    with training(settings(tmp_path, **rare), start_new_session=True, umask=0) as run:
        wait_for("two steps", lambda: has_stepped(2))
        assert seen == {0o600}
        os.killpg(run.pid, signal.SIGHUP)  # as the kernel does to the terminal's foreground group
        after = steps(tmp_path)
        wait_for("three more steps", lambda: has_stepped(after + 3))
        ours = descendants(run.pid)
        [session] = Path(gettempdir(), "ray").glob(f"session_*_{run.pid}")
        os.killpg(run.pid, signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 143, errors
        assert "saved; the last checkpoint is" in errors
        assert "leaving Ray took longer" not in errors
        assert not session.exists()
        wait_for("the end of every process", lambda: not any(map(is_running, ours)), 20)


HEAD = """
import os, sys
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray
context = ray.init("local", num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
print("head:", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture
def head() -> Iterator[tuple[str, int]]:
    """The address of a Ray cluster with room for one run, and the process that started it."""
    with subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        for line in process.stdout or ():
            if line.startswith("head: "):
                yield line.split()[1], process.pid
                break
        process.communicate("", timeout=60)


def test_a_second_run_on_one_cluster_names_the_first_and_starts_when_the_first_is_killed(
    head: tuple[str, int], tmp_path: Path
) -> None:
    """The actors of a driver that had joined are not descendants of it, and end, too."""
    address, cluster = head
    joined = {"plugins.ray.address": address, "plugins.ray.placement_s": 2}
    values = settings(tmp_path, **joined)
    del values["plugins.ray.object_store_gib"]
    with training(values) as first:
        wait_for("two steps", lambda: steps(tmp_path) >= 2 or ended(first))
        with training({**values, "train.name": "second"}) as second:
            _, errors = second.communicate(timeout=60)
            assert second.returncode == 2
            assert "pool 'main' wants 1 CPU" in errors
            assert "held by: rlcore run main" in errors
        theirs = actors_of(cluster)
        assert theirs
        first.kill()
        first.wait()
        wait_for("the end of its actors", lambda: not any(map(is_running, theirs)), 10)
    with training({**values, "train.name": "third", "train.max_steps": 1, "plugins.ray.placement_s": 60}) as third:
        _, errors = third.communicate(timeout=DEADLINE_S)
        assert third.returncode == 0, errors
