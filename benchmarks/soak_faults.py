"""Faults of the soak: a plan that the seed determines, and one injector per fault."""

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from soak_run import Controller, Weather

from rlcore.report import metrics
from rlcore.testing.service import ServiceAnswer
from rlcore.train import checkpoint

FILL_TRIES = 20
DISK_MIB = 2048
NONSENSE: Sequence[ServiceAnswer] = (
    ServiceAnswer(b'{"score": NaN}'),
    ServiceAnswer(b'{"score": 1e999}'),
    ServiceAnswer(b'{"score": 1, "info": ' + b"[" * 900 + b"]" * 900 + b"}"),
    ServiceAnswer(b"[" * 50_000),
    ServiceAnswer(b'{"score": "8"}', content_type="text/html; charset=nonsense"),
    ServiceAnswer(b'{"score": 0.5}' + b" " * 5_000_000),
    ServiceAnswer(b'{"score": 0.5}', cut_at=5),
    ServiceAnswer(b"\xff\xfe\x00", headers={"Content-Encoding": "gzip"}),
    ServiceAnswer({}, status=307, headers={"Location": "http://127.0.0.1:1/"}),
    ServiceAnswer({}, status=404),
)


@dataclass(frozen=True)
class Fault:
    """One fault of the plan."""

    step: int
    """The fault is injected when the metrics have reached this step."""
    kind: str
    seed: int


@dataclass
class Stage:
    """The targets of faults: the controller, the services and the run directory."""

    work: Path
    controller: Controller
    weather: Weather
    mounted: bool
    end_s: float
    chance: random.Random = field(default_factory=random.Random)
    must_say: str = ""
    """The checkpoint that the next life must report as skipped; empty: none."""


Inject = Callable[[Stage], str]
"""Injects the fault and returns a note; empty: it had no target."""


def killed(kind: str, everyone: bool = False) -> Inject:
    """SIGKILL to a child of this kind, or to all of them."""

    def inject(stage: Stage) -> str:
        found = stage.controller.children(kind)
        victims = found if everyone else stage.chance.sample(found, min(1, len(found)))
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return f"{len(victims)} killed" if victims else ""

    return inject


def stopped(kind: str) -> Inject:
    """SIGSTOP to a child of this kind (empty: the controller), then SIGCONT."""

    def inject(stage: Stage) -> str:
        found = stage.controller.children(kind) if kind else [stage.controller.process]
        pause_s = stage.chance.uniform(0.3, 3.0)
        for process in stage.chance.sample(found, min(1, len(found))):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                time.sleep(pause_s)
                process.resume()
        return f"{pause_s:.1f} s" if found else ""

    return inject


def services_stall(stage: Stage) -> str:
    """For some time, every answer of the services is late."""
    stage.weather.stall_s = stage.chance.uniform(0.2, 1.5)
    time.sleep(2.0)
    found, stage.weather.stall_s = stage.weather.stall_s, 0.0
    return f"{found:.1f} s later"


def services_refuse(stage: Stage) -> str:
    """The services answer 429 and 503 to the next requests."""
    stage.weather.refusals = stage.chance.randint(5, 40)
    return f"{stage.weather.refusals} refused"


def services_hang_up(stage: Stage) -> str:
    """The services close the next connections before an answer."""
    stage.weather.drops = stage.chance.randint(1, 20)
    return f"{stage.weather.drops} dropped"


def services_talk_nonsense(stage: Stage) -> str:
    """Some answers are hostile: each fails its sample."""
    stage.weather.nonsense = stage.chance.choices(NONSENSE, k=stage.chance.randint(1, 6))
    return f"{len(stage.weather.nonsense)} answers"


def clock_jumps(stage: Stage) -> str:
    """`time.time` of the controller jumps by up to ten years, forward or back."""
    offset = stage.chance.choice([-1, 1]) * 10 ** stage.chance.uniform(0, 8.5)
    (stage.work / "clock").write_text(f"{offset:.3f}")
    return f"{offset:+.0f} s"


def endpoint_flooded(stage: Stage) -> str:
    """Idle connections and garbage to every port on which the controller listens."""
    ports = [
        connection.laddr.port
        for connection in stage.controller.process.net_connections("tcp")
        if connection.status == "LISTEN"
    ]
    sockets = []
    for number in range(200 if ports else 0):
        with contextlib.suppress(OSError):
            peer = socket.create_connection(("127.0.0.1", stage.chance.choice(ports)), 1.0)
            sockets.append(peer)
            if number % 3:
                peer.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\n")
            if number % 3 == 2:
                peer.sendall(stage.chance.randbytes(64) + b"\r\n\r\n")
    time.sleep(1.0)
    for peer in sockets:
        peer.close()
    return f"{len(sockets)} connections" if sockets else ""


def controller_signalled(number: signal.Signals) -> Inject:
    """The controller gets a signal and ends."""

    def inject(stage: Stage) -> str:
        time.sleep(stage.chance.uniform(0.0, 1.0))  # in any phase of a step
        stage.controller.signal(number)
        return f"exit {stage.controller.wait(stage.end_s)}"

    return inject


def killed_actor(stage: Stage) -> str:
    """SIGKILL to a process of the actor. Its weights are lost, so the run ends with an error."""
    note = killed("actor")(stage)
    return f"{note}, exit {stage.controller.wait(stage.end_s)}" if note else ""


