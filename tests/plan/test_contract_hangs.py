"""Code of a plugin that does not come back while planning is ended, and the line where it stood is named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlcore.cli import main
from rlcore.errors import PluginError
from rlcore.plan.time_limit import LIMIT, limited
from rlcore.testing.null import SETTINGS
from rlcore.testing.packages import importable, write_package

Refused = Callable[..., str]
PLUGIN = "plugin 'hangs' (hangs 1.0)"
HEAD = """
import time
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import *; from rlcore.contracts.components import *; from rlcore.config.providers import *

def wait():
    {waits}

"""
PLACES = {
    "rlcore_algorithms()": "@hookimpl\ndef rlcore_algorithms(): wait()",
    "requests()": "@hookimpl\ndef rlcore_reward_managers():\n"
    "    return [Component('hangs', print, lambda config, section: wait(), uses_reward_functions=True)]",
    "reward_components()": "@hookimpl\ndef rlcore_reward_managers():\n"
    "    return [Component('hangs', print, reward_components=lambda config, section: wait(), "
    "uses_reward_functions=True)]",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A directory of packages that are installed for the test."""
    with importable(tmp_path / "site") as place:
        yield place


@pytest.fixture
def refused(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """The one line with which a plan is refused, with the plugin `hangs` of a source that waits in a way."""
    monkeypatch.setenv(LIMIT, "0.3")

    def refused(waits: str, source: str, *more: str) -> str:
        write_package(site, "hangs", HEAD.replace("{waits}", waits) + source)
        assert main(["plan", *SETTINGS, *more, "--plugin", "null", "--plugin", "hangs"]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err.removeprefix("rlcore: ")

    return refused


HANGS = {
    "time.sleep(60)": "time.sleep(60)",
    "while True: pass": "while True: pass",
    "lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "retry": "while True:\n        try: time.sleep(60)\n        except Exception: pass",
    "socket": "import socket\n    a, b = socket.socketpair()\n    with a, b: a.recv(1)",
    "thread": "import threading; t = threading.Thread(target=time.sleep, args=(3,), daemon=True); t.start(); t.join()",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", HANGS)
def test_an_import_that_hangs_is_ended_and_the_line_is_named(site: Path, refused: Refused, way: str) -> None:
    began = time.monotonic()
    line = refused(HANGS[way], "wait()")
    assert time.monotonic() - began < 5
    assert line.startswith(f"{PLUGIN}: importing hangs: not done after 0.3 s, in wait at ")
    first = (site / "hangs.py").read_text().splitlines().index("def wait():") + 2
    assert any(f" at {site / 'hangs.py'}:{number};" in line for number in range(first, first + 3))
    assert f"if it is only slow, set {LIMIT} to more" in line


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_hangs_is_ended_and_named(refused: Refused, place: str) -> None:
    settings = [] if place.startswith("rlcore") else ["reward.manager=hangs"]
    line = refused("time.sleep(60)", PLACES[place], *settings)
    assert PLUGIN in line
    assert f"{place}: not done after 0.3 s, in wait at " in line


@pytest.mark.parametrize("limit", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setenv(LIMIT, limit)
    with (
        pytest.raises(PluginError, match=f"{LIMIT}: found '{limit}'; needs a number of seconds above 0"),
        limited("x"),
    ):
        pass


def test_an_earlier_timer_keeps_running_and_a_shorter_one_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    before, handler = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    with limited("x"):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 30
    after = signal.getitimer(signal.ITIMER_REAL)
    assert (after[0] > 30) is (before[0] > 30)
    assert signal.getsignal(signal.SIGALRM) is handler
    monkeypatch.setenv(LIMIT, "10000")
    with limited("x"):
        assert signal.getsignal(signal.SIGALRM) is (handler if before[0] else signal.getsignal(signal.SIGALRM))


@pytest.mark.slow
def test_code_that_catches_everything_is_ended_with_the_process(site: Path) -> None:
    write_package(site, "hangs", "import time\nwhile True:\n    try: time.sleep(60)\n    except: pass\n")
    code = (
        "from rlcore.plan import time_limit as limits; limits._AGAIN_S = 0.05; from rlcore.cli import main; "
        "main(['plan', '--plugin', 'hangs'])"
    )
    env = os.environ | {LIMIT: "0.3", "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    where = f"in <module> at {site / 'hangs.py'}:3"
    assert done.stderr.startswith(f"rlcore: {PLUGIN}: importing hangs: not done after 0.3 s, {where}")
    assert done.stderr.count("\n") == 1