def checkpoint_damaged(stage: Stage) -> str:
    """SIGKILL, then a flipped, cut or missing file in the newest checkpoint. The next life must use the previous
    one."""
    run = stage.controller.run
    if len(list((run / "checkpoints").glob("step_*"))) < 2:
        return ""
    stage.controller.signal(signal.SIGKILL)
    stage.controller.wait(stage.end_s)
    newest = max((run / "checkpoints").glob("step_*"), key=checkpoint.step_of)
    path = stage.chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    how = stage.chance.choice(["flipped", "cut", "removed"])
    data = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
    else:
        if how == "flipped" and data:
            data[stage.chance.randrange(len(data))] ^= 1 << stage.chance.randrange(8)
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    stage.must_say = newest.name
    return f"{newest.name}/{path.relative_to(newest)} {how}"


def records_torn(stage: Stage) -> str:
    """SIGKILL, then half a line at the end of the records, as after a crash."""
    stage.controller.signal(signal.SIGKILL)
    stage.controller.wait(stage.end_s)
    run = stage.controller.run
    for path in (run / metrics.METRICS, *sorted((run / metrics.TRAJECTORIES).glob("*.jsonl"))[-1:]):
        with path.open("ab") as file:
            file.write(stage.chance.choice([b'{"step":1', b"\x00" * 40, b"\xff"]))
    return "torn"


def disk_full(stage: Stage) -> str:
    """The disk of the run directory is full until this has ended the run."""
    runs = stage.controller.run.parent
    if stage.mounted:
        fill(runs)
    else:  # not the error of a full disk, but the nearest without one
        stage.controller.process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
    try:
        return f"exit {stage.controller.wait(stage.end_s)}"
    finally:
        if stage.mounted:
            remount(runs, f"size={DISK_MIB}m")


def fill(path: Path) -> None:
    """Make the file system as small as its contents; retries while these grow."""
    for _ in range(FILL_TRIES - 1):
        with contextlib.suppress(subprocess.CalledProcessError):
            remount(path, f"size={shutil.disk_usage(path).used}")
            return
    remount(path, f"size={shutil.disk_usage(path).used}")


def remount(path: Path, options: str) -> None:
    """Change the size of the file system."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def disk(path: Path, keep: bool) -> Iterator[bool]:
    """A separate file system at `path`, unmounted after the block unless `keep`; False without the right to mount."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "soak", str(path)]
    mounted = not subprocess.run(command, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted and not keep:
            subprocess.run(["umount", "-l", str(path)], check=True)


RETRIED: dict[str, Inject] = {
    "kill rollout": killed("rollout"),
    "kill all rollouts": killed("rollout", everyone=True),
    "kill model": killed("model"),
    "kill function": killed("function"),
    "kill all functions": killed("function", everyone=True),
    "stall rollout": stopped("rollout"),
    "stall model": stopped("model"),
    "stall function": stopped("function"),
    "stall controller": stopped(""),
    "stall services": services_stall,
    "services refuse": services_refuse,
    "services hang up": services_hang_up,
    "clock jump": clock_jumps,
    "flood endpoint": endpoint_flooded,
}
"""Faults after which the run equals the undisturbed one, bit for bit."""
VLLM: dict[str, Inject] = {
    "kill engine": killed("engine"),
    "kill all engines": killed("engine", everyone=True),
    "stall engine": stopped("engine"),
}
"""Faults of the processes below a rollout replica of vLLM."""
DATA: dict[str, Inject] = {
    "kill tool": killed("tool"),
    "kill agent": killed("agent"),
    "services talk nonsense": services_talk_nonsense,
}
"""Faults of data, which fail samples."""
ACTOR: dict[str, Inject] = {"kill actor": killed_actor}
"""Faults of an actor on transformers, which end the controller's life."""
CONTROLLER: dict[str, Inject] = {
    "kill controller": controller_signalled(signal.SIGKILL),
    "terminate controller": controller_signalled(signal.SIGTERM),
    "interrupt controller": controller_signalled(signal.SIGINT),
    "damage checkpoint": checkpoint_damaged,
    "tear records": records_torn,
    "full disk": disk_full,
}
"""Faults that end the controller's life; the next life resumes the run."""
FAULTS = RETRIED | VLLM | DATA | ACTOR | CONTROLLER
ENDS: dict[str, tuple[int, ...]] = {
    "kill controller": (-9,),
    "terminate controller": (143,),
    "interrupt controller": (130,),
    "damage checkpoint": (-9,),
    "tear records": (-9,),
    "full disk": (1, 2),
    "kill actor": (2,),
}
"""The exit status of the controller after each of them."""


def plan(seed: int, all_faults: bool, calm: int, gap: int, engine: str = "null") -> Iterator[Fault]:
    """An endless series of shuffled decks. A deck has each fault that ends the controller once, and every other `calm`
    times."""
    chance = random.Random(seed)
    step = 3
    retried = [kind for kind in RETRIED if engine != "hf" or "rollout" not in kind]  # the actor samples itself
    while True:
        others = [*retried, *(VLLM if engine == "vllm" else ()), *(DATA if all_faults else ())] * calm
        deck = [*others, *(() if engine == "null" else ACTOR), *CONTROLLER]
        chance.shuffle(deck)
        for kind in deck:
            step += chance.randint(2, gap)
            yield Fault(step, kind, chance.getrandbits(32))
